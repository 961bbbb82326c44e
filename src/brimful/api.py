"""The public functions: the one place where the stages are wired.

    Job ─ capture ─▶ Trace ─ timeline, cost ─▶ Estimate
                       └──── planning ───────▶ Plan ─ applying ─▶ nn.Module ─ train ─▶ weights, report

Every function takes a `Job` and a device. Nothing here computes; it says what is handed to which stage.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from brimful import profiling
from brimful.batches import why_not_split
from brimful.capture import CautiousCapture, capture_step, fake_model
from brimful.devices import Device, find_device, known_devices, with_context
from brimful.errors import InterruptedRunError, UnknownNameError, UsageError
from brimful.execution.job_loop import check_loop_decides
from brimful.execution.planned_step import PlannedStep
from brimful.execution.setup import choose_device, is_of_this_machine
from brimful.gc_pause import without_garbage_collection
from brimful.job import Job
from brimful.memory import DEFAULT_ALLOCATOR, AllocatorSettings, predict_memory
from brimful.optimizers import ZERO_OPTIMIZERS, NamedOptimizer, has_implementation, make_optimizer
from brimful.options import PlanOptions
from brimful.planner import (
    GpuSurvey,
    OptimizerChoice,
    Plan,
    PlanCheck,
    Request,
    check_trace,
    search,
    survey_gpus,
)
from brimful.prediction import MARGIN_FRACTION, Estimate, Estimator, Extremes, estimate_trace
from brimful.prediction.estimator import Capture
from brimful.profiling import (
    THOROUGH_SWEEPS,
    Progress,
    best_context,
    calibrate_cpu,
    calibrate_gpu,
    check_may_split,
    check_split,
    device_record,
    measure_context,
    measure_step,
    with_kept_calibration,
)
from brimful.quantities import format_bytes, parse_bytes
from brimful.results import Certificate, Measurement, StopReason, TrainingResult
from brimful.settings import (
    Action,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    UnitAction,
    check_count,
)
from brimful.status import busy
from brimful.trace import Guess, Trace, find_units, per_rank_trace
from brimful.trainer import Callback, Schedule, Trainer

DeviceLike = str | int | torch.device | Device
"""What names a device; see `resolve_device`."""

PrecisionLike = str | torch.dtype | Precision
"""What names a precision; see `parse_precision`."""


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
        optimizer_implementation=_parse_implementation(optimizer_implementation),
        optimizer_in_backward=optimizer_in_backward,
        offload_optimizer=offload_optimizer,
    )
    capture = partial(
        capture_step, job, device=target, steps=_steps_of(job), evaluates=evaluate, without=without
    )
    trace = capture(settings)
    if _parse_recompute(recompute, permits_auto=False) is Action.RECOMPUTE:
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

    if _parse_recompute(recompute, permits_auto=False) is Action.RECOMPUTE:
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
        [_with_best_context(device) for device in asked],
        base,
        splits_coupled_batches=split_batch_norm,
        can_split=why_not_split(job, global_batch_size) is None,
    )
    return GpuSurvey(fits, job=job.name, global_batch_size=global_batch_size)


@busy("planning")
def plan(
    job: Job,
    device: DeviceLike = "auto",
    *,
    global_batch_size: int,
    budget: str | float | None = None,
    precision: PrecisionLike | Sequence[PrecisionLike] = Precision.FP32,
    micro_batch_size: int | None = None,
    recompute: str | Action | None = None,
    optimizer: str | None = None,
    optimizer_implementation: str | OptimizerImplementation | None = None,
    allow_optimizers: str | Sequence[str] = (),
    chunked_loss: bool = True,
    expandable_segments: bool = True,
    offload_activations: bool = True,
    host_memory: str | float | None = None,
    split_batch_norm: bool = False,
    optimizer_in_backward: bool = False,
    offload_optimizer: bool | None = None,
    prefetch_inputs: bool = False,
    own_checkpointing: str = "keep",
    world_size: int = 1,
    num_nodes: int = 1,
    network: str | float | None = None,
    parallelism: str | Parallelism = "auto",
    reshard_after_forward: bool | None = None,
    param_dtype: str | None = None,
    offload_parameters: bool = False,
) -> Plan:
    """Find the fastest way to train a global batch inside a memory budget.

    What is pinned stays; what is not is chosen. By default nothing is chosen that changes the mathematics: the
    precision and the optimizer are the job's, and a batch is not split where BatchNorm couples its samples or a
    layer changes its buffers in each forward.

    Args:
        job: What is trained.
        device: A name from the hardware table ("RTX 3090"), "cuda:0" or "cpu" for this machine, or a `Device`.
        global_batch_size: Samples per optimizer step.
        budget: A size ("11GiB"), a share of what plain training would take ("50%"), or None for what the device
            has, on a GPU less a margin of 5 % for what the prediction may miss. The CUDA context counts. Ranks
            on the processors of one machine have equal parts of its memory.
        precision: One, several to choose from, or "auto" for all that the device has; the first is plain's.
        micro_batch_size: Pins the micro-batch; it divides the global batch.
        recompute: "all" or "none" pins every unit's action.
        optimizer: Replaces the job's own.
        optimizer_implementation: Pins "for-loop", "foreach" or "fused". None takes the fused kernel where the
            optimizer has one and its user chose none: the same formula, rounded in another order.
        allow_optimizers: Others that may take the place of the job's own, which changes the mathematics:
            "adafactor", "adamw8bit", "adamw4bit".
        chunked_loss: Permit computing a cross-entropy over a large vocabulary a part of the tokens at a time:
            the same sums in another order.
        expandable_segments: Permit telling PyTorch's CUDA allocator to grow its segments, which leaves less
            memory unused.
        offload_activations: Permit offloading activations to host memory; the same mathematics. No effect on a
            CPU, whose memory is the host's.
        host_memory: What that and an optimizer on the host may take there: a size ("64GiB"). Default: half of
            this machine's memory if the device is in it, half of the GPU's memory if it is only named.
        split_batch_norm: Permit splitting a batch that BatchNorm couples, or a layer that changes its
            buffers in each forward, such as spectral norm.
        optimizer_in_backward: Update each parameter in backward and free its gradient.
            The batch is then whole, nothing is clipped, and where memory runs out in backward,
            training resumes from the last save.
        offload_optimizer: Pins whether the optimizer's state is in the host's memory and the update is computed
            there, in the host's rounding. None lets the plan choose, for one GPU and where offloading is
            permitted.
        prefetch_inputs: Copy the next micro-batch of a step to the GPU while one is computed, for the memory of
            one more; of use from pinned memory. Not for losses that compare samples.
        own_checkpointing: "off" turns off the model's own activation checkpointing, such as that of
            `gradient_checkpointing_enable()`, while the plan is applied, so that the plan alone decides what is
            recomputed. "keep" leaves it on.
        world_size: Devices of this kind that divide the global batch evenly and train together.
        num_nodes: Machines that the ranks are divided among.
        network: What goes between two machines in a second, one way, "12.5GB"; None takes 100 Gbit/s.
        parallelism: "ddp", where each rank has the whole model, "fsdp2", where each has a part of every
            parameter, gradient and optimizer state, or "auto" for the faster of these that fits. "zero1",
            "zero2" and "zero3" are DeepSpeed's, which divides optimizer state, gradients too, parameters too.
        reshard_after_forward: Under FSDP2, pins whether gathered parameters are let go of between forward and
            backward; None takes the faster that fits. The mathematics are the same.
        param_dtype: Under FSDP2 and bf16, "bfloat16" gathers parameters in half the bytes, which rounds more
            than autocast does: norms' and embeddings' parameters, and what comes into each unit.
        offload_parameters: Under FSDP2, keep each rank's shards of parameters, gradients and optimizer state in
            host memory and update them there (torch's `CPUOffloadPolicy`).

    Returns:
        The plan, replayed within the budget.

    Raises:
        UsageError: An argument is invalid.
        InfeasibleError: Nothing permitted fits: by how much, because of what, and what would.
        CaptureError: The step cannot be run on fake tensors.
    """
    check_count("global_batch_size", global_batch_size)
    target = resolve_device(device)
    if network is not None:
        target = replace(target, network_bytes_per_second=parse_bytes(network))
    if global_batch_size < 1:
        raise UsageError(f"global_batch_size is {global_batch_size}; it must be at least 1.")
    cautious = CautiousCapture(replace(job, loop=None), target)

    @functools.cache
    def capture(settings: Settings, steps: int = 1) -> Trace:
        return cautious(settings, steps)

    asked = PlanOptions(
        budget=_as_text(budget),
        precision=_as_names(precision),
        micro_batch_size=micro_batch_size,
        recompute=_name_of_recompute(recompute),
        optimizer=optimizer,
        optimizer_implementation=None if optimizer_implementation is None else str(optimizer_implementation),
        allow_optimizers=tuple(_names(allow_optimizers)),
        chunked_loss=chunked_loss,
        expandable_segments=expandable_segments,
        offload_activations=offload_activations,
        host_memory=_as_text(host_memory),
        split_batch_norm=split_batch_norm,
        optimizer_in_backward=optimizer_in_backward,
        offload_optimizer=offload_optimizer,
        prefetch_inputs=prefetch_inputs,
        own_checkpointing=own_checkpointing,
        parallelism=str(parallelism),
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        offload_parameters=offload_parameters,
    )
    parallelisms = _parallelisms(parallelism, world_size)
    _check_zero(job, (optimizer, *_names(allow_optimizers)), parallelisms)
    request = Request(
        job=job.name,
        device=target,
        budget_bytes=0,
        global_batch_size=global_batch_size,
        precisions=_precisions(precision, target),
        micro_batch_size=micro_batch_size,
        recompute=_parse_recompute(recompute),
        optimizer=optimizer,
        optimizer_implementation=_implementation(job, optimizer, optimizer_implementation),
        other_optimizers=tuple(
            OptimizerChoice(name=name, implementation=_implementation(job, name, None))
            for name in _names(allow_optimizers)
        ),
        permits_chunked_loss=chunked_loss,
        permits_expandable_segments=expandable_segments,
        offload_host_bytes=_offload_host_bytes(offload_activations, host_memory, device, target),
        why_not_split=why_not_split(job, global_batch_size),
        weighs_by_count=job.count is not None or job.reduction == "sum",
        brings_own_loop=job.loop is not None,
        splits_coupled_batches=split_batch_norm,
        optimizer_in_backward=optimizer_in_backward,
        offload_optimizer=offload_optimizer,
        prefetch_inputs=prefetch_inputs,
        own_checkpointing=_keeps_own_checkpointing(own_checkpointing),
        world_size=world_size,
        num_nodes=num_nodes,
        parallelisms=parallelisms,
        reshard_after_forward=reshard_after_forward,
        param_dtype=param_dtype,
        offload_parameters=offload_parameters,
    )
    with without_garbage_collection():
        try:
            budget_bytes = _budget_bytes(budget, capture, request)
            found = search(capture, replace(request, budget_bytes=budget_bytes))
            return replace(found, asked=asked)
        finally:
            capture.cache_clear()  # or what it holds would be gone through as collecting begins again


@busy("checking the plan")
def check_plan(
    job: Job, plan: Plan, device: str | Device | None = None, *, budget: str | float | None = None
) -> PlanCheck:
    """Predict a plan's settings anew, to see whether the job has outgrown it.

    Args:
        job: As it is now.
        plan: As it was made, perhaps for an earlier version of the job.
        device: Where it is to run; None takes the device that the plan was made for.
        budget: A size ("11GiB"); None takes that of the plan.

    Returns:
        What is predicted now beside what was predicted then.

    Raises:
        UsageError: An argument is invalid, or the plan is for another kind of device.
        UnknownNameError: The plan names a unit that the model does not have, or its device is not in the table.
        CaptureError: The step cannot be run on fake tensors.
    """
    planned_for = plan.device if plan.device_kind == "cuda" else "cpu"
    target = resolve_device(planned_for if device is None else device)
    if target.kind != plan.device_kind:
        raise UsageError(
            f"the plan is for {plan.device} ({plan.device_kind}), and {target.name} is a {target.kind} device."
        )
    trace = CautiousCapture(replace(job, loop=None), target)(plan.settings)
    budget_bytes = plan.budget_bytes if budget is None else parse_bytes(budget)
    return check_trace(trace, plan, target, budget_bytes)


@busy("comparing with plain training")
def certify(job: Job, plan: Plan | Settings, device: str | None = None, *, seed: int = 0) -> Certificate:
    """Compare a batch under a plan with plain training, really computed on this machine.

    Args:
        job: What is trained; its model is built or copied, and stays as it is.
        plan: The plan, or settings.
        device: "cpu" or "cuda". None takes the kind that the plan is for; where this machine has none, its CPU
            stands in, with a few samples.
        seed: Of the weights, the batch and dropout.

    Returns:
        Whether loss, gradients and buffers are the same, and within what bound where they cannot be.

    Raises:
        UsageError: There is no such device.
    """
    settings = plan.settings if isinstance(plan, Plan) else plan
    is_stand_in = (
        device is None
        and isinstance(plan, Plan)
        and plan.device_kind == "cuda"
        and not torch.cuda.is_available()
    )
    planned_kind = plan.device_kind if isinstance(plan, Plan) and not is_stand_in else None
    chosen = choose_device("cpu" if is_stand_in else device, planned_kind)
    return profiling.certify(job, settings, device=chosen, is_stand_in=is_stand_in, seed=seed)


def apply(
    plan: Plan | Settings,
    job: Job,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_gradient_norm: float | None = None,
    verify: bool = True,
    recover: bool = True,
) -> PlannedStep:
    """Put a plan in force in a training loop of one's own.

    Args:
        plan: The plan, or plain settings.
        job: Its loss and count are used.
        model: Trained in place; parameters, buffers and `state_dict` keys stay as they are.
        optimizer: Over the parameters of `model`.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        verify: Before the first step, compare the loss of a few samples with that of their parts if the plan
            splits batches: CertificateError if they differ, a warning where that cannot be known.
        recover: Where memory runs out, run the step again, then with smaller micro-batches; see
            `outcome.recoveries`. False raises the error.

    Returns:
        `step(global_batch)` makes one optimizer step; where it raises, everything is as before the call (see
        `PlannedStep`). `step.remove()` leaves the model as it was. Within `step.loading()`,
        `optimizer.load_state_dict` brings its state to where the plan has it.

    Raises:
        UnknownNameError: The plan names a unit that the model does not have.
    """
    settings = plan.settings if isinstance(plan, Plan) else plan
    permits_layers = isinstance(plan, Plan) and plan.asked.split_batch_norm
    return PlannedStep(
        settings,
        job,
        model,
        optimizer,
        max_gradient_norm=max_gradient_norm,
        check=partial(check_split, job, model) if verify else None,
        check_split=partial(check_may_split, job, model, permits_layers=permits_layers),
        recover=recover,
    )


@busy("measuring")
def measure(job: Job, plan: Plan | Settings, device: str | None = None, *, seed: int = 0) -> Measurement:
    """Run a few real steps and measure what they take.

    Args:
        job: What is trained; its model is built anew.
        plan: The plan, or plain settings.
        device: A torch device: "cpu", "cuda". None takes the kind that the plan is for, or for settings the GPU
            if there is one.
        seed: Seeds the weights and the batch.

    Returns:
        The measured twin of `estimate`, with what the plan predicted beside it.

    Raises:
        UsageError: This machine has no such device.
    """
    if not isinstance(plan, Plan):
        return measure_step(job, plan, device=choose_device(device, None), seed=seed)
    where = choose_device(device, plan.device_kind)
    measured = measure_step(replace(job, loop=None), plan.settings, device=where, seed=seed)
    if where.type != plan.device_kind:  # what was predicted for one kind of device is no twin of another's
        return measured
    return replace(
        measured,
        predicted_peak_allocated_bytes=plan.predicted_peak_allocated_bytes,
        predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
        predicted_peak_device_bytes=plan.predicted_peak_device_bytes,
        predicted_step_seconds=plan.predicted_step_seconds,
    )


def fit(
    job: Job,
    plan: Plan | Settings,
    *,
    compare_plain: bool = False,
    run_dir: Path | str | None = None,
    resume: bool = False,
    save_every: int | None = None,
    keep_saves: int = 2,
    epochs: int | None = None,
    steps: int | None = None,
    seed: int = 0,
    max_gradient_norm: float | None = None,
    schedule: Schedule | None = None,
    ema_decay: float | None = None,
    correct_batch_norm: bool = False,
    patience: int | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = True,
) -> tuple[TrainingResult, TrainingResult | None]:
    """Train by a plan, and beforehand without it if a comparison is wanted.

    Args:
        job: What is trained.
        plan: The plan, or plain settings.
        compare_plain: Train without the plan first, from the same seed, on the same batches.
        run_dir: A new or empty directory for weights, records and saves; None writes nothing.
        resume: Go on from the newest whole save in `run_dir`; from the start if there is none yet.
        save_every: Save after so many steps, beside the end of each epoch and of the run.
        keep_saves: How many saves to keep, the newest.
        epochs: Passes over the training data; 1 if neither this nor `steps` is given.
        steps: Most optimizer steps.
        seed: Decides weights, order of samples and dropout.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        schedule: Of the learning rate; None leaves it as it is.
        ema_decay: Keep and validate an exponential moving average of the parameters; None keeps none.
        correct_batch_norm: Under accumulation, let running statistics go as far in a step as with one
            micro-batch.
        patience: End the run after so many validations without a lower loss; None ends it at no loss.
        callbacks: Told of each step and each validation of the planned run.
        show_progress: Show how far the run is.

    Returns:
        The planned run, and the plain one or None.

    Raises:
        UsageError: A comparison is wanted and `plan` does not say what plain training is.
        ResumeError: No save is whole, or they are of another run.
        TrainingError: Training stopped; the message says where the last good weights are.
        InterruptedRunError: It was stopped on request before the plan's own run.
    """

    device = choose_device(None, plan.device_kind if isinstance(plan, Plan) else None)

    def run(which: Job, how: Plan | Settings, where: Path | str | None) -> TrainingResult:
        return Trainer(
            which,
            how,
            run_dir=where,
            resume=resume and where is not None,
            save_every=None if where is None else save_every,
            keep_saves=keep_saves,
            epochs=epochs,
            steps=steps,
            seed=seed,
            device=device,
            max_gradient_norm=max_gradient_norm,
            schedule=schedule,
            ema_decay=ema_decay,
            correct_batch_norm=correct_batch_norm,
            patience=patience,
            callbacks=callbacks if which is job else (),
            show_progress=show_progress,
        ).fit()

    plain = None
    if compare_plain:
        if not isinstance(plan, Plan):
            raise UsageError(
                "compare_plain needs a plan, which says what plain training is; these are settings."
            )
        untouched = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model
        plain = run(replace(job, model=untouched, name=f"{job.name}, plain"), plan.plain.settings, None)
        if plain.stopped_because is not StopReason.FINISHED:
            raise InterruptedRunError("interrupted while training without the plan, which saves nothing.")
    return run(job, plan, run_dir), plain


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


def calibrate(*, remeasure: bool = False, progress: Progress | None = None) -> tuple[Device, ...]:
    """Measure this machine: its CPU and, where torch can use one, its GPU; kept in the user's cache directory.

    Matmuls by type and size, convolutions, attention, memory bandwidth by size and kind of work, launches, what
    Python and autograd take per op and per recomputed region; on a GPU also the link to the host and the memory
    of the CUDA context. From then on predictions for "cpu", and for that GPU by whatever name, use them.

    Args:
        remeasure: Measure even what is kept already.
        progress: Is told what is measured next.

    Returns:
        The devices with what was measured, the CPU first.
    """
    cpu = calibrate_cpu(remeasure=remeasure, sweeps=THOROUGH_SWEEPS, progress=progress)
    if not torch.cuda.is_available():
        return (cpu,)
    where = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(where)
    row = find_device(properties.name, capacity_bytes=properties.total_memory)
    if remeasure or not best_context(row).is_measured:
        if progress is not None:
            progress("CUDA context")
        measure_context(where)
    return cpu, calibrate_gpu(_with_best_context(row), where, remeasure=remeasure, progress=progress)


def resolve_device(device: DeviceLike) -> Device:
    """The device meant.

    Args:
        device: A name from the hardware table ("RTX 3090"), a `Device`, or a device of this machine in torch's
            words: "cpu", measured once and kept, "cuda", "cuda:1", a `torch.device`, the index of a GPU, or
            "auto" for the GPU if there is one, else the CPU.

    Returns:
        Its row of the table, with what was measured of it on this machine and kept.

    Raises:
        UnknownNameError: There is no such device in the table.
        UsageError: This machine does not have the device.
    """
    if isinstance(device, Device):
        return device
    if is_of_this_machine(device):
        return device_record(choose_device(device, None))
    if not isinstance(device, str):
        raise UsageError(
            f'the device is {device!r} ({type(device).__name__}). Name one, such as "RTX 3090", "cuda:0" or '
            '"cpu", or give a torch.device or a brimful.Device.'
        )
    return with_kept_calibration(_with_best_context(find_device(device)))


def _with_best_context(device: Device) -> Device:
    """The device with the context that was measured for it and kept, or else published."""
    return with_context(device, best_context(device))


def parse_precision(precision: PrecisionLike) -> Precision:
    """The precision meant.

    Args:
        precision: One, its name ("bf16", "fp32", …), or a dtype (`torch.bfloat16`, "bfloat16").

    Returns:
        The one of that name.

    Raises:
        UnknownNameError: There is none of that name.
    """
    try:
        return Precision(precision)  # type: ignore[arg-type]  # a dtype is understood by its name
    except ValueError:
        raise UnknownNameError("precision", str(precision), [str(p) for p in Precision]) from None


HOST_FRACTION = 0.5
"""What offloading may take of this machine's memory unless `host_memory` says so. A choice: other programs
cannot use pinned memory."""
DESCRIBED_HOST_FRACTION = 0.5
"""What it may take of the host of a GPU that is only named, as a fraction of the GPU's memory. A choice: clouds
rent a GPU of 24 GB with as little as 16 GiB of host memory (AWS g5.xlarge), of which this is three quarters."""

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


def _precisions(precision: PrecisionLike | Sequence[PrecisionLike], device: Device) -> tuple[Precision, ...]:
    if precision == "auto":
        return tuple(p for p in Precision if device.supports(p))
    if isinstance(precision, str) and not isinstance(precision, Precision):
        return tuple(parse_precision(name.strip()) for name in precision.split(","))
    if isinstance(precision, str | torch.dtype):
        return (parse_precision(precision),)
    return tuple(parse_precision(p) for p in precision)


def _as_text(size: str | float | None) -> str | None:
    """A size as the command line takes it; a number is one of bytes."""
    return size if size is None or isinstance(size, str) else f"{parse_bytes(size)}B"


def _as_names(precision: PrecisionLike | Sequence[PrecisionLike]) -> str:
    """Precisions as the command line takes them."""
    several = [precision] if isinstance(precision, str | torch.dtype) else precision
    return ",".join(str(each).removeprefix("torch.") for each in several)


def _name_of_recompute(recompute: str | Action | None) -> str:
    names: dict[str | None, str] = {None: "auto", Action.RECOMPUTE: "all", Action.KEEP: "none"}
    return names.get(recompute, str(recompute))


def _parse_recompute(recompute: str | Action | None, *, permits_auto: bool = True) -> Action | None:
    actions = {"all": Action.RECOMPUTE, "none": Action.KEEP} | ({"auto": None} if permits_auto else {})
    if recompute is None or isinstance(recompute, Action):
        return recompute
    if recompute not in actions:
        raise UnknownNameError("value of recompute", str(recompute), list(actions))
    return actions[recompute]


def _keeps_own_checkpointing(value: str) -> bool:
    known = {"keep": True, "off": False}
    if value not in known:
        raise UnknownNameError("value of own_checkpointing", value, list(known))
    return known[value]


def _implementation(
    job: Job, optimizer: str | None, asked: str | OptimizerImplementation | None
) -> OptimizerImplementation | None:
    """What every plan uses: what is asked for, else the fused kernel where the optimizer leaves it open."""
    if asked is not None:
        return _parse_implementation(asked)
    named = Settings(micro_batch_size=1, optimizer=optimizer)
    fused = OptimizerImplementation.FUSED
    stand_ins: list[Callable[[], nn.Module | list[nn.Parameter]]] = [
        partial(nn.Linear, 2, 2),
        partial(fake_model, job),
    ]
    if isinstance(named.optimizer or job.optimizer, str | NamedOptimizer):
        stand_ins = [lambda: [nn.Parameter(torch.zeros(2, 2))]]
    for make_stand_in in stand_ins:
        try:
            example = make_optimizer(job, make_stand_in(), named)
        except UnknownNameError:
            raise
        except Exception:  # the job's own function may ask for parameters that only the job's model has
            continue
        return fused if has_implementation(example, fused) else None
    return None  # what is wrong is said where the step is captured


def _parallelisms(name: str | Parallelism, world_size: int) -> tuple[Parallelism, ...]:
    if name == "auto":
        return (Parallelism.DDP, Parallelism.FSDP2) if world_size > 1 else (Parallelism.DDP,)
    try:
        asked = Parallelism(name)
    except ValueError:
        raise UnknownNameError("parallelism", str(name), ["auto", *map(str, Parallelism)]) from None
    if world_size == 1 and asked is not Parallelism.DDP:
        warnings.warn(
            f"there is one rank, which has the whole model: parallelism={str(asked)!r} divides nothing and is "
            "ignored. Train under torchrun --nproc-per-node N, or plan with world_size=N.",
            stacklevel=3,
        )
        return (Parallelism.DDP,)
    return (asked,)


def _check_zero(job: Job, names: Iterable[str | None], parallelisms: Sequence[Parallelism]) -> None:
    """Check that named optimizers can be stepped by ZeRO; what a function makes is looked at in training."""
    own = job.optimizer if isinstance(job.optimizer, str) else None
    others = {name or own for name in names} - {None, *ZERO_OPTIMIZERS}
    if others and any(parallelism.is_zero for parallelism in parallelisms):
        raise UsageError(
            f"{', '.join(sorted(map(str, others)))} cannot be trained under DeepSpeed's ZeRO, which steps flat "
            f"parts of all parameters. Choose among {', '.join(ZERO_OPTIMIZERS)}, or parallelism='fsdp2'."
        )


def _names(names: str | Sequence[str]) -> Sequence[str]:
    """Several names; one alone may be given without a list."""
    return (names,) if isinstance(names, str) else names


def _parse_implementation(name: str | OptimizerImplementation | None) -> OptimizerImplementation | None:
    try:
        return None if name is None else OptimizerImplementation(name)
    except ValueError:
        known = [str(implementation) for implementation in OptimizerImplementation]
        raise UnknownNameError("optimizer implementation", str(name), known) from None


def _offload_host_bytes(
    offload: bool, host_memory: str | float | None, asked: DeviceLike, target: Device
) -> int:
    """Host memory that offloading may take; of a machine that is only described, a part of its GPU's."""
    if not offload:
        if host_memory is not None:
            raise UsageError(
                "host_memory is what offloading may take of the host, and offload_activations is False."
            )
        return 0
    permitted = None if host_memory is None else parse_bytes(host_memory)
    if target.kind == "cpu":
        return 0
    if permitted is not None:
        return permitted
    if is_of_this_machine(asked):
        return int(find_device("cpu").capacity_bytes * HOST_FRACTION)
    return int(target.capacity_bytes * DESCRIBED_HOST_FRACTION)


def _budget_bytes(budget: str | float | None, capture: Capture, request: Request) -> int:
    if budget is None:
        device = request.device
        margin = MARGIN_FRACTION if device.kind == "cuda" else 0.0
        return int(_capacity_of_rank(request) / (1 + margin))
    if isinstance(budget, str) and budget.strip().endswith("%"):
        share = _share(budget)
        plain = per_rank_trace(capture(request.plain_settings()))
        asked = int(share * (predict_memory(plain).peak_reserved_bytes + request.device.context_bytes))
    else:
        asked = parse_bytes(budget)
    if asked > _capacity_of_rank(request):
        has = "has" if request.device.kind == "cuda" or request.world_size == 1 else "has for each rank"
        raise UsageError(
            f"a budget of {format_bytes(asked)} is more than {request.device.name} {has}, "
            f"{format_bytes(_capacity_of_rank(request))}. Leave the budget out, or take a larger device."
        )
    return asked


def _capacity_of_rank(request: Request) -> int:
    """What a rank's device has; ranks on a machine's processors have equal parts of its memory."""
    shared_by = request.world_size // request.num_nodes if request.device.kind == "cpu" else 1
    return request.device.capacity_bytes // shared_by


_LARGEST_SHARE = 1000.0
"""Times what plain training takes; a budget is never that much. A choice."""


def _share(budget: str) -> float:
    text = budget.strip()[:-1]
    try:
        share = float(text) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= _LARGEST_SHARE:  # NaN is neither
        shown = budget if len(budget) <= 60 else f"{budget[:60]}…"
        raise UsageError(
            f"{shown!r} is not a share of plain training. Write a positive number of at most "
            f"{_LARGEST_SHARE:.0%}, such as 50%."
        )
    return share
