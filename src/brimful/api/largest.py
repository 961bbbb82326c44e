"""The largest size of a job that trains: a few are predicted, until one fits and the next does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Unpack

from brimful.api.estimates import estimate
from brimful.api.plans import planned, smallest_step
from brimful.errors import CaptureError, InfeasibleError, UsageError
from brimful.execution.random_state import undisturbed
from brimful.job import Job
from brimful.options import PlanKeywords, PlanOptions, takes_options
from brimful.planner import (
    MOST_STEPS,
    Largest,
    LargestEstimate,
    LargestPlan,
    Limit,
    Plan,
    Tried,
    find_largest,
    tried_estimate,
    tried_plan,
    tried_step,
    tried_without_plan,
)
from brimful.prediction import Estimate
from brimful.prediction.estimator import MOST_SAMPLES
from brimful.profiling import check_planned_split
from brimful.profiling.named_device import DeviceLike
from brimful.utils.status import busy, reporting_part

MakeJob = Callable[[int], Job]
"""Makes the job of a size; a ValueError says that it takes no such size, nor a larger one."""

_OF_THE_RESULT = ("compare_allocators", "save_trace")
"""Options of an estimate that only the result is asked."""
_WITHOUT = "`brimful plan` of it, without --largest, says what would."


@undisturbed()
@busy("searching")
def largest(
    make_job: MakeJob,
    device: DeviceLike = "auto",
    *,
    option: str = "size",
    step: int = 1,
    start: int = 1,
    most: int | None = None,
    **options: Any,
) -> LargestEstimate:
    """Find the largest size of a job with which a step fits, from estimates of a few sizes.

    It fits if the upper end of its interval does, without cache flushes. More is assumed to take more memory.

    Args:
        make_job: Makes the job of a size, such as of a number of layers. A ValueError ends the search: the job
            takes no such size, nor a larger one.
        device: As for `brimful.estimate`.
        option: Name of the size, for reports.
        step: Only multiples of this number are tried.
        start: The first size that is tried.
        most: The search ends at this size; larger ones may fit. Default: 2**20 steps.
        **options: Options of `brimful.estimate`.

    Returns:
        The size with its estimate. The next size does not fit, or the job does not take it.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: Not even the smallest size fits.
        CaptureError: The step of the smallest size cannot be run on fake tensors.
    """
    job_of = lru_cache(maxsize=1)(make_job)
    of_result = {name: options.pop(name) for name in _OF_THE_RESULT if options.get(name)}
    predict = partial(_predicted, job_of, device, option, options)
    steps = MOST_STEPS if most is None else most // step
    size = find_largest(predict, refusal=_refusal_of(job_of), step=step, start=start, most=steps)
    _check_fits(job_of, size, option, "A plan may fit: `brimful plan` with --largest.")
    assert size.result is not None
    job = job_of(size.value)
    found = estimate(job, device, **options, **of_result) if of_result else size.result
    return LargestEstimate(option=option, size=size, estimate=found)


@undisturbed()
@busy("searching")
def largest_micro_batch(job: Job, device: DeviceLike = "auto", **options: Any) -> LargestEstimate:
    """Find the largest micro-batch that fits, as `estimate` does, and why the next one does not.

    Args:
        job: The job to estimate.
        device: As for `brimful.estimate`.
        **options: Options of `brimful.estimate`.

    Returns:
        The micro-batch with its estimate.
    """
    found = estimate(job, device, micro_batch_size="largest", **options)
    value = found.settings.micro_batch_size
    tried = {value: tried_estimate(found, f"{value:,}")}
    limited_by, reason = Limit.SEARCH, "the search ends there; larger ones may fit"
    if value < MOST_SAMPLES:
        tried[value + 1] = beyond = tried_estimate(found.at(value + 1), f"{value + 1:,}")
        limited_by, reason = Limit.MEMORY, beyond.why
    size = Largest(
        value=value, next_value=value + 1, limited_by=limited_by, reason=reason, result=found, tried=tried
    )
    return LargestEstimate(option="micro_batch_size", size=size, estimate=found)


@undisturbed()
@busy("searching")
@takes_options(PlanOptions, PlanKeywords)
def largest_plan(
    make_job: MakeJob,
    device: DeviceLike = "auto",
    *,
    global_batch_size: int | None = None,
    option: str = "size",
    step: int = 1,
    start: int = 1,
    most: int | None = None,
    world_size: int = 1,
    num_nodes: int = 1,
    network: str | float | None = None,
    **options: Unpack[PlanKeywords],
) -> LargestPlan:
    """Find the largest size of a job with which a plan exists, as safe as `max_exceedance` asks for.

    Of the first sizes that are tried only the smallest step is sought; the largest is planned, and so is the
    next. Beside it is the largest size without a plan: everything kept, the whole batch in one micro-batch. Job
    calibrations are not used, as each is of one size.

    Args:
        make_job: As for `largest`.
        device: As for `brimful.plan`.
        global_batch_size: Samples per optimizer step. None: the size is that of the micro-batch on each rank,
            without gradient accumulation.
        option: Name of the size, for reports.
        step: Only multiples of this number are tried.
        start: The first size that is tried.
        most: The search ends at this size; larger ones may fit. Default: 2**20 steps.
        world_size: As for `brimful.plan`.
        num_nodes: As for `brimful.plan`.
        network: As for `brimful.plan`.
        **options: The fields of `PlanOptions`.

    Returns:
        The size with its plan. No plan is as safe for the next size, or the job does not take it.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: No plan exists for the smallest size.
        CaptureError: The step of the smallest size cannot be run on fake tensors.
    """
    asked = replace(PlanOptions.of(options), job_calibration=False)
    if asked.budget is not None and asked.budget.endswith("%"):
        raise UsageError(
            f"a budget of {asked.budget} is a share of the baseline's peak, which grows with {option}. Give a "
            "size, such as 11GiB."
        )
    if global_batch_size is None and asked.micro_batch_size is not None:
        raise UsageError("the largest micro-batch is searched for; give no micro_batch_size.")
    job_of = lru_cache(maxsize=1)(make_job)
    ranks: dict[str, Any] = {"world_size": world_size, "num_nodes": num_nodes, "network": network}

    def request_of(value: int) -> tuple[PlanOptions, int]:
        """The options and the global batch of a size."""
        if global_batch_size is None:
            return replace(asked, micro_batch_size=value), value * world_size
        return asked, global_batch_size

    def predict(value: int) -> Tried[Estimate]:
        of_size, batch = request_of(value)
        with reporting_part(f"{option} {value:,}"):
            try:
                least, request = smallest_step(job_of(value), device, of_size, global_batch_size=batch, **ranks)
            except CaptureError as error:
                return Tried.refused(str(error))
        return tried_step(least, request, f"{value:,}")

    def plan_of(value: int) -> Tried[Plan]:
        of_size, batch = request_of(value)
        with reporting_part(f"{option} {value:,}"):
            try:
                plan = planned(
                    *(job_of(value), device, of_size, check_planned_split),
                    global_batch_size=batch,
                    suggests=False,
                    **ranks,
                )
            except InfeasibleError as error:
                return tried_without_plan(error, f"{value:,}")
        return tried_plan(plan, f"{value:,}")

    refusal = _refusal_of(job_of)
    steps = MOST_STEPS if most is None else most // step
    expected = find_largest(predict, refusal=refusal, step=step, start=start, most=steps)
    _check_fits(job_of, expected, option, _WITHOUT)
    size = find_largest(plan_of, refusal=refusal, step=step, start=expected.value, most=steps)
    _check_fits(job_of, size, option, _WITHOUT)
    found = size.result
    assert found is not None
    plain = partial(_kept, job_of, device, option, found, has_batch=global_batch_size is None)
    kept = find_largest(plain, step=step, start=size.value, most=size.value // step)
    at_plan = kept.tried[size.value].result
    assert at_plan is not None
    return LargestPlan(
        option=option,
        size=replace(size, tried={**expected.tried, **size.tried}),
        plan=found,
        kept=at_plan,
        without_plan=_of_kept(kept, option),
    )


def _of_kept(kept: Largest[Estimate], option: str) -> LargestEstimate | None:
    if kept.result is None:
        return None
    return LargestEstimate(option=option, size=kept, estimate=kept.result)


def _predicted(
    job_of: MakeJob, device: DeviceLike, option: str, options: dict[str, Any], value: int
) -> Tried[Estimate]:
    with reporting_part(f"{option} {value:,}"):
        try:
            found = estimate(job_of(value), device, suggest=False, **options)
        except CaptureError as error:
            return Tried.refused(str(error))
    return tried_estimate(found, f"{value:,}")


def _kept(
    job_of: MakeJob, device: DeviceLike, option: str, plan: Plan, value: int, *, has_batch: bool
) -> Tried[Estimate]:
    """Training without a plan in the plan's budget; with `has_batch` the size is that of the micro-batch."""
    settings = replace(plan.plain.settings, micro_batch_size=value) if has_batch else plan.plain.settings
    with reporting_part(f"without a plan, {option} {value:,}"):
        job = replace(job_of(value), loop=None)
        found = estimate(job, device, settings=settings, budget=plan.budget_bytes, suggest=False)
    return tried_estimate(found, f"{value:,}")


def _refusal_of(job_of: MakeJob) -> Callable[[int], str | None]:
    """What says why a job does not take a size."""

    def refusal(value: int) -> str | None:
        try:
            job_of(value)
        except ValueError as error:  # brimful's UsageError is one
            return str(error)
        return None

    return refusal


def _check_fits(job_of: MakeJob, size: Largest[Any], option: str, way_out: str) -> None:
    """Raise an error that says why no size fits, if none does."""
    if size.result is not None:
        return
    least = size.next_value
    if size.limited_by is Limit.MODEL:
        job_of(least)  # raises its own error, unless it is the step that cannot be captured
        raise CaptureError(f"{option}={least}: {size.reason}")
    smallest = size.tried[least]
    assert smallest.needed_bytes is not None
    raise InfeasibleError(
        f"not even {option}={least} is certain to fit: {size.reason}. {way_out}",
        budget_bytes=smallest.permitted_bytes,
        smallest_peak_bytes=int(smallest.needed_bytes),
    )
