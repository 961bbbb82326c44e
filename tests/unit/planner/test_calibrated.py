"""A plan uses what training measured of the same job on this machine, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

import brimful as bf
from brimful.planner import Plan
from brimful.profiling import job_calibrations
from brimful.profiling.cache import keep
from brimful.profiling.timing import WaitsForCores
from brimful.results import JobCalibration
from helpers.wrong_plans import LENGTH, SAMPLES, gpt_job


def keep_factors(times: float, peaks: float | None) -> Plan:
    """Keep factors for the job, under the kind that a plan of it has; the plan without them."""
    job = gpt_job()
    plain = bf.plan(job, "cpu", global_batch_size=SAMPLES)
    assert plain.job_kind is not None
    found = JobCalibration(
        device="cpu",
        job=job.name,
        parameter_count=1,
        precision=plain.settings.precision,
        optimizer="adamw",
        time_factor=times,
        peak_factor=peaks,
        measured_steps=5,
        measured_on="2026-11-24",
    )
    keep(job_calibrations.FILE, "jobs", plain.job_kind, found, what="a test's factors")
    return plain


def planned(**asked: object) -> Plan:
    return bf.plan(gpt_job(), **{"device": "cpu", "global_batch_size": SAMPLES, **asked})  # type: ignore[arg-type]


def test_predictions_are_multiplied_and_a_note_has_factors_date_and_the_way_out() -> None:
    plain = keep_factors(2.0, 1.25)
    found = planned()
    assert found.settings == plain.settings
    assert found.predicted_step_seconds == pytest.approx(2 * plain.predicted_step_seconds)
    assert found.predicted_peak_reserved_bytes == round(1.25 * plain.predicted_peak_reserved_bytes)
    assert found.plain.predicted_step_seconds == pytest.approx(2 * plain.plain.predicted_step_seconds)
    assert found.job_kind == plain.job_kind
    assert found.job_calibration is not None
    (note,) = [note for note in found.notes if "multiplied" in note]
    for expected in ("2026-11-24", "× 2.000", "× 1.250", "--no-job-calibration"):
        assert expected in note
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("times", "peaks", "expected"),
    [(1.0002, 1.0, ()), (2.0, 1.0, (": times × 2.000. ",))],
)
def test_factors_of_one_are_not_noted(times: float, peaks: float | None, expected: tuple[str, ...]) -> None:
    keep_factors(times, peaks)
    notes = [note for note in planned().notes if "multiplied" in note]
    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))


def test_what_is_chosen_fits_the_budget_with_the_factor() -> None:
    plain = keep_factors(1.0, 1.25)
    budget_bytes = round(
        1.1 * plain.predicted_peak_reserved_bytes
    )  # everything kept would take 1.25 of the peak
    found = planned(budget=budget_bytes)
    assert found.budget_bytes == budget_bytes
    assert found.settings != plain.settings
    assert found.predicted_peak_reserved_bytes <= budget_bytes
    without = planned(budget=budget_bytes, job_calibration=False)
    assert without.settings == plain.settings
    assert without.job_calibration is None


def test_predictions_for_a_named_device_or_a_record_stay_as_they_are() -> None:
    keep_factors(2.0, 1.25)
    for device in ("T4", bf.devices.find_device("cpu")):
        found = planned(device=device)
        assert found.job_calibration is None
        assert found.job_kind is None


def test_factors_are_not_used_where_a_plan_may_choose_the_precision() -> None:
    keep_factors(2.0, 1.25)
    assert planned(precision="fp32,bf16").job_calibration is None


def test_what_does_not_fit_is_refused_with_the_budget_as_it_was_asked() -> None:
    keep_factors(1.0, 1.25)
    with pytest.raises(bf.InfeasibleError, match=r"1.250[\s\S]*no-job-calibration") as failed:
        planned(budget="200KiB")
    assert failed.value.budget_bytes == 200 * 1024
    with pytest.raises(bf.InfeasibleError) as without:
        planned(budget="200KiB", job_calibration=False)
    assert failed.value.smallest_peak_bytes == pytest.approx(1.25 * without.value.smallest_peak_bytes, rel=1e-6)


def test_a_plan_is_checked_with_the_factors_that_it_was_made_with() -> None:
    keep_factors(2.0, 1.25)
    plan = planned()
    check = plan.check(gpt_job())
    assert check.predicted_peak_device_bytes == check.planned_peak_device_bytes
    assert check.predicted_step_seconds == pytest.approx(check.planned_step_seconds)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for a core."""
    monkeypatch.setattr(WaitsForCores, "fraction", lambda _self: 0.0)


@pytest.mark.usefixtures("idle")
def test_training_keeps_what_it_measured_for_the_next_plan() -> None:
    plan = planned()
    assert plan.job_calibration is None
    result, _ = bf.fit(gpt_job(), plan, steps=8, show_progress=False)
    assert result.self_correction is not None
    after = planned()
    assert after.job_calibration is not None
    assert after.predicted_step_seconds == pytest.approx(result.self_correction.measured_step_seconds)
    assert after.job_calibration.peak_factor == 1.0  # predicted to the byte on a CPU


@pytest.mark.parametrize("before", [None, 3.0])
def test_times_of_a_busy_machine_are_not_kept(before: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WaitsForCores, "fraction", lambda _self: 0.66)
    if before is not None:
        keep_factors(before, 1.25)
    bf.fit(gpt_job(), planned(), steps=8, show_progress=False)
    after = planned().job_calibration
    assert after is not None
    assert after.time_factor == (before or 1.0)
    assert after.peak_factor == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("knows_longest", [False, True])
def test_the_peak_of_the_longest_batch_is_measured_where_steps_have_shorter_ones(knows_longest: bool) -> None:
    plan, job = planned(), gpt_job()
    short = {"x": job.batch["x"][:, : LENGTH // 2]}  # (B, T)
    data = bf.Data(train=[short] * 8, longest=job.batch if knows_longest else None)
    result, _ = bf.fit(job, plan, steps=8, data=data, show_progress=False)
    measured = result.measured_peak_allocated_bytes
    assert measured is not None
    assert (measured == plan.predicted_peak_allocated_bytes) is knows_longest
    after = planned().job_calibration
    assert after is not None
    assert (after.peak_factor == 1.0) is knows_longest


@pytest.mark.usefixtures("idle")
def test_a_later_run_multiplies_the_factors_that_its_plan_has() -> None:
    plain = keep_factors(3.0, 1.25)
    result, _ = bf.fit(gpt_job(), planned(), steps=8, show_progress=False)
    assert result.self_correction is not None
    measured = result.self_correction.measured_step_seconds
    after = planned()
    assert after.job_calibration is not None
    assert after.job_calibration.time_factor == pytest.approx(measured / plain.predicted_step_seconds)
    assert after.job_calibration.peak_factor == pytest.approx(1.0, rel=1e-6)


def test_training_with_predictions_of_elsewhere_keeps_nothing() -> None:
    plan = replace(planned(), job_kind=None)
    bf.fit(gpt_job(), plan, steps=8, show_progress=False)
    assert planned().job_calibration is None


@pytest.mark.parametrize("peaks", [2.5, 0.4])
def test_an_implausible_factor_is_not_kept(peaks: float) -> None:
    plan = planned()
    peak_bytes = round(plan.predicted_peak_reserved_bytes / peaks)
    wrong = replace(plan, predicted_peak_reserved_bytes=peak_bytes, predicted_peak_device_bytes=peak_bytes)
    bf.fit(gpt_job(), wrong, steps=8, show_progress=False)
    assert planned().job_calibration is None
