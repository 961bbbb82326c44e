"""What a run says of predicted beside measured, and when it advises another plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import brimful as bf
from brimful.planner.plan import BudgetPoint
from brimful.profiling.timing import WaitsForCores
from brimful.report import training_text
from brimful.results import TrainingResult
from brimful.trainer.step.self_correction import may_be_faster
from brimful.utils.quantities import format_bytes, format_seconds
from helpers.wrong_plans import SAMPLES, gpt_job, too_large, too_small


@pytest.fixture(scope="module")
def plan() -> bf.Plan:
    """A plan that recomputes to stay within its budget."""
    kept = bf.plan(gpt_job(), "cpu", global_batch_size=SAMPLES)
    found = bf.plan(
        gpt_job(), "cpu", global_batch_size=SAMPLES, budget=kept.predicted_peak_reserved_bytes * 6 // 10
    )
    assert found.settings.changed
    return found


def peak(plan: bf.Plan, factor: float) -> int:
    return round(plan.predicted_peak_reserved_bytes * factor)


def test_memory_left_may_make_a_plan_faster_where_the_curve_over_budgets_gains(plan: bf.Plan) -> None:
    assert may_be_faster(plan, peak(plan, 0.6))
    assert not may_be_faster(plan, peak(plan, 1.0))
    assert not may_be_faster(plan, peak(plan, plan.budget_bytes / plan.predicted_peak_reserved_bytes))
    assert not may_be_faster(plan, None)
    flat = replace(
        plan,
        budget_curve=(
            BudgetPoint(
                budget_bytes=plan.budget_bytes * 9, predicted_step_seconds=plan.predicted_step_seconds * 0.995
            ),
        ),
    )
    assert not may_be_faster(flat, peak(plan, 0.6))
    plain = replace(plan, settings=bf.Settings(micro_batch_size=SAMPLES))  # nothing is simpler or faster
    assert not may_be_faster(plain, peak(plan, 0.6))


def test_a_run_too_short_to_measure_compares_nothing() -> None:
    result, _ = bf.fit(gpt_job(), too_small(gpt_job()), steps=6, show_progress=False)
    assert result.self_correction is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(too_small, "memory is left with which a step may be faster"), (too_large, "the plan exceeds its budget")],
)
def test_another_plan_is_advised_and_the_settings_stay(
    wrong: Callable[[bf.Job], bf.Plan],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WaitsForCores, "fraction", lambda _self: None)
    monkeypatch.setattr("brimful.trainer.step.kept_factors.LARGEST_TIME_FACTOR", 1e9)  # of a busy machine
    plan = wrong(gpt_job())
    result, _ = bf.fit(gpt_job(), plan, steps=10)
    found = result.self_correction
    assert found is not None
    assert found.exceeds_budget == (wrong is too_large)
    assert result.settings == found.settings == plan.settings
    shown = " ".join(capsys.readouterr().err.split())
    assert f"step {found.step} step time" in shown
    assert f"{why}: plan again" in shown
    assert TrainingResult.from_json(result.to_json()).self_correction == found


def test_a_resumed_run_compares_nothing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = bf.plan(gpt_job(), "cpu", global_batch_size=SAMPLES)
    first, _ = bf.fit(gpt_job(), plan, steps=8, run_dir=tmp_path / "run")
    capsys.readouterr()
    second, _ = bf.fit(gpt_job(), plan, steps=18, run_dir=tmp_path / "run", resume=True)
    assert second.self_correction == first.self_correction is not None
    assert "measured (×" not in capsys.readouterr().err


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
