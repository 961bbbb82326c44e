"""Memory that grows with every step is reported with the bytes of the size that is predicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.prediction.growth import keeps_memory
from brimful.settings import Settings
from brimful.trace import CUBLAS_WORKSPACE
from brimful.utils.quantities import format_bytes

DEVICE = "RTX 3090"
WIDTH = 256
ROW_BYTES = 4 * WIDTH


class Keeps(nn.Module):
    """Changes what it keeps in each forward."""

    kept: Tensor

    def __init__(self, change: Callable[[Keeps, Tensor], None], rows: int = 1) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(WIDTH, WIDTH), change
        self.register_buffer("kept", torch.zeros(rows, WIDTH))
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return self.linear(x)


def append_to_a_buffer(module: Keeps, x: Tensor) -> None:
    module.kept = torch.cat([module.kept, x.detach()])


def append_to_a_list(module: Keeps, x: Tensor) -> None:
    module.outputs.append(module.linear(x).detach())


def replace_an_average(module: Keeps, x: Tensor) -> None:
    module.kept = 0.9 * module.kept + 0.1 * x.detach().mean(0)


def keep_the_latest(module: Keeps, x: Tensor) -> None:
    module.kept = torch.cat([module.kept, x.detach()])[-len(module.kept) :]


def make_a_table_once(module: Keeps, _x: Tensor) -> None:
    module.__dict__.setdefault("table", torch.ones(1000, WIDTH))


def growing(change: Callable[[Keeps, Tensor], None] = append_to_a_buffer, optimizer: str = "adamw") -> bf.Job:
    return bf.Job(
        model=partial(Keeps, change),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, WIDTH),
        optimizer=optimizer,
    )


def grown(estimate: bf.api.Estimate) -> str:
    (note,) = [note for note in estimate.uncertain if note.startswith("memory that grew by ")]
    return note.removeprefix("memory that grew by ").partition(" in the last")[0]


@pytest.mark.parametrize("change", [append_to_a_buffer, append_to_a_list])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_growth_is_reported_in_bytes_of_each_size(
    change: Callable[[Keeps, Tensor], None], optimizer: str
) -> None:
    job = growing(change, optimizer)
    estimate = bf.estimate(job, DEVICE, micro_batch_size=16)
    assert grown(estimate) == format_bytes(16 * ROW_BYTES)
    assert grown(estimate.at(1024)) == format_bytes(1024 * ROW_BYTES)
    largest = bf.estimate(job, DEVICE, micro_batch_size="largest", budget="1GiB")
    assert grown(largest) == format_bytes(largest.settings.micro_batch_size * ROW_BYTES)
    accumulated = bf.estimate(job, DEVICE, micro_batch_size=16, gradient_accumulation_steps=8)
    assert grown(accumulated) == format_bytes(8 * 16 * ROW_BYTES)


def test_growth_that_is_small_at_few_samples_is_reported_at_many() -> None:
    job = bf.Job(
        model=lambda: nn.Sequential(Keeps(append_to_a_buffer), *(nn.Linear(WIDTH, WIDTH) for _ in range(40))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, WIDTH),
        optimizer="adamw",
    )
    estimate = bf.estimate(job, DEVICE, micro_batch_size=2)
    assert not any("grew" in note for note in estimate.uncertain)
    assert grown(estimate.at(1024)) == format_bytes(1024 * ROW_BYTES)


def test_a_workspace_that_is_made_once_is_not_memory_that_may_grow() -> None:
    """A plan captures two steps only where memory may grow."""
    settings = Settings(micro_batch_size=16)
    trace = capture_step(growing(replace_an_average), settings, find_device(DEVICE), steps=1)
    assert CUBLAS_WORKSPACE in {storage.label for storage in trace.storages}
    assert not keeps_memory(trace)


def test_a_plan_says_that_memory_grows() -> None:
    plan = bf.plan(growing(), DEVICE, global_batch_size=64)
    assert any(note.startswith("Not sure about: memory that grew by 64 KiB") for note in plan.notes)
    steady = bf.plan(growing(make_a_table_once), DEVICE, global_batch_size=64)
    assert not any("grew" in note for note in steady.notes)


@pytest.mark.parametrize("change", [replace_an_average, keep_the_latest, make_a_table_once])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_memory_that_does_not_grow_is_not_reported(
    change: Callable[[Keeps, Tensor], None], optimizer: str
) -> None:
    for micro_batches in (1, 2, 4):
        estimate = bf.estimate(
            growing(change, optimizer),
            DEVICE,
            micro_batch_size=16,
            gradient_accumulation_steps=micro_batches,
        )
        assert not any("grew" in note for note in estimate.uncertain)


def test_a_window_that_fills_over_two_steps_is_not_called_endless() -> None:
    windows: list[deque[Tensor]] = []

    def change(module: Keeps, x: Tensor) -> None:
        if "window" not in module.__dict__:
            module.__dict__["window"] = deque[Tensor](maxlen=4)
            windows.append(module.__dict__["window"])
        module.__dict__["window"].append(x.detach().clone())

    estimate = bf.estimate(growing(change), DEVICE, micro_batch_size=16)
    assert any("if it grows in every step" in note for note in estimate.uncertain)
