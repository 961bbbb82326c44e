"""Plans: made, and checked against the job as it is now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

from brimful.api.job_changes import JobChanges
from brimful.arguments import checks_arguments
from brimful.capture import CautiousCapture
from brimful.capture.cache import CachedCapture
from brimful.codec import PositiveInt
from brimful.devices import Device
from brimful.errors import UsageError
from brimful.execution.longest_batch import with_longest_batch
from brimful.execution.random_state import undisturbed
from brimful.execution.setup import is_of_this_machine
from brimful.job import Job
from brimful.options import PlanKeywords, PlanOptions, takes_options
from brimful.planner import (
    MEAN_OVER_SAMPLES_NOTE,
    Plan,
    PlanCheck,
    check_trace,
    least_step,
    search_calibrated,
)
from brimful.planner.plan import NOT_SURE
from brimful.planner.request import Request
from brimful.prediction import Estimate
from brimful.prediction.growth import growth_notes, keeps_memory
from brimful.profiling import check_planned_split
from brimful.profiling.free_memory import DeviceMemory, explains_memory, memory_here, memory_notes
from brimful.profiling.job_calibrations import JobKind, has_job_calibrations, kept_job_calibration
from brimful.profiling.named_device import DeviceLike, resolve_device
from brimful.requests import request_of, with_budget
from brimful.results import JobCalibration
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.utils.quantities import parse_bytes
from brimful.utils.status import busy

SplitCheck = Callable[[Job, Settings, Trace], bool]
"""Whether a batch of a job is known to be what its parts are, given settings and the trace of training without
a plan; raises if the batch may not be divided."""


@undisturbed()
@busy("planning")
@takes_options(PlanOptions, PlanKeywords)
def plan(
    job: Job,
    device: DeviceLike = "auto",
    *,
    global_batch_size: PositiveInt,
    world_size: PositiveInt = 1,
    num_nodes: PositiveInt = 1,
    network: str | float | None = None,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Find the fastest way to train a global batch inside a memory budget.

    Options that are given are kept; the plan chooses the others. By default nothing is chosen that changes the
    mathematics: the precision and the optimizer are the job's, and a batch is not split where BatchNorm couples
    its samples or a forward updates state that the next one reads, such as a teacher's weights.

    Args:
        job: The job to train.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, a description
            ("name=…,memory=8GiB,bandwidth=300GB,tflops=9"), or a `Device`. On a GPU of this machine the default
            budget is the memory that is free now; notes name the processes that hold the rest.
        global_batch_size: Samples per optimizer step.
        world_size: Devices of this kind that divide the global batch evenly and train together.
        num_nodes: Machines that the ranks are divided among.
        network: Bandwidth between two machines, per second and direction, such as "12.5GB". Default:
            100 Gbit/s.
        **options: The fields of `PlanOptions`.

    Returns:
        The plan, whose predicted peak, from a replay of the allocator, is within the budget.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: Nothing permitted fits: by how much, because of what, and what would.
        CaptureError: The step cannot be run on fake tensors.
        EquivalenceError: The plan splits the batch, and the loss is not a mean over samples; see `Job.count`.
    """
    return planned(
        job,
        device,
        PlanOptions.of(options),
        check_planned_split,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        network=network,
    )


@undisturbed()
@busy("planning")
@takes_options(PlanOptions, PlanKeywords)
def plan_of_trainer(
    job: Job,
    device: DeviceLike,
    *,
    check: SplitCheck,
    global_batch_size: PositiveInt,
    world_size: PositiveInt,
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan as `plan` does, for a trainer that divides its batches and weighs their losses itself.

    Args:
        job: As for `plan`.
        device: As for `plan`.
        check: Raises if the trainer may not divide its batches as the settings of the plan say.
        global_batch_size: As for `plan`.
        world_size: As for `plan`.
        **options: The fields of `PlanOptions`.

    Returns:
        The plan.
    """
    asked = PlanOptions.of(options)
    return planned(job, device, asked, check, global_batch_size=global_batch_size, world_size=world_size)


def planned(
    job: Job,
    device: DeviceLike,
    asked: PlanOptions,
    check: SplitCheck,
    *,
    global_batch_size: int,
    world_size: int,
    num_nodes: int = 1,
    network: str | float | None = None,
    suggests: bool = True,
) -> Plan:
    """The plan of `plan`, with the options in a record; `check` is as for `plan_of_trainer`.

    Without `suggests` neither the plan nor an InfeasibleError has suggestions, which take captures.
    """
    is_here = is_of_this_machine(device)
    longest = with_longest_batch(job, max(global_batch_size // world_size, 1))
    job = longest.job
    request, target, memory = _requested(
        job,
        device,
        asked,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        network=network,
    )
    with CachedCapture(job, target) as capture, explains_memory(memory):
        request = with_budget(request, capture)
        calibration = _calibration(job, request, capture) if asked.job_calibration and is_here else None
        job_changes = JobChanges(job, target, capture) if suggests else None
        found = search_calibrated(capture, request, calibration, job_changes)
        is_mean = check(job, found.settings, capture(request.baseline_settings()))
        kind = _kind(job, request, found.settings, capture).key if is_here else None
        growth: tuple[str, ...] = ()
        if keeps_memory(capture(found.settings)):
            growth = growth_notes(capture(found.settings, 2))
    of_plan = (note for note in found.notes if not is_mean or note != MEAN_OVER_SAMPLES_NOTE)
    of_growth = (f"{NOT_SURE}{each}." for each in growth)
    notes = (*memory_notes(memory, request.budget_bytes), *longest.notes, *of_growth, *of_plan)
    return replace(
        found,
        asked=asked,
        job_kind=kind,
        notes=notes,
        sample_sizes=longest.sizes,
        tokens_per_sample=longest.tokens_per_sample,
    )


def smallest_step(
    job: Job,
    device: DeviceLike,
    asked: PlanOptions,
    *,
    global_batch_size: int,
    world_size: int,
    num_nodes: int,
    network: str | float | None,
) -> tuple[Estimate, Request]:
    """The step that takes least of all that a plan may choose, and the request; arguments as for `plan`."""
    job = with_longest_batch(job, max(global_batch_size // world_size, 1)).job
    request, target, memory = _requested(
        job,
        device,
        asked,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        network=network,
    )
    with CachedCapture(job, target) as capture, explains_memory(memory):
        request = with_budget(request, capture)
        return least_step(capture, request), request


def _requested(
    job: Job,
    device: DeviceLike,
    asked: PlanOptions,
    *,
    global_batch_size: int,
    world_size: int,
    num_nodes: int,
    network: str | float | None,
) -> tuple[Request, Device, DeviceMemory | None]:
    """The request without its budget, the device, and its free memory if it is in this machine."""
    target = resolve_device(device)
    if network is not None:
        target = replace(target, network_bytes_per_second=parse_bytes(network))
    request = request_of(
        job,
        target,
        asked,
        global_batch_size=global_batch_size,
        world_size=world_size,
        num_nodes=num_nodes,
        is_here=is_of_this_machine(device),
    )
    memory = memory_here(job, device, ranks_of_machine=world_size // num_nodes)
    if memory is not None and asked.budget is None:
        request = replace(request, device=replace(target, capacity_bytes=memory.available_bytes))
    return request, target, memory


def _kind(job: Job, request: Request, settings: Settings, capture: CachedCapture) -> JobKind:
    """The kind of the job under some settings, whose predictions on this machine share a factor."""
    count = capture(request.baseline_settings()).parameter_count
    return JobKind.of(job, request.device, settings, parameter_count=count)


def _calibration(job: Job, request: Request, capture: CachedCapture) -> JobCalibration | None:
    """What training measured of the job on this device; None where a plan may choose between kinds of it.

    Factors of one precision or optimizer say nothing of another.
    """
    settings = request.baseline_settings()
    is_one_kind = len(request.precisions) == 1 and not request.asked.allow_optimizers
    if not is_one_kind or not has_job_calibrations() or not request.device.supports(settings.precision):
        return None
    return kept_job_calibration(_kind(job, request, settings, capture))


@undisturbed()
@busy("checking the plan")
@checks_arguments
def check_plan(
    job: Job, plan: Plan, device: DeviceLike | None = None, *, budget: str | float | None = None
) -> PlanCheck:
    """Predict the settings of a plan again; see `Plan.check`."""
    trace, target = captured_plan(job, plan, device)
    budget_bytes = plan.budget_bytes if budget is None else parse_bytes(budget, is_budget=False)
    return check_trace(trace, plan, target, budget_bytes)


@undisturbed()
@busy("capturing the step of the plan")
def captured_plan(job: Job, plan: Plan, device: DeviceLike | None = None) -> tuple[Trace, Device]:
    """The step of a job under a plan's settings, and the device; by default the plan's."""
    planned_for = plan.device if plan.device_kind == "cuda" else "cpu"
    target = resolve_device(planned_for if device is None else device)
    if target.kind != plan.device_kind:
        raise UsageError(
            f"the plan is for {plan.device} ({plan.device_kind}), and {target.name} is a {target.kind} device."
        )
    longest = with_longest_batch(job, plan.settings.rank_batch_size).job
    return CautiousCapture(replace(longest, loop=None), target)(plan.settings), target
