"""When a run looks for better settings, and when it finds them better."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import brimful as bf
from brimful.cost.uncertainty import STEP_SPREAD
from brimful.errors import UsageError
from brimful.planner.plan import BudgetPoint
from brimful.profiling import device_record
from brimful.profiling.timing import WaitsForCores
from brimful.quantities import format_bytes, format_seconds
from brimful.report import training_text
from brimful.results import TrainingResult
from brimful.trainer.step.better import find_better, may_be_better
from brimful.trainer.step.measured_steps import MeasuredSteps
from helpers.wrong_plans import SAMPLES, gpt_job, too_large, too_small

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> bf.Plan:
    """A plan that recomputes to stay within its budget."""
    kept = bf.plan(gpt_job(), "cpu", global_batch_size=SAMPLES)
    found = bf.plan(
        gpt_job(), "cpu", global_batch_size=SAMPLES, budget=kept.predicted_peak_reserved_bytes * 6 // 10
    )
    assert found.settings.changed
    return found


def measured(plan: bf.Plan, *, times: float = 1.0, peaks: float | None = 1.0) -> MeasuredSteps:
    return MeasuredSteps(
        count=5,
        step_seconds=plan.predicted_step_seconds * times,
        spread=STEP_SPREAD,
        peak_reserved_bytes=None if peaks is None else round(plan.predicted_peak_reserved_bytes * peaks),
    )


def test_the_median_of_steps_is_no_surer_than_repeated_measurements() -> None:
    assert MeasuredSteps.of([0.1] * 5, None) == MeasuredSteps(
        count=5, step_seconds=0.1, spread=STEP_SPREAD, peak_reserved_bytes=None
    )
    assert MeasuredSteps.of([0.05, 0.08, 0.1, 0.12, 0.15], 7).spread > 5 * STEP_SPREAD


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_factor_of_time_alone_is_no_reason_to_search(plan: bf.Plan, times: float) -> None:
    assert not may_be_better(plan, measured(plan, times=times))
    assert not may_be_better(plan, measured(plan, times=times, peaks=None))


def test_a_peak_over_the_budget_is_a_reason_to_search(plan: bf.Plan) -> None:
    assert may_be_better(
        plan, measured(plan, peaks=1.01 * plan.budget_bytes / plan.predicted_peak_reserved_bytes)
    )


def test_a_larger_peak_within_the_budget_is_no_reason_to_search(plan: bf.Plan) -> None:
    assert not may_be_better(plan, measured(plan, peaks=plan.budget_bytes / plan.predicted_peak_reserved_bytes))


def test_memory_left_is_a_reason_to_search_where_the_curve_over_budgets_gains(plan: bf.Plan) -> None:
    assert may_be_better(plan, measured(plan, peaks=0.6))
    flat = replace(
        plan,
        budget_curve=(
            BudgetPoint(
                budget_bytes=plan.budget_bytes * 9, predicted_step_seconds=plan.predicted_step_seconds * 0.995
            ),
        ),
    )
    assert not may_be_better(flat, measured(plan, peaks=0.6))
    plain = replace(plan, settings=bf.Settings(micro_batch_size=SAMPLES))  # nothing is simpler or faster
    assert not may_be_better(plain, measured(plan, peaks=0.6))


def test_better_settings_fit_with_the_measured_factor_and_are_faster_by_more_than_the_uncertainty(
    plan: bf.Plan,
) -> None:
    job, cpu = gpt_job(), device_record(CPU)
    assert find_better(job, plan, plan.settings, cpu, measured(plan)) is None
    found = find_better(job, plan, plan.settings, cpu, measured(plan, times=1.3, peaks=0.6))
    assert found is not None
    low, high = found.predicted_difference_interval_seconds
    assert low < high < 0
    assert found.predicted_step_seconds < 1.3 * plan.predicted_step_seconds
    assert found.predicted_peak_device_bytes <= plan.budget_bytes


def test_settings_that_fit_are_better_than_those_that_exceed_the_budget_though_slower() -> None:
    wrong = too_large(gpt_job())
    peaks = round(wrong.budget_bytes / 0.7)
    found = find_better(
        gpt_job(),
        wrong,
        wrong.settings,
        device_record(CPU),
        MeasuredSteps(
            count=5, step_seconds=wrong.predicted_step_seconds, spread=STEP_SPREAD, peak_reserved_bytes=peaks
        ),
    )
    assert found is not None
    assert found.predicted_difference_interval_seconds[1] > 0
    assert found.predicted_peak_device_bytes <= wrong.budget_bytes


def test_a_run_too_short_to_measure_compares_nothing() -> None:
    result, _ = bf.fit(gpt_job(), too_small(gpt_job()), steps=6, show_progress=False)
    assert result.self_correction is None


def test_without_replan_better_settings_are_reported_and_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = too_small(gpt_job())
    result, _ = bf.fit(gpt_job(), wrong, steps=10)
    found = result.self_correction
    assert found is not None
    assert found.better is not None
    assert found.changed_after_step is None
    assert result.settings == wrong.settings
    shown = capsys.readouterr().err
    assert f"step {found.step}  step time" in shown
    assert "faster by corrected predictions: " in shown
    assert "replan=True (--replan)" in shown
    assert "better settings" in training_text(result)
    assert TrainingResult.from_json(result.to_json()).self_correction == found


@pytest.mark.parametrize(
    ("faster", "waited", "cause"),
    [
        (1e-3, None, "probably other work on this machine slowed the steps"),
        (1e-3, 0.62, r"other work on this machine used its cores \(a thread waited for one 62% of the time\)"),
        (
            1e5,
            None,
            "probably the rates of this machine were measured beside other work: brimful calibrate --force",
        ),
    ],
)
def test_a_time_that_is_not_kept_is_shown_with_the_prediction_and_the_cause(
    plan: bf.Plan,
    faster: float,
    waited: float | None,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(WaitsForCores, "fraction", lambda _self: waited)
    wrong = replace(plan, predicted_step_seconds=plan.predicted_step_seconds * faster)
    result, _ = bf.fit(gpt_job(), wrong, steps=10)
    found = result.self_correction
    assert found is not None
    assert found.core_wait_fraction == waited
    shown = " ".join(capsys.readouterr().err.split())
    times = rf"{format_seconds(found.predicted_step_seconds)} a step were predicted and [\d.]+ \w?s measured"
    assert re.search(f"does not correct later plans: {times}, and .* than × 20; {cause}", shown)
    assert ("busy machine" in training_text(result)) == (waited is not None)


def test_a_peak_that_is_not_kept_is_shown_with_the_prediction(
    plan: bf.Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = plan.predicted_peak_reserved_bytes // 4
    wrong = replace(
        plan,
        predicted_peak_reserved_bytes=tiny,
        predicted_peak_allocated_bytes=tiny,
        predicted_peak_device_bytes=tiny,
    )
    bf.fit(gpt_job(), wrong, steps=10)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"does not correct later plans: a peak of {format_bytes(tiny)} was predicted and" in shown


def test_replan_is_refused_without_predictions_and_on_several_ranks() -> None:
    with pytest.raises(UsageError, match="these are settings"):
        bf.Trainer(gpt_job(), bf.Settings(micro_batch_size=SAMPLES), replan=True)
    plan = bf.plan(gpt_job(), "cpu", global_batch_size=SAMPLES, world_size=2)
    with pytest.raises(UsageError, match="replan is for one rank, and the plan is for 2"):
        bf.Trainer(gpt_job(), plan, replan=True)
