"""Nested segments in plans: what is posed against captures, and plans below what recomputing all takes."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from brimful.job import Job
from brimful.memory import live_profile, rounding_bytes_of
from brimful.planner import JobTraits, Request, floor, search
from brimful.planner.problem.build import RECOMPUTED, build_problem
from brimful.planner.problem.nested import build_segment_problem
from brimful.planner.solvers.segments import SegmentProblem
from brimful.profiling import measure_step
from brimful.profiling.equivalence import verify
from brimful.settings import Action, Precision, Settings, UnitAction
from brimful.trace import Trace
from brimful.trace.units import find_units
from helpers.planned_jobs import FASTEST, SAMPLES, capture, with_action

CPU = find_device("cpu")


@pytest.fixture(autouse=True)
def _smallest_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the lower bound of every plan is over the budget, and the model is not small."""
    monkeypatch.setattr(floor, "SEARCHED_OPS", 10**9)


TOLERANCE = 0.002
"""Forwards within a segment are taken to run again right before the unit behind them is recomputed."""


def peak_bytes(trace: Trace) -> int:
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)


@cache
def posed(
    name: str, device: str, precision: Precision, accumulation: int
) -> tuple[SegmentProblem | None, tuple[str, ...], Settings]:
    settings = Settings(micro_batch_size=SAMPLES, gradient_accumulation_steps=accumulation, precision=precision)
    kept = capture(name, settings, device)
    units = find_units(kept)
    recomputing = with_action(settings, units, Action.RECOMPUTE)
    problem = build_segment_problem(
        kept,
        capture(name, recomputing, device),
        recomputing.units,
        find_device(device),
        micro_batches=kept.captured_micro_batches,
    )
    return problem, units, settings


def nesting(units: tuple[str, ...], nested: tuple[bool, ...]) -> tuple[UnitAction, ...]:
    return tuple(
        UnitAction(fqn=unit, action=Action.NEST if is_nested else Action.RECOMPUTE)
        for unit, is_nested in zip(units, nested, strict=True)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("device", "precision"), [("cpu", Precision.FP32), ("A100 80GB SXM", Precision.BF16)], ids=["cpu", "A100"]
)
@pytest.mark.parametrize("name", ["gpt", "post-norm", "resnet", "unet", "vgg", "inception"])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_peak_and_time_of_a_choice_are_those_of_a_capture(
    name: str, device: str, precision: Precision, accumulation: int
) -> None:
    problem, units, settings = posed(name, device, precision, accumulation)
    assert problem is not None
    rng = random.Random(accumulation)
    flat = capture(name, with_action(settings, units, Action.RECOMPUTE), device)
    flat_seconds = step_seconds(flat, find_device(device)).total_seconds
    can = [size > 0 for size in problem.input_bytes]
    for share in (0.0, 0.3, 0.6, 1.0):
        nested = tuple(each and rng.random() < share for each in can)
        trace = capture(name, replace(settings, units=nesting(units, nested)), device)
        truth = peak_bytes(trace)
        assert truth <= problem.peak_bytes(nested) <= truth * (1 + TOLERANCE)
        seconds = step_seconds(trace, find_device(device)).total_seconds - flat_seconds
        launches = 2 * find_device(device).dispatch.forward_seconds  # a few ops need not run again
        cost = problem.cost_seconds(nested) * accumulation
        assert cost == pytest.approx(seconds, rel=0.1, abs=1e-9 if device == "cpu" else accumulation * launches)


def test_the_last_unit_and_those_at_which_nothing_is_handed_on_are_told() -> None:
    """No unit is before the first, and what a pool makes between two stages of a U-Net is in no unit."""
    problem, units, _settings = posed("unet", "cpu", Precision.FP32, 1)
    assert problem is not None
    sizes = dict(zip(units, problem.input_bytes, strict=True))
    assert problem.input_bytes[0] == 0
    assert any(size > 0 for size in problem.input_bytes)
    assert any(size == 0 for size in problem.input_bytes[1:]), sizes


# Plans.


class Residual(nn.Module):
    """A block with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x))


DEEP = Job(
    name="deep",
    model=lambda: nn.Sequential(*(Residual(16) for _ in range(64)), nn.Linear(16, 1)),
    loss=lambda model, batch: model(batch).square().mean(),
    batch=lambda n: torch.randn(n, 256, 16),
    optimizer="sgd",
)


@cache
def deep(settings: Settings, steps: int = 1) -> Trace:
    return capture_step(DEEP, settings, CPU, steps=steps)


DEEP_REQUEST = Request(
    job=JobTraits(name="deep"),
    device=CPU,
    budget_bytes=1,
    global_batch_size=4,
    asked=replace(FASTEST, micro_batch_size=4, optimizer="sgd"),
)
ALL_RECOMPUTED = replace(DEEP_REQUEST, asked=replace(DEEP_REQUEST.asked, recompute="all"))


def least_bytes(request: Request) -> int:
    with pytest.raises(InfeasibleError) as caught:
        search(deep, request)
    assert caught.value.smallest_peak_bytes is not None
    return caught.value.smallest_peak_bytes


def test_a_deep_model_gets_plans_far_below_what_recomputing_everything_takes() -> None:
    """64 blocks, each of which makes the next one's input: few of 64 inputs are held."""
    flat_bytes = least_bytes(ALL_RECOMPUTED)
    nested_bytes = least_bytes(DEEP_REQUEST)
    assert nested_bytes < 0.5 * flat_bytes
    seconds = []
    for part in (0, 2):
        budget_bytes = nested_bytes + (flat_bytes - nested_bytes) * part // 4
        plan = search(deep, replace(DEEP_REQUEST, budget_bytes=budget_bytes))
        assert bool(plan.settings.nested) is (part == 0)  # half-way runs of blocks suffice
        trace = deep(plan.settings).with_last_step_again()
        assert peak_bytes(trace) == plan.predicted_peak_allocated_bytes <= budget_bytes
        assert plan.predicted_peak_device_bytes <= budget_bytes
        seconds.append(plan.predicted_step_seconds)
        if part == 0:
            assert "nested" in str(plan)
            measured = measure_step(DEEP, plan.settings, steps=1)
            assert measured.measured_peak_allocated_bytes == pytest.approx(
                plan.predicted_peak_allocated_bytes, rel=0.001
            )
            certificate = verify(DEEP, plan.settings)
            assert certificate.holds
            assert all(
                comparison.is_bitwise
                for comparison in certificate.comparisons
                if not comparison.why_not_compared
            )
            assert any(comparison.is_bitwise for comparison in certificate.comparisons)
    assert seconds == sorted(seconds, reverse=True)
    assert "nested" not in search(deep, replace(DEEP_REQUEST, budget_bytes=flat_bytes)).settings.describe()


class Between(nn.Module):
    """Takes a view of what each block hands to the next: it is another tensor, and so is held."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(16) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)[:]
        return x


def test_where_nesting_turns_out_to_spare_nothing_it_is_not_offered() -> None:
    """The capture tells: nested, the model takes what it takes recomputed."""
    job = Job(
        name="between",
        model=Between,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 256, 16),
        optimizer="sgd",
    )
    run = cache(lambda settings, steps=1: capture_step(job, settings, CPU, steps=steps))
    request = replace(DEEP_REQUEST, job=JobTraits(name="between"))
    with pytest.raises(InfeasibleError) as flat:
        search(run, replace(ALL_RECOMPUTED, job=request.job))
    with pytest.raises(InfeasibleError) as any_way:
        search(run, request)
    assert flat.value.smallest_peak_bytes is not None
    assert any_way.value.smallest_peak_bytes == pytest.approx(flat.value.smallest_peak_bytes, rel=0.01)
    budget_bytes = int(1.02 * flat.value.smallest_peak_bytes)
    assert not search(run, replace(request, budget_bytes=budget_bytes)).settings.nested


class Mixture(nn.Module):
    """Each token goes to the best of two experts; both are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(1, dim=-1)
        shares = torch.zeros(*x.shape[:-1], 2).scatter(-1, chosen, weights)
        return x + sum(torch.tanh(expert(x)) * shares[..., i, None] for i, expert in enumerate(self.experts))


def test_a_router_s_unit_is_neither_nested_nor_run_again_for_the_next() -> None:
    """Its choice of experts is saved where it is recomputed, and must not be made a second time."""
    job = Job(
        model=lambda: nn.Sequential(
            *(Residual(16) for _ in range(3)), Mixture(), *(Residual(16) for _ in range(3))
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 64, 16),
    )
    settings = Settings(micro_batch_size=SAMPLES)
    kept = capture_step(job, settings, CPU, steps=1)
    units = tuple(str(i) for i in range(7))
    recomputed = capture_step(job, with_action(settings, units, Action.RECOMPUTE), CPU, steps=1)
    problem = build_problem(kept, recomputed, units, CPU, micro_batches=1)
    actions = problem.chosen((RECOMPUTED,) * len(units))
    assert actions[3].saved == ("topk#0",)
    segments = build_segment_problem(kept, recomputed, actions, CPU, micro_batches=1)
    assert segments is not None
    assert [size > 0 for size in segments.input_bytes] == [False, True, True, False, False, True, True]
