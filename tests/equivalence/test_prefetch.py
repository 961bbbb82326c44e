"""Micro-batches that are copied to the device ahead train the same, in the memory that is predicted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.execution import prefetch
from brimful.execution.step import StepParts, run_step
from brimful.memory import most_held_bytes
from brimful.prediction import estimate_trace
from brimful.profiling import measure_step
from brimful.settings import Precision, Settings
from brimful.trace import Category
from brimful.trainer import Trainer
from brimful.transforms import host_link
from helpers.late_streams import garbage, stand_in_for_streams
from helpers.tiny_jobs import make_job

AHEAD = Settings(micro_batch_size=4, gradient_accumulation_steps=4, prefetch_inputs=True)
INPUT = 4096
"""Numbers of a sample: more than the model has."""


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(x.unflatten(1, (16, -1)).square().sum(2))
        return made


def mean_square(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


JOB = bf.Job(model=Sums, loss=mean_square, batch=lambda n: {"x": torch.randn(n, INPUT)}, optimizer="adamw")


def test_training_is_the_same_to_the_last_bit() -> None:
    runs = []
    for settings in (AHEAD, replace(AHEAD, prefetch_inputs=False)):
        trainer = Trainer(make_job(), settings, steps=4, device="cpu", show_progress=False)
        runs.append((trainer.fit().losses, [*trainer.model.parameters()]))
    (losses, parameters), (expected_losses, expected) = runs
    assert losses == expected_losses
    assert all(map(torch.equal, parameters, expected))


def test_one_micro_batch_more_is_on_a_gpu_and_none_on_a_cpu() -> None:
    of_one = 4 * INPUT * 4
    peaks = []
    for settings in (AHEAD, replace(AHEAD, prefetch_inputs=False)):
        measured = measure_step(JOB, settings, steps=1).measured_peak_allocated_bytes
        trace = capture_step(JOB, settings, find_device("cpu"))
        predicted = estimate_trace(trace, find_device("cpu")).predicted_peak_allocated_bytes
        assert 0 <= measured - predicted <= 64
        peaks.append(measured)
    assert peaks[0] == peaks[1], "a CPU's batch is in its memory: nothing is copied"
    on_gpu = capture_step(JOB, AHEAD, find_device("RTX 3090"))
    assert most_held_bytes(on_gpu, Category.INPUTS) == 2 * of_one


def test_a_plan_may_be_asked_for_it_and_keeps_it() -> None:
    plan = bf.plan(JOB, "RTX 3090", global_batch_size=16, prefetch_inputs=True, micro_batch_size=4)
    assert plan.settings.prefetch_inputs
    assert not plan.plain.settings.prefetch_inputs
    assert "micro-batches copied ahead" in plan.settings.describe()


def stepped_as_on_cuda(monkeypatch: pytest.MonkeyPatch, *, waits: bool) -> tuple[nn.Module, nn.Module]:
    """A step of four micro-batches, each copied as late as what waits for it permits, beside a plain one."""
    stand_in_for_streams(monkeypatch)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, **kwargs: garbage(empty_like(like, **kwargs)))
    monkeypatch.setattr(prefetch, "to_device", host_link._to_device_cuda)
    done: Callable[[Any], None] = host_link._to_device_done_cuda if waits else lambda _copies: None
    monkeypatch.setattr(prefetch, "to_device_done", done)
    torch.manual_seed(0)
    plain = Sums()
    ahead = copy.deepcopy(plain)
    micro_batches = [{"x": torch.randn(4, INPUT)} for _ in range(4)]
    for model, begin in ((plain, None), (ahead, prefetch.prefetch_to("cpu"))):
        parts = StepParts(
            model=model,
            loss=mean_square,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            precision=Precision.FP32,
            prefetch=begin,
        )
        run_step(parts, micro_batches, [0.25] * 4)
    return plain, ahead


def test_a_step_is_the_same_however_late_copies_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = stepped_as_on_cuda(monkeypatch, waits=True)
    assert all(map(torch.equal, ahead.parameters(), plain.parameters()))


def test_without_a_wait_the_stand_in_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    plain, ahead = stepped_as_on_cuda(monkeypatch, waits=False)
    assert not all(map(torch.equal, ahead.parameters(), plain.parameters()))


def test_a_micro_batch_that_is_dropped_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else others would get memory that is still being written."""
    waited: list[Any] = []
    monkeypatch.setattr(prefetch, "to_device_done", waited.append)
    coming = prefetch.prefetch_to("cpu")({"x": torch.ones(3)})
    assert not waited
    del coming
    assert len(waited) == 1
    prefetch.prefetch_to("cpu")({"x": torch.ones(3)})()
    assert len(waited) == 2
