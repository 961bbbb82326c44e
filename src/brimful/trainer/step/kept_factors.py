"""Keeps the factors by which a plan's predictions were off, for later plans of the same job."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

from brimful.execution.attached import parameter_count
from brimful.execution.out_of_memory import RanOut
from brimful.memory.at_error import MemoryAtError
from brimful.planner import Plan
from brimful.profiling import device_record
from brimful.profiling.job_calibrations import JobKind, keep_job_calibration
from brimful.results import JobCalibration, SelfCorrection
from brimful.results.measurement import busy_text
from brimful.results.self_correction import LARGEST_PEAK_FACTOR, LARGEST_TIME_FACTOR
from brimful.trace import Category
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.utils.quantities import format_bytes, format_seconds


def keep_factors(config: RunConfig, state: TrainState, plan: Plan, found: SelfCorrection) -> str | None:
    """Keep the factors by which a plan's predictions were off, if they are of this device and these versions.

    The time of steps that waited for cores is not kept. Returns why a factor is not kept: it is implausible, or
    the machine was busy. Returns an empty text if the predictions are not of this device and these versions,
    None if both factors are kept.
    """
    if plan.job_kind is None:
        return ""
    kind = JobKind.of(
        config.job,
        device_record(state.device),
        found.settings,
        parameter_count=parameter_count(state.model.parameters()),
    )
    if kind.key != plan.job_kind:
        return ""
    before = plan.job_calibration
    times = found.measured_step_seconds / found.predicted_step_seconds
    peaks = _ratio(found.measured_peak_reserved_bytes, found.predicted_peak_reserved_bytes)
    if before is not None:  # the plan's predictions were multiplied by these
        times *= before.time_factor
        peaks = None if peaks is None else peaks * before.factor_of_peak
    if not _is_plausible(times, LARGEST_TIME_FACTOR):
        return _refused_times(found, times)
    if not _is_plausible(peaks, LARGEST_PEAK_FACTOR):
        assert found.measured_peak_reserved_bytes is not None
        return (
            f"this measurement does not correct later plans: a peak of "
            f"{format_bytes(found.predicted_peak_reserved_bytes)} was predicted and "
            f"{format_bytes(found.measured_peak_reserved_bytes)} measured, and predictions are not off by more "
            f"than × {LARGEST_PEAK_FACTOR:g}; the steps did something else than the planned one"
        )
    busy = busy_text(found.core_wait_fraction)
    if busy:
        times = 1.0 if before is None else before.time_factor
    calibration = JobCalibration(
        device=kind.device.name,
        job=kind.job,
        parameter_count=kind.parameter_count,
        precision=kind.precision,
        optimizer=kind.optimizer,
        time_factor=times,
        peak_factor=peaks,
        measured_steps=found.measured_steps,
        measured_on=date.today().isoformat(),
    )
    keep_job_calibration(kind, calibration)
    return f"these step times do not correct later plans: {busy}" if busy else None


def _bytes_of_others(found: MemoryAtError, state: TrainState) -> int:
    """What no plan counts: tensors such as data sets, and weights and gradients of other models."""
    held = dict(found.breakdown)
    own = sum(each.nbytes for each in (*state.model.parameters(), *state.model.buffers()))
    others = (held[each] - own for each in (Category.PARAMETERS, Category.GRADIENTS))
    return held[Category.OTHER_TENSORS] + sum(max(each, 0) for each in others)


def keep_after_error(config: RunConfig, state: TrainState, ran_out: RanOut) -> str | None:
    """Keep that a step under the plan took more than its predicted peak, as memory ran out in it.

    The peak of later plans is multiplied by what tensors held and what was asked for, over the predicted peak.
    Returns a note on it; None if the prediction did not exclude the error.
    """
    plan, explanation = config.plan, ran_out.explanation
    is_planned = plan is not None and state.ranks.is_first and state.settings == plan.settings
    if plan is None or not is_planned or explanation is None or explanation.found is None:
        return None
    found = explanation.found
    taken_bytes = found.peak_allocated_bytes + (found.requested_bytes or 0) - _bytes_of_others(found, state)
    predicted_bytes = plan.predicted_peak_allocated_bytes
    if taken_bytes <= predicted_bytes:
        return None
    before = state.self_correction
    if before is None or before.settings != plan.settings:  # no time is measured yet
        before = SelfCorrection(
            step=state.step + 1,
            measured_steps=1,
            settings=plan.settings,
            predicted_step_seconds=plan.predicted_step_seconds,
            measured_step_seconds=plan.predicted_step_seconds,
            predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
            measured_peak_reserved_bytes=None,
            exceeds_budget=True,
            core_wait_fraction=None,
        )
    peak_bytes = plan.predicted_peak_reserved_bytes * taken_bytes // predicted_bytes
    peak_bytes = max(peak_bytes, before.measured_peak_reserved_bytes or 0)
    refusal = keep_factors(config, state, plan, replace(before, measured_peak_reserved_bytes=peak_bytes))
    if refusal is not None:
        return refusal or None
    return (
        f"memory ran out with {format_bytes(taken_bytes)} where the plan predicts a peak of "
        f"{format_bytes(predicted_bytes)}: later plans of this job multiply peaks by "
        f"{taken_bytes / predicted_bytes:.3f} more (--no-job-calibration ignores it)"
    )


def _refused_times(found: SelfCorrection, times: float) -> str:
    """Why a time is not kept, with its most probable cause."""
    cause = "probably the rates of this machine were measured beside other work: brimful calibrate --force"
    if times > 1:
        cause = busy_text(found.core_wait_fraction) or "probably other work on this machine slowed the steps"
    return (
        f"this measurement does not correct later plans: {format_seconds(found.predicted_step_seconds)} a step "
        f"were predicted and {format_seconds(found.measured_step_seconds)} measured, and predictions are not "
        f"off by more than × {LARGEST_TIME_FACTOR:g}; {cause}"
    )


def _ratio(measured: int | None, predicted: int) -> float | None:
    return None if measured is None else measured / predicted


def _is_plausible(factor: float | None, largest: float) -> bool:
    return factor is None or 1 / largest <= factor <= largest
