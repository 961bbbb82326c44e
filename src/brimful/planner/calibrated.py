"""A request or a plan, with predictions multiplied by what an earlier run of the job measured.

A factor common to all settings does not change which of two is faster or takes less, only which fit. So the
search stays as it is: its budget is divided by the factor of the peak, and what it predicts is multiplied. The
CUDA context is measured by itself and not multiplied.
"""

from __future__ import annotations

from dataclasses import replace

from brimful.errors import InfeasibleError
from brimful.planner.plan import Alternative, BudgetPoint, Plan
from brimful.planner.request import Request
from brimful.quantities import format_bytes
from brimful.results import JobCalibration


def request_calibrated(request: Request, calibration: JobCalibration) -> Request:
    """The request whose search, by predictions as they are, finds what fits when they are multiplied.

    Budget and limit, without the CUDA context, are divided by the factor of the peak.
    """
    return replace(
        request,
        budget_bytes=_divided(request.budget_bytes, request, calibration),
        limit_bytes=None
        if request.limit_bytes is None
        else _divided(request.limit_bytes, request, calibration),
    )


def plan_calibrated(plan: Plan, request: Request, calibration: JobCalibration) -> Plan:
    """The plan found for `request_calibrated`, its predictions multiplied, with a note of factors other than 1.

    `request` is the one before calibration.
    """
    low_high = plan.predicted_step_seconds_interval
    times = calibration.time_factor
    allocated, reserved = (
        round(size_bytes * calibration.factor_of_peak)
        for size_bytes in (plan.predicted_peak_allocated_bytes, plan.predicted_peak_reserved_bytes)
    )
    context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    return replace(
        plan,
        budget_bytes=request.budget_bytes,
        predicted_peak_allocated_bytes=allocated,
        predicted_peak_reserved_bytes=reserved,
        predicted_peak_device_bytes=reserved + context_bytes,
        predicted_step_seconds=plan.predicted_step_seconds * times,
        predicted_step_seconds_interval=None
        if low_high is None
        else (low_high[0] * times, low_high[1] * times),
        plain=_alternative(plan.plain, calibration),
        alternatives=tuple(_alternative(each, calibration) for each in plan.alternatives),
        budget_curve=tuple(
            BudgetPoint(
                budget_bytes=context_bytes
                + round((point.budget_bytes - context_bytes) * calibration.factor_of_peak),
                predicted_step_seconds=point.predicted_step_seconds * times,
            )
            for point in plan.budget_curve
        ),
        notes=(*_notes(calibration), *plan.notes),
        job_calibration=calibration,
    )


def infeasible_calibrated(
    error: InfeasibleError, request: Request, calibration: JobCalibration
) -> InfeasibleError:
    """The error that the search raised for `request_calibrated`, with the budget as it was asked."""
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
    )


def reserved_within(budget_bytes: int, *, context_bytes: int, factor: float) -> int:
    """The most bytes, without the CUDA context, that may be predicted as reserved within a budget.

    `budget_bytes` includes `context_bytes`; `factor` is the measured over the predicted peak.
    """
    return int((budget_bytes - context_bytes) / factor)


def _divided(size_bytes: int, request: Request, calibration: JobCalibration) -> int:
    context_bytes = request.device.context_bytes
    factor = calibration.factor_of_peak
    return context_bytes + reserved_within(size_bytes, context_bytes=context_bytes, factor=factor)


def _alternative(alternative: Alternative, calibration: JobCalibration) -> Alternative:
    interval, times = alternative.predicted_difference_interval_seconds, calibration.time_factor
    reserved_bytes = round(alternative.predicted_peak_reserved_bytes * calibration.factor_of_peak)
    return replace(
        alternative,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=alternative.predicted_step_seconds * times,
        predicted_difference_interval_seconds=None
        if interval is None
        else (interval[0] * times, interval[1] * times),
    )


def _changes_what_is_shown(factor: float) -> bool:
    """Whether a factor is other than 1 as notes show it."""
    return f"{factor:.3f}" != "1.000"


def _notes(calibration: JobCalibration) -> tuple[str, ...]:
    """The factors that change what is predicted; none if no factor does."""
    factors = {"times": calibration.time_factor, "peaks": calibration.factor_of_peak}
    shown = [f"{what} × {factor:.3f}" for what, factor in factors.items() if _changes_what_is_shown(factor)]
    if not shown:
        return ()
    return (
        f"Predictions are multiplied by what training measured on {calibration.measured_on} in "
        f"{calibration.measured_steps} steps of this job on this device: {', '.join(shown)}. Notes on the "
        "search have sizes and times without it. To ignore it, set job_calibration=False "
        "(--no-job-calibration).",
    )
