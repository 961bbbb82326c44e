"""A capture of one steady step, repeated, allocates what a capture of two real steps does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from brimful.capture import capture_step
from brimful.memory import predict_memory
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Category, EventKind, Phase, Trace
from helpers.captured_jobs import A100, job, mlp

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "Adam, parameter by parameter": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad, which makes state at once": torch.optim.Adagrad,
}


def requests(trace: Trace) -> list[tuple[EventKind, int]]:
    return [(event.kind, trace.storages[event.storage].size_bytes) for event in trace.events]


def left(trace: Trace) -> Counter[int]:
    """The sizes of what is there at the end."""
    there = Counter[int]()
    for kind, size_bytes in requests(trace):
        there[size_bytes] += {EventKind.ALLOCATE: 1, EventKind.FREE: -1}.get(kind, 0)
    return +there


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repeated_step_makes_the_requests_of_two_captured_ones(name: str) -> None:
    the_job, settings = job(optimizer=OPTIMIZERS[name]), Settings(micro_batch_size=8)
    repeated = capture_step(the_job, settings, A100, steps=1).with_last_step_again()
    assert requests(repeated) == requests(capture_step(the_job, settings, A100))


def test_state_of_a_parameter_without_a_gradient_is_never_made() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = mlp(), nn.Linear(100, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    settings = Settings(micro_batch_size=8)
    repeated = capture_step(job(Partly), settings, A100, steps=1).with_last_step_again()
    captured = capture_step(job(Partly), settings, A100)
    for trace in (repeated, captured):
        assert predict_memory(trace).first_step_peak_allocated_bytes > 0
    assert predict_memory(repeated).peak_allocated_bytes == predict_memory(captured).peak_allocated_bytes


def test_under_a_loss_scale_the_peaks_are_nearly_the_same() -> None:
    """What unscaling takes is freed before state is made in the one, after it in the other."""
    settings = Settings(micro_batch_size=8, precision=Precision.FP16)
    repeated = predict_memory(capture_step(job(), settings, A100, steps=1).with_last_step_again())
    captured = predict_memory(capture_step(job(), settings, A100))
    assert repeated.first_step_peak_allocated_bytes == pytest.approx(
        captured.first_step_peak_allocated_bytes, rel=0.001
    )
    assert repeated.peak_reserved_bytes == captured.peak_reserved_bytes


def test_state_that_is_updated_in_backward_stays_where_the_capture_made_it() -> None:
    settings = Settings(micro_batch_size=8, optimizer_in_backward=True)
    trace = capture_step(job(), settings, A100, steps=1).with_last_step_again()
    of_state = {
        trace.ops[event.op].phase
        for event in trace.events
        if event.kind is EventKind.ALLOCATE
        and trace.storages[event.storage].category is Category.OPTIMIZER_STATE
    }
    assert of_state == {Phase.SETUP}


class SetsItsWeights(nn.Module):
    """Makes several weights of one shape in each forward, and keeps them as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.made_of = nn.ParameterList(torch.randn(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, weight in enumerate(self.made_of):
            setattr(self, f"weight{index}", weight * 2)
            x = torch.tanh(x @ getattr(self, f"weight{index}"))
        return x


@pytest.mark.parametrize(
    ("recomputed", "micro_batches"), [((), 1), ((), 3), (("0", "1", "2"), 3), (("1",), 3)]
)  # of one micro-batch the first recomputation has nothing to hold of a step before
def test_what_each_forward_makes_anew_replaces_what_the_step_before_left(
    recomputed: tuple[str, ...], micro_batches: int
) -> None:
    the_job = job(
        lambda: nn.Sequential(nn.Linear(12, 64), *(SetsItsWeights() for _ in range(3))), optimizer="sgd"
    )
    units = tuple(UnitAction(fqn=name, action=Action.RECOMPUTE) for name in recomputed)
    settings = Settings(micro_batch_size=8, gradient_accumulation_steps=micro_batches, units=units)
    repeated = capture_step(the_job, settings, A100, steps=1).with_last_step_again()
    captured = capture_step(the_job, settings, A100)
    assert left(repeated) == left(captured)
    peaks = [predict_memory(each).steady_peak_allocated_bytes for each in (repeated, captured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.002)
