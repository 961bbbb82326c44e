"""A search whose predictions are multiplied by what an earlier run of the job measured.

A factor common to all settings does not change which of two is faster or takes less, only which fit. So the
search stays as it is: its budget is divided by the factor of the peak, and what it predicts is multiplied. The
CUDA context is measured by itself and not multiplied.
"""

from __future__ import annotations

from dataclasses import replace

from brimful.errors import InfeasibleError
from brimful.planner.explain.changes import JobChanges
from brimful.planner.plan import Alternative, BudgetPoint, Plan
from brimful.planner.request import Request
from brimful.planner.search import search
from brimful.prediction.estimator import Capture
from brimful.results import JobCalibration, Suggestion
from brimful.utils.quantities import format_bytes


def search_calibrated(
    capture: Capture,
    request: Request,
    calibration: JobCalibration | None,
    job_changes: JobChanges | None = None,
) -> Plan:
    """The plan that `search` finds, its predictions multiplied by what training measured, if that is known."""
    if calibration is None:
        return search(capture, request, job_changes)
    try:
        return _plan(search(capture, _divided(request, calibration), job_changes), request, calibration)
    except InfeasibleError as error:
        raise _infeasible(error, request, calibration) from None


def _divided(request: Request, calibration: JobCalibration) -> Request:
    """The request with budget and limit, without the CUDA context, divided by the factor of the peak."""
    context_bytes, factor = request.device.context_bytes, calibration.factor_of_peak
    budget_bytes = context_bytes + int((request.budget_bytes - context_bytes) / factor)
    limit_bytes = request.limit_bytes
    if limit_bytes is not None:
        limit_bytes = context_bytes + int((limit_bytes - context_bytes) / factor)
    return replace(request, budget_bytes=budget_bytes, limit_bytes=limit_bytes)


def _plan(plan: Plan, request: Request, calibration: JobCalibration) -> Plan:
    """The plan found within the divided budget, multiplied, with a note of factors other than 1."""
    times, factor = calibration.time_factor, calibration.factor_of_peak
    context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    reserved_bytes = round(plan.predicted_peak_reserved_bytes * factor)
    return replace(
        plan,
        budget_bytes=request.budget_bytes,
        predicted_peak_allocated_bytes=round(plan.predicted_peak_allocated_bytes * factor),
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_peak_device_bytes=reserved_bytes + context_bytes,
        predicted_step_seconds=plan.predicted_step_seconds * times,
        predicted_step_seconds_interval=_multiplied(plan.predicted_step_seconds_interval, times),
        plain=_alternative(plan.plain, calibration),
        alternatives=tuple(_alternative(each, calibration) for each in plan.alternatives),
        suggestions=tuple(_suggestion(each, request, calibration) for each in plan.suggestions),
        budget_curve=tuple(
            BudgetPoint(
                budget_bytes=context_bytes + round((point.budget_bytes - context_bytes) * factor),
                predicted_step_seconds=point.predicted_step_seconds * times,
            )
            for point in plan.budget_curve
        ),
        notes=(*_notes(calibration), *plan.notes),
        job_calibration=calibration,
    )


def _infeasible(error: InfeasibleError, request: Request, calibration: JobCalibration) -> InfeasibleError:
    """The error of the divided budget, with the budget as it was asked."""
    context_bytes, factor = request.device.context_bytes, calibration.factor_of_peak
    corrected = (
        f"a budget of {format_bytes(request.budget_bytes)} counts as {format_bytes(error.budget_bytes)} of "
        f"what is predicted, as training measured peaks × {factor:.3f} on {calibration.measured_on}; the sizes "
        "below are without that factor, which job_calibration=False (--no-job-calibration) ignores.\n"
    )
    return InfeasibleError(
        f"{corrected if _changes_what_is_shown(factor) else ''}{error}",
        budget_bytes=request.budget_bytes,
        smallest_peak_bytes=context_bytes + round((error.smallest_peak_bytes - context_bytes) * factor),
        suggestions=[_suggestion(each, request, calibration) for each in error.suggestions],
    )


def _suggestion(suggestion: Suggestion, request: Request, calibration: JobCalibration) -> Suggestion:
    context_bytes, times = request.device.context_bytes, calibration.time_factor
    reserved_bytes = suggestion.predicted_peak_device_bytes - context_bytes
    interval = suggestion.predicted_difference_interval_seconds
    return replace(
        suggestion,
        predicted_peak_device_bytes=context_bytes + round(reserved_bytes * calibration.factor_of_peak),
        predicted_step_seconds=suggestion.predicted_step_seconds * times,
        predicted_difference_interval_seconds=_multiplied(interval, times),
    )


def _alternative(alternative: Alternative, calibration: JobCalibration) -> Alternative:
    interval, times = alternative.predicted_difference_interval_seconds, calibration.time_factor
    return replace(
        alternative,
        predicted_peak_reserved_bytes=round(
            alternative.predicted_peak_reserved_bytes * calibration.factor_of_peak
        ),
        predicted_step_seconds=alternative.predicted_step_seconds * times,
        predicted_difference_interval_seconds=_multiplied(interval, times),
    )


def _multiplied(interval: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return None if interval is None else (interval[0] * factor, interval[1] * factor)


def _changes_what_is_shown(factor: float) -> bool:
    """Whether a factor is other than 1 as notes show it."""
    return f"{factor:.3f}" != "1.000"


def _notes(calibration: JobCalibration) -> tuple[str, ...]:
    """The factors that change what is predicted; none if no factor does."""
    factors = {"times": calibration.time_factor, "peaks": calibration.factor_of_peak}
    shown = [f"{what} × {factor:.3f}" for what, factor in factors.items() if _changes_what_is_shown(factor)]
    if not shown:
        return ()
    steps = "a step" if calibration.measured_steps == 1 else f"{calibration.measured_steps} steps"
    return (
        f"Predictions are multiplied by what training measured on {calibration.measured_on} in "
        f"{steps} of this job on this device: {', '.join(shown)}. Notes on the "
        "search have sizes and times without it. To ignore it, set job_calibration=False "
        "(--no-job-calibration).",
    )
