"""The problem posed by two captures, against captures of the very choices it judges."""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from brimful.capture import capture_step
from brimful.devices import Device, find_device
from brimful.memory import live_profile, rounding_bytes_of
from brimful.planner.problem.build import KEPT, RECOMPUTED, PlanningProblem, build_problem
from brimful.planner.problem.splice import Splicer
from brimful.planner.solvers.chain import Problem, smallest_peak_bytes, solve
from brimful.settings import Action, Precision, Settings, has_input_ops
from brimful.trace import Trace
from brimful.trace.units import find_units, join_input_ops
from helpers.planned_jobs import JOBS, SAMPLES, capture, vector_job, with_action

EXACT = 0.0005
"""Where the units are a chain."""
BUFFERS = 0.001
"""Batch norm's copied buffers, which count where none is recomputed too, are this much of models this small."""
CASTS = 0.15
"""Under autocast a unit may be recomputed from a float32 result of which a kept unit saves a cast only. Such
results count where nothing is recomputed too, and a UNet's skips make more of them."""
OVERLAP = 0.25
"""A module that is called again counts in full from its first call on; here it is most of the model."""
KERNELS = 0.05
"""Memory inside the kernel of a convolution counts where the unit is recomputed, also where its result is saved
and the kernel does not run again; beside a concatenation made again it is at the peak."""

CASES = [
    ("gpt", "cpu", Precision.FP32, EXACT),
    ("gpt", "A100 80GB SXM", Precision.BF16, CASTS),
    ("post-norm", "cpu", Precision.FP32, EXACT),
    ("post-norm", "A100 80GB SXM", Precision.BF16, CASTS),
    ("resnet", "cpu", Precision.FP32, BUFFERS),
    ("resnet", "A100 80GB SXM", Precision.FP16, CASTS),
    ("unet", "cpu", Precision.FP32, BUFFERS),
    ("unet", "A100 80GB SXM", Precision.BF16, CASTS),
    ("unet+", "cpu", Precision.FP32, KERNELS),
    ("unet+", "A100 80GB SXM", Precision.BF16, CASTS),
    ("vgg", "cpu", Precision.FP32, EXACT),
    ("inception", "cpu", Precision.FP32, EXACT),
    ("returning", "cpu", Precision.FP32, OVERLAP),
]
CHOICES = 4


def _slow(device: Device) -> Device:
    """A device on which ops of these small models take longer than looking at them in Python."""
    return replace(device, fp32_flops_per_second=1e6, memory_bandwidth_bytes_per_second=1e6)


@cache
def posed(
    name: str, device: str, precision: Precision, accumulation: int
) -> tuple[PlanningProblem, tuple[str, ...], Settings]:
    """The problem, its units and the settings it is for; "+" at the end of the model's name joins input ops."""
    settings = Settings(micro_batch_size=SAMPLES, gradient_accumulation_steps=accumulation, precision=precision)
    everything = capture(name.rstrip("+"), settings, device)
    units = find_units(everything)
    if name.endswith("+"):
        units = join_input_ops(everything, units)
        assert any(map(has_input_ops, units))
    name = name.rstrip("+")
    nothing = capture(name, with_action(settings, units, Action.RECOMPUTE), device)
    problem = build_problem(
        everything,
        nothing,
        units,
        _slow(find_device(device)),
        micro_batches=everything.captured_micro_batches,
    )
    return problem, units, settings


def true_peak_bytes(trace: Trace) -> int:
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)


def sample_choices(problem: Problem, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(len(unit)) for unit in problem.units) for _ in range(CHOICES)]


@pytest.mark.sweep
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "device", "precision", "tolerance"), CASES)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_the_peak_of_a_choice_is_that_of_a_capture_with_the_choice_applied(
    name: str, device: str, precision: Precision, tolerance: float, accumulation: int
) -> None:
    """Never less than the truth, and hardly more: see the tolerances above."""
    of, units, settings = posed(name, device, precision, accumulation)
    assert len(units) >= 3
    everything, nothing = (KEPT,) * len(units), (RECOMPUTED,) * len(units)
    for choice in (everything, nothing, *sample_choices(of.chain, seed=accumulation)):
        applied = replace(settings, units=of.chosen(choice))
        truth = true_peak_bytes(capture(name.rstrip("+"), applied, device))
        posed_bytes = of.chain.peak_bytes(choice)
        assert truth <= posed_bytes <= truth * (1 + tolerance), choice


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_spliced_choice_with_input_ops_takes_what_its_capture_does(precision: Precision) -> None:
    device = "A100 80GB SXM"
    of, units, settings = posed("unet+", device, precision, 1)
    nothing = capture("unet", replace(settings, units=of.chosen((RECOMPUTED,) * len(units))), device)
    kept = capture("unet", replace(settings, units=()), device)
    splicer = Splicer(nothing, kept, units)
    assert splicer.can_splice()
    for seed in range(3):
        for choice in sample_choices(of.chain, seed):
            actions = of.chosen(choice)
            truth = true_peak_bytes(capture("unet", replace(settings, units=actions), device))
            assert truth <= true_peak_bytes(splicer.spliced(actions)) <= truth * 1.03, choice


@pytest.mark.parametrize("name", ["gpt", "post-norm", "resnet", "unet", "unet+", "vgg", "inception"])
def test_units_can_save_some_ops(name: str) -> None:
    of, _units, _settings = posed(name, "cpu", Precision.FP32, 1)
    assert sum(any(action.action is Action.SAVE for action in unit) for unit in of.actions) >= 2


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "vgg"])
def test_recomputing_everything_takes_least_and_keeping_everything_costs_nothing(name: str) -> None:
    problem = posed(name, "cpu", Precision.FP32, 1)[0].chain
    nothing = (RECOMPUTED,) * len(problem.units)
    smallest = smallest_peak_bytes(problem)
    assert smallest <= problem.peak_bytes(nothing)
    assert smallest >= 0.95 * problem.peak_bytes(nothing)
    assert problem.seconds((KEPT,) * len(problem.units)) == 0
    assert all(option.seconds > 0 for unit in problem.units for option in unit[RECOMPUTED:])


def test_alike_blocks_cost_alike() -> None:
    of, units, _settings = posed("gpt", "cpu", Precision.FP32, 1)
    blocks = [of.chain.units[i] for i, unit in enumerate(units) if unit.startswith("blocks.")]
    assert len(blocks) == 5
    for option in range(len(blocks[0])):
        assert len({block[option].retained_bytes for block in blocks}) == 1
        assert blocks[0][option].seconds == pytest.approx(blocks[4][option].seconds)


def test_the_solution_of_half_the_way_keeps_some_and_is_met_by_the_capture() -> None:
    of, units, settings = posed("gpt", "cpu", Precision.FP32, 2)
    least, most = smallest_peak_bytes(of.chain), of.chain.peak_bytes((KEPT,) * len(units))
    budget_bytes = (least + most) // 2
    solution = solve(of.chain, budget_bytes)
    assert solution is not None
    assert {KEPT} < set(solution.choice)
    trace = capture("gpt", replace(settings, units=of.chosen(solution.choice)))
    assert true_peak_bytes(trace) <= budget_bytes


def test_without_units_there_is_one_gap_which_is_the_peak() -> None:
    settings = Settings(micro_batch_size=SAMPLES)
    trace = capture("vgg", settings)
    problem = build_problem(trace, trace, (), find_device("cpu"), micro_batches=1).chain
    assert problem.units == ()
    assert problem.gap_peaks_bytes == (true_peak_bytes(trace),)


def test_all_small_jobs_are_posed() -> None:
    assert {name.rstrip("+") for name, *_ in CASES} == set(JOBS)


class Mixture(nn.Module):
    """Each token goes to its two best of four experts; all are computed, and two are used."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        shares = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights)
        return x + sum(torch.tanh(e(x)) * shares[..., i, None] for i, e in enumerate(self.experts))


def test_a_router_s_choice_is_saved_wherever_its_unit_is_recomputed() -> None:
    job = vector_job(lambda: nn.Sequential(nn.Linear(16, 16), *(Mixture() for _ in range(3))), 8, 16)
    device = _slow(find_device("cpu"))
    settings = Settings(micro_batch_size=SAMPLES)
    kept = capture_step(job, settings, device, steps=1)
    units = find_units(kept)
    recomputed = capture_step(job, with_action(settings, units, Action.RECOMPUTE), device, steps=1)
    posed = build_problem(kept, recomputed, units, device, micro_batches=1)
    routed = [actions for fqn, actions in zip(units, posed.actions, strict=True) if fqn != "0"]
    assert len(routed) == 3
    for actions in routed:
        assert actions[KEPT].action is Action.KEEP
        assert actions[RECOMPUTED].saved == ("topk#0",)
        assert all("topk#0" in action.saved for action in actions[RECOMPUTED:])
        assert len(actions) > 2
    everything = replace(settings, units=posed.chosen((RECOMPUTED,) * len(units)))
    trace = capture_step(job, everything, device, steps=1)
    assert sum("topk" in op.name and op.recomputed for op in trace.ops) == 0
