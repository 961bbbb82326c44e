"""Measured time and peak of a run → other settings that are better, by predictions corrected with both.

Start reading at `find_better`. A search takes seconds, so `may_be_better` first asks the plan's own curve over
budgets whether it can gain anything.
"""

from __future__ import annotations

from dataclasses import replace

from brimful.capture.cache import CachedCapture
from brimful.cost import difference_interval
from brimful.cost.uncertainty import STEP_SPREAD
from brimful.devices import Device
from brimful.execution.longest_batch import with_longest_batch
from brimful.job import Job
from brimful.planner import Plan, Request, estimate_of, reserved_within, search
from brimful.planner.simplest import Complexity, complexity_of
from brimful.results import BetterSettings
from brimful.settings import Settings
from brimful.trainer.step.measured_steps import MeasuredSteps, exceeds
from brimful.trainer.step.planning import request_in_training


def may_be_better(plan: Plan, measured: MeasuredSteps) -> bool:
    """Whether a search may find better settings.

    A factor of time is common to all settings and decides nothing. A peak below the prediction leaves memory of
    the budget, whose use the plan's curve over budgets shows.

    Args:
        plan: In force.
        measured: What its steps measured.

    Returns:
        True if the plan exceeds its budget, or a step could be faster by more than measurements vary.
    """
    context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    if measured.peak_reserved_bytes is None:
        return False
    if exceeds(plan.budget_bytes, measured.peak_reserved_bytes, context_bytes):
        return True
    factor = measured.peak_factor(plan.predicted_peak_reserved_bytes)
    if factor >= 1 or complexity_of(plan.settings) is Complexity.NOTHING:
        return False
    permitted_bytes = context_bytes + reserved_within(
        plan.budget_bytes, context_bytes=context_bytes, factor=factor
    )
    beyond = [point for point in plan.budget_curve if point.budget_bytes >= permitted_bytes]
    if not plan.budget_curve:  # a plan written by hand
        return True
    least_seconds = (beyond[:1] or plan.budget_curve[-1:])[0].predicted_step_seconds
    return least_seconds < plan.predicted_step_seconds * (1 - STEP_SPREAD)


def find_better(
    job: Job, plan: Plan, settings: Settings, device: Device, measured: MeasuredSteps
) -> BetterSettings | None:
    """Search again, with predictions multiplied by what was measured.

    Args:
        job: The job in training.
        plan: Its budget and options are kept.
        settings: Those in force.
        device: That trains.
        measured: Of steps under these settings.

    Returns:
        Other settings within the budget: faster by more than the uncertainty of the difference, or any if those
        in force exceed the budget. None if there are none.

    Raises:
        InfeasibleError: Nothing permitted fits.
        CaptureError: A step cannot be captured.
    """
    job = with_longest_batch(replace(job, data=None), settings.rank_batch_size).job
    with CachedCapture(replace(job, loop=None), device) as capture:
        ours = estimate_of(settings, capture, device)
        peak_bytes = measured.peak_reserved_bytes
        peak_factor = measured.peak_factor(ours.predicted_peak_reserved_bytes)
        request = _request(job, plan, settings, device, peak_factor)
        coupled = capture(request.baseline_settings()).batch_coupled_modules
        if coupled:  # other micro-batches would have other statistics
            pins = replace(request.pins, micro_batch_size=settings.micro_batch_size)
            request = replace(request, pins=pins)
        other = search(capture, request).settings
        if other == settings:
            return None
        theirs = estimate_of(other, capture, device)
    low, high = difference_interval(theirs.step_time, ours.step_time, device, device_spread=measured.spread)
    must_change = exceeds(plan.budget_bytes, peak_bytes, device.context_bytes)
    if high >= 0 and not must_change:
        return None
    time_factor = measured.step_seconds / ours.predicted_step_seconds
    reserved_bytes = round(theirs.predicted_peak_reserved_bytes * peak_factor)
    return BetterSettings(
        settings=other,
        predicted_step_seconds=theirs.predicted_step_seconds * time_factor,
        predicted_difference_interval_seconds=(low * time_factor, high * time_factor),
        predicted_peak_allocated_bytes=round(theirs.predicted_peak_allocated_bytes * peak_factor),
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_peak_device_bytes=reserved_bytes + device.context_bytes,
    )


def _request(job: Job, plan: Plan, settings: Settings, device: Device, peak_factor: float) -> Request:
    """The request for settings whose corrected peak is within the budget."""
    reserved_bytes = reserved_within(plan.budget_bytes, context_bytes=device.context_bytes, factor=peak_factor)
    return request_in_training(
        job,
        plan,
        settings,
        device,
        budget_bytes=device.context_bytes + reserved_bytes,
        micro_batch_size=plan.asked.micro_batch_size,
        splits_coupled_batches=plan.asked.split_batch_norm,
        exceedance=plan.asked.max_exceedance,
    )
