"""A lower bound of every plan's peak, known from the baseline, ends hopeless searches after two captures."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.memory import predict_memory
from brimful.options import PlanOptions
from brimful.planner import JobTraits, Request, floor, search
from brimful.planner.floor import Floor, bytes_of_update
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace, find_units
from brimful.utils.quantities import MIB
from helpers.models import GPT
from helpers.planned_jobs import FASTEST, language_job

GPU = find_device("RTX 3090")
JOB = language_job(lambda: GPT(layers=3))
PLAIN = Settings(micro_batch_size=4)


def request(**asked: object) -> Request:
    asked = {"budget_bytes": GPU.context_bytes + MIB // 64, "asked": FASTEST} | asked
    return Request(job=JobTraits(name="gpt"), device=GPU, global_batch_size=4, **asked)  # type: ignore[arg-type]


def traced(**changes: object) -> Trace:
    return capture_step(JOB, replace(PLAIN, **changes), GPU, steps=1)  # type: ignore[arg-type]


def test_no_way_to_train_takes_less_than_the_floor() -> None:
    baseline = traced()
    units = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in find_units(baseline))
    on_device = Floor.of(baseline, request())
    on_host = Floor.of(baseline, request(asked=PlanOptions(), offload_host_bytes=1 << 40))
    assert on_device.parts == "parameters, gradients and optimizer state"
    assert on_host.parts == "parameters and gradients"
    smallest = predict_memory(traced(micro_batch_size=1, gradient_accumulation_steps=4, units=units))
    assert on_device.held_bytes <= smallest.peak_allocated_bytes
    assert on_device.held_bytes == pytest.approx(2 * on_host.held_bytes, rel=0.01), (
        "AdamW's state is two numbers"
    )
    moved = predict_memory(
        traced(micro_batch_size=1, gradient_accumulation_steps=4, units=units, offload_optimizer=True)
    )
    assert on_host.held_bytes <= moved.peak_allocated_bytes
    in_backward = Floor.of(baseline, request(asked=PlanOptions(optimizer_in_backward=True)))
    assert in_backward.parts == "parameters and optimizer state"


def test_a_hopeless_budget_takes_two_captures_and_says_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "SEARCHED_OPS", 0)
    ran: list[Settings] = []

    def capture(settings: Settings, steps: int = 1) -> Trace:
        ran.append(settings)
        return capture_step(JOB, settings, GPU, steps=steps)

    with pytest.raises(InfeasibleError) as found:
        search(capture, request())
    assert len(ran) == 2
    assert "every plan holds parameters, gradients and optimizer state at once" in str(found.value)
    plan = search(capture, request(budget_bytes=found.value.smallest_peak_bytes))
    assert plan.predicted_peak_device_bytes <= found.value.smallest_peak_bytes


def test_the_optimizer_on_the_host_frees_no_more_than_the_bytes_of_the_update() -> None:
    for implementation in ("foreach", "fused"):
        for size in (1, 16):
            settings = {"micro_batch_size": size, "optimizer_implementation": implementation}
            on_device, on_host = traced(**settings), traced(**settings, offload_optimizer=True)
            freed = (
                predict_memory(on_device).peak_allocated_bytes - predict_memory(on_host).peak_allocated_bytes
            )
            assert freed <= bytes_of_update(on_device)


def test_few_ops_are_searched_for_the_smallest_peak() -> None:
    job = bf.Job(
        model=lambda: nn.Linear(64, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.zeros(n, 64),
    )
    with pytest.raises(InfeasibleError, match="smallest predicted peak"):
        bf.plan(job, GPU, global_batch_size=4, budget=GPU.context_bytes + 4096)


def test_the_least_step_of_many_layers_is_searched_below_the_floor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "SEARCHED_OPS", 0)
    job = bf.Job(
        model=lambda: nn.Sequential(*(layer for _ in range(60) for layer in (nn.Linear(8, 8), nn.Tanh()))),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.zeros(n, 8),
        optimizer="sgd",
    )
    floor_bytes = 2 * 60 * (8 * 8 + 8) * 4
    least = []
    for budget in (floor_bytes // 2, 3 * floor_bytes):
        with pytest.raises(InfeasibleError, match=r"smallest predicted peak: .* nested") as found:
            bf.plan(job, "cpu", global_batch_size=512, micro_batch_size=512, budget=budget)
        least.append(found.value.smallest_peak_bytes)
    assert least[0] == least[1]
