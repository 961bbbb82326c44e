"""The problem posed by two captures, against captures of the very choices it judges."""

import random

import pytest

from brimful.hardware import find_device
from brimful.planning.problem import build_problem
from brimful.planning.solver import smallest_peak_bytes, solve
from brimful.planning.units import find_units
from brimful.settings import Precision, Settings
from brimful.timeline import live_profile, rounding_bytes_of
from brimful.trace import Trace
from helpers.planned_jobs import JOBS, SAMPLES, capture, with_choice

EXACT = 0.0005
"""Where the units are a chain."""
BUFFERS = 0.001
"""Batch norm's copied buffers, which count where none is recomputed too, are this much of models this small."""
CASTS = 0.1
"""Under autocast a unit may be recomputed from a float32 result of which a kept unit saves a cast only. Such
results count where nothing is recomputed too, and a UNet's skips make more of them."""
OVERLAP = 0.25
"""A module that is called again counts in full from its first call on; here it is most of the model."""

CASES = [
    ("gpt", "cpu", Precision.FP32, EXACT),
    ("gpt", "A100 80GB SXM", Precision.BF16, CASTS),
    ("post-norm", "cpu", Precision.FP32, EXACT),
    ("post-norm", "A100 80GB SXM", Precision.BF16, CASTS),
    ("resnet", "cpu", Precision.FP32, BUFFERS),
    ("resnet", "A100 80GB SXM", Precision.FP16, CASTS),
    ("unet", "cpu", Precision.FP32, BUFFERS),
    ("unet", "A100 80GB SXM", Precision.BF16, CASTS),
    ("vgg", "cpu", Precision.FP32, EXACT),
    ("inception", "cpu", Precision.FP32, EXACT),
    ("returning", "cpu", Precision.FP32, OVERLAP),
]
CHOICES = 4


def posed(name: str, device: str, precision: Precision, accumulation: int):
    """The problem, its units and the settings it is for."""
    settings = Settings(micro_batch_size=SAMPLES, gradient_accumulation_steps=accumulation, precision=precision)
    everything = capture(name, settings, device)
    units = find_units(everything)
    nothing = capture(name, with_choice(settings, units, (1,) * len(units)), device)
    problem = build_problem(
        everything,
        nothing,
        units,
        find_device(device),
        micro_batches=everything.captured_micro_batches,
    )
    return problem, units, settings


def true_peak_bytes(trace: Trace) -> int:
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)


def sample_choices(unit_count: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randint(0, 1) for _ in range(unit_count)) for _ in range(CHOICES)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "device", "precision", "tolerance"), CASES)
@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
def test_the_peak_of_a_choice_is_that_of_a_capture_with_the_choice_applied(
    name: str, device: str, precision: Precision, tolerance: float, accumulation: int
) -> None:
    """Never less than the truth, and hardly more: see the tolerances above."""
    problem, units, settings = posed(name, device, precision, accumulation)
    assert len(units) >= 3
    everything, nothing = (0,) * len(units), (1,) * len(units)
    for choice in (everything, nothing, *sample_choices(len(units), seed=accumulation)):
        truth = true_peak_bytes(capture(name, with_choice(settings, units, choice), device))
        posed_bytes = problem.peak_bytes(choice)
        assert truth <= posed_bytes <= truth * (1 + tolerance), choice


@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "vgg"])
def test_recomputing_everything_takes_least_and_keeping_everything_costs_nothing(name: str) -> None:
    problem, units, _settings = posed(name, "cpu", Precision.FP32, 1)
    nothing = (1,) * len(units)
    smallest = smallest_peak_bytes(problem)
    assert smallest <= problem.peak_bytes(nothing)
    assert smallest >= 0.95 * problem.peak_bytes(nothing)
    assert problem.seconds((0,) * len(units)) == 0
    assert all(unit[1].seconds > 0 for unit in problem.units)


def test_alike_blocks_cost_alike() -> None:
    problem, units, _settings = posed("gpt", "cpu", Precision.FP32, 1)
    blocks = [problem.units[i] for i, unit in enumerate(units) if unit.startswith("blocks.")]
    assert len(blocks) == 5
    assert len({block[0].retained_bytes for block in blocks}) == 1
    assert blocks[0][1].seconds == pytest.approx(blocks[4][1].seconds)


def test_the_solution_of_half_the_way_keeps_some_and_is_met_by_the_capture() -> None:
    problem, units, settings = posed("gpt", "cpu", Precision.FP32, 2)
    least, most = smallest_peak_bytes(problem), problem.peak_bytes((0,) * len(units))
    budget_bytes = (least + most) // 2
    solution = solve(problem, budget_bytes)
    assert solution is not None
    assert 0 < sum(solution.choice) < len(units)
    trace = capture("gpt", with_choice(settings, units, solution.choice))
    assert true_peak_bytes(trace) <= budget_bytes


def test_without_units_there_is_one_gap_which_is_the_peak() -> None:
    settings = Settings(micro_batch_size=SAMPLES)
    trace = capture("vgg", settings)
    problem = build_problem(trace, trace, (), find_device("cpu"), micro_batches=1)
    assert problem.units == ()
    assert problem.gap_peaks_bytes == (true_peak_bytes(trace),)


def test_all_small_jobs_are_posed() -> None:
    assert {name for name, *_ in CASES} == set(JOBS)
