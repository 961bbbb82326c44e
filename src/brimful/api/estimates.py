"""What a job takes, on a device that need not be here: estimates, traces, a comparison of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from brimful.batches import why_not_split
from brimful.capture import CautiousCapture, capture_step
from brimful.devices import Device, known_devices
from brimful.errors import UsageError
from brimful.execution.job_loop import check_loop_decides
from brimful.execution.setup import choose_device, is_of_this_machine
from brimful.job import Job
from brimful.memory import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.planner import (
    GpuSurvey,
    survey_gpus,
)
from brimful.prediction import Estimate, Estimator, Extremes, estimate_trace
from brimful.profiling.named_device import DeviceLike, resolve_device, with_best_context
from brimful.quantities import parse_bytes
from brimful.requests import (
    PrecisionLike,
    parse_implementation,
    parse_precision,
    parse_recompute,
)
from brimful.settings import (
    Action,
    OptimizerImplementation,
    Precision,
    Settings,
    UnitAction,
)
from brimful.status import busy
from brimful.trace import Guess, Trace, find_units


@busy("estimating")
def estimate(
    job: Job,
    device: DeviceLike = "auto",
    *,
    micro_batch_size: int = 1,
    gradient_accumulation_steps: int = 1,
    precision: PrecisionLike = Precision.FP32,
    optimizer: str | None = None,
    optimizer_implementation: str | OptimizerImplementation | None = None,
    recompute: str | Action | None = None,
    optimizer_in_backward: bool = False,
    offload_optimizer: bool = False,
    budget: str | float | None = None,
    allocator: str | AllocatorSettings = DEFAULT_ALLOCATOR,
    compare_allocators: bool = False,
    evaluate: bool = False,
    without: Collection[str] = (),
    save_trace: str | Path | None = None,
) -> Estimate:
    """Predict what one optimizer step takes, without running it.

    A job with a `loop` of its own is estimated as that loop runs; precision, accumulation and optimizer are
    then the loop's.

    Args:
        job: What is trained.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, or a `Device`.
        micro_batch_size: Samples in one forward and backward pass.
        gradient_accumulation_steps: Passes per optimizer step.
        precision: "fp32", "tf32", "fp16" or "bf16".
        optimizer: Replaces the job's own: "adamw", "sgd", "adafactor", …
        optimizer_implementation: "for-loop", "foreach" or "fused"; None leaves it to torch.
        recompute: "all" recomputes every unit, "none" keeps everything.
        optimizer_in_backward: Update each parameter in backward, as soon as its gradient is complete.
        offload_optimizer: Keep the optimizer's state in the host's memory and update there.
        budget: Judge against this size instead of the device's capacity.
        allocator: How PyTorch's CUDA allocator is set, as in PYTORCH_ALLOC_CONF: "expandable_segments:True".
        compare_allocators: Also tell what other settings of the allocator would change.
        evaluate: Also tell what an evaluation of one micro-batch takes after a step.
        without: Names of corrections to leave out, to see what they change.
        save_trace: Write the captured steps to this file; see `Trace.save`.

    Returns:
        Peaks, what holds them, time, and whether it fits.

    Raises:
        UsageError: An argument is invalid.
        CaptureError: The step cannot be run on fake tensors.
        SaveError: The trace cannot be written.
    """
    target = resolve_device(device)
    settings = replace(
        _settings(job, target, micro_batch_size, gradient_accumulation_steps, precision, optimizer),
        optimizer_implementation=parse_implementation(optimizer_implementation),
        optimizer_in_backward=optimizer_in_backward,
        offload_optimizer=offload_optimizer,
    )
    capture = partial(
        capture_step, job, device=target, steps=_steps_of(job), evaluates=evaluate, without=without
    )
    trace = capture(settings)
    if parse_recompute(recompute, permits_auto=False) is Action.RECOMPUTE:
        settings = _with_all_recomputed(settings, trace)
        trace = capture(settings)
    if save_trace is not None:
        trace.save(save_trace)
    return estimate_trace(
        trace,
        target,
        extremes=Extremes.of(trace, lambda guess: capture(settings, guess=guess)),
        capacity_bytes=None if budget is None else parse_bytes(budget),
        allocator=_parse_allocator(allocator),
        compares_allocators=compare_allocators,
    )


@busy("estimating")
def estimator(
    job: Job,
    device: DeviceLike = "auto",
    *,
    gradient_accumulation_steps: int = 1,
    precision: PrecisionLike = Precision.FP32,
    optimizer: str | None = None,
    recompute: str | Action | None = None,
    budget: str | float | None = None,
    allocator: str | AllocatorSettings = DEFAULT_ALLOCATOR,
) -> Estimator:
    """Predict any micro-batch size from captures at two.

    Args:
        job: What is trained.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, or a `Device`.
        gradient_accumulation_steps: Passes per optimizer step.
        precision: "fp32", "tf32", "fp16" or "bf16".
        optimizer: Replaces the job's own: "adamw", "sgd", "adafactor", …
        recompute: "all" recomputes every unit, "none" keeps everything.
        budget: Judge against this size instead of the device's capacity.
        allocator: How PyTorch's CUDA allocator is set, as in PYTORCH_ALLOC_CONF.

    Returns:
        `at(size)` estimates a micro-batch, `largest()` finds the largest that fits.

    Raises:
        UsageError: An argument is invalid.
        CaptureError: The step cannot be run on fake tensors.
    """
    target = resolve_device(device)
    settings = _settings(job, target, 1, gradient_accumulation_steps, precision, optimizer)

    def capture(settings: Settings, steps: int = 1, guess: Guess = Guess.EXPECTED) -> Trace:
        return capture_step(job, settings, target, steps=steps, guess=guess)

    if parse_recompute(recompute, permits_auto=False) is Action.RECOMPUTE:
        settings = _with_all_recomputed(settings, capture(settings))
    return Estimator(
        capture,
        settings,
        target,
        steps=_steps_of(job),
        estimate=partial(
            estimate_trace,
            capacity_bytes=None if budget is None else parse_bytes(budget),
            allocator=_parse_allocator(allocator),
        ),
    )


@busy("comparing GPUs")
def gpus(
    job: Job,
    *,
    global_batch_size: int,
    precision: PrecisionLike = Precision.FP32,
    optimizer: str | None = None,
    split_batch_norm: bool = False,
    devices: Sequence[DeviceLike] | None = None,
) -> GpuSurvey:
    """Which GPUs train a job, how, and how fast.

    Args:
        job: What is trained.
        global_batch_size: Samples per optimizer step.
        precision: Of plain training; GPUs without it are judged in fp32.
        optimizer: Replaces the job's own.
        split_batch_norm: Permit splitting a batch that BatchNorm couples, or a layer that changes its
            buffers in each forward, such as spectral norm.
        devices: Those to try; None tries all of the hardware table.

    Returns:
        One record for each: plain training's peak, the fastest of some settings that fit, or what would fit.
        Printed, they are a table.

    Raises:
        UsageError: An argument is invalid.
        CaptureError: The step cannot be run on fake tensors.
    """
    base = Settings(
        micro_batch_size=global_batch_size, precision=parse_precision(precision), optimizer=optimizer
    )
    for device in devices or ():  # before a CPU is calibrated
        if isinstance(device, Device):
            name, is_gpu = device.name, device.kind == "cuda"
        else:
            name = str(device)
            is_gpu = not is_of_this_machine(device) or choose_device(device, None).type == "cuda"
        if not is_gpu:
            raise UsageError(f"{name} is not a CUDA GPU; this table compares GPUs.")
    asked = known_devices() if devices is None else [resolve_device(device) for device in devices]
    planned = replace(job, loop=None)

    @functools.cache
    def cautious(device: Device) -> CautiousCapture:
        return CautiousCapture(planned, device)

    @functools.cache
    def capture(settings: Settings, device: Device) -> Trace:
        return cautious(device)(settings)

    fits = survey_gpus(
        capture,
        [with_best_context(device) for device in asked],
        base,
        splits_coupled_batches=split_batch_norm,
        can_split=why_not_split(job, global_batch_size) is None,
    )
    return GpuSurvey(fits, job=job.name, global_batch_size=global_batch_size)


def capture_trace(job: Job, settings: Settings, device: str | Device = "cpu") -> Trace:
    """Capture a step as a record that can be saved and read without torch.

    Args:
        job: What is trained.
        settings: How.
        device: The device whose decisions are followed.

    Returns:
        So many optimizer steps that the last one is steady: two, of a job's own loop three.

    Raises:
        CaptureError: The step cannot be run on fake tensors.
    """
    return capture_step(job, settings, resolve_device(device), steps=_steps_of(job))


LOOP_STEPS = 3
"""Optimizer steps that a job's own loop makes: its state is made in the first, the third is steady."""


def _steps_of(job: Job) -> int:
    return 2 if job.loop is None else LOOP_STEPS


def _settings(
    job: Job,
    device: Device,
    micro_batch_size: int,
    gradient_accumulation_steps: int,
    precision: PrecisionLike,
    optimizer: str | None,
) -> Settings:
    settings = Settings(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        precision=parse_precision(precision),
        optimizer=optimizer,
    )
    device.check_precision(settings.precision)
    check_loop_decides(job, settings)
    return settings


def _with_all_recomputed(settings: Settings, trace: Trace) -> Settings:
    units = tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in find_units(trace))
    return replace(settings, units=units)


def _parse_allocator(allocator: str | AllocatorSettings) -> AllocatorSettings:
    return allocator if isinstance(allocator, AllocatorSettings) else AllocatorSettings.parse(allocator)
