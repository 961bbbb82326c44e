"""Use a plan on this machine: verify it, apply it to a model, measure it, train with it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful import profiling
from brimful.arguments import checks_arguments
from brimful.distributed.ranks import current_rank
from brimful.errors import InterruptedRunError, UsageError
from brimful.execution.attached import copied_model
from brimful.execution.explained import Expected
from brimful.execution.in_force import HoldsOptimizer, Prepared
from brimful.execution.longest_batch import with_longest_batch
from brimful.execution.planned_step import PlannedStep
from brimful.execution.random_state import RandomState, undisturbed
from brimful.execution.setup import choose_device
from brimful.job import Job
from brimful.options import takes_options
from brimful.planner import (
    Plan,
    settings_of,
)
from brimful.profiling import (
    check_labels,
    check_may_split,
    check_split,
    measure_step,
)
from brimful.results import EquivalenceReport, Measurement, StopReason, TrainingResult
from brimful.settings import (
    Settings,
)
from brimful.trainer import Trainer
from brimful.trainer.monitor.progress import show_title
from brimful.trainer.options import TrainKeywords, TrainOptions
from brimful.utils.status import busy


@undisturbed()
@busy("comparing with the baseline")
@checks_arguments
def verify(
    job: Job, plan: Plan | Settings, device: str | int | torch.device | None = None, *, seed: int = 0
) -> EquivalenceReport:
    """Compare one batch under a plan with the baseline, by running both on this machine.

    Args:
        job: The job to verify; its model is built or copied, and never changed.
        plan: A plan, or settings.
        device: "cpu" or "cuda". None takes the kind of device that the plan is for; if this machine has none,
            its CPU is used with a few samples.
        seed: Seeds the weights, the batch and dropout.

    Returns:
        Whether loss, gradients and buffers are equal, or within which bound where they cannot be.

    Raises:
        UsageError: This machine has no such device.
    """
    settings = settings_of(plan)
    is_stand_in = (
        device is None
        and isinstance(plan, Plan)
        and plan.device_kind == "cuda"
        and not torch.cuda.is_available()
    )
    planned_kind = plan.device_kind if isinstance(plan, Plan) and not is_stand_in else None
    chosen = choose_device("cpu" if is_stand_in else device, planned_kind)
    return profiling.verify(job, settings, device=chosen, is_stand_in=is_stand_in, seed=seed)


@RandomState.kept()  # the first import of rich draws
@checks_arguments
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
    """Use a plan in your own training loop.

    Args:
        plan: A plan, or settings.
        job: Provides `loss` and `count`.
        model: Trained in place; its parameters, buffers and `state_dict` keys stay the same.
        optimizer: An optimizer over the parameters of `model`. It runs in the plan's implementation, such as
            fused, until `step.remove()`.
        max_gradient_norm: Clip gradients to this norm; None does not clip.
        verify: If the plan splits batches, compare the loss of a few samples with that of their parts before
            the first step: EquivalenceError if they differ, a warning if that cannot be checked. A later batch
            with labels of -100 raises it too, if the loss is known to average over the others. Recovery
            from running out of memory checks in any case before it divides a batch further.
        recover: When memory runs out, run the step again, then with smaller micro-batches; see
            `outcome.recoveries`. False raises the error.

    Returns:
        A step function: `step(global_batch)` runs one optimizer step. A call that raises leaves everything as
        before it, except `PartialUpdateError`: load your last checkpoint then (see `PlannedStep`).
        `step.remove()` restores model and optimizer. Within `step.loading()`, `optimizer.load_state_dict` puts
        the state where the plan keeps it.

    Raises:
        UsageError: An argument is of another kind, the arguments are in another order, or the settings
            contradict the job, the model or the optimizer.
        UnknownNameError: The plan names a unit that the model does not have.
        PartialUpdateError: Raised by a call of the step function: an update could be neither finished nor
            undone.
    """
    settings = settings_of(plan)
    permits_layers = isinstance(plan, Plan) and plan.asked.split_batch_norm
    return PlannedStep(
        settings,
        job,
        model,
        optimizer,
        max_gradient_norm=max_gradient_norm,
        check=partial(check_split, job, model) if verify else None,
        check_split=partial(check_may_split, job, model, permits_layers=permits_layers),
        check_labels=partial(check_labels, job) if verify else None,
        recover=recover,
        planned=plan.sample_sizes if isinstance(plan, Plan) else (),
        expected=Expected.of(plan),
    )


@RandomState.kept()
@checks_arguments
def prepare(
    plan: Plan | Settings,
    model: nn.Module,
    optimizer: Optimizer | HoldsOptimizer | None = None,
    *,
    scaler: GradScaler | None = None,
) -> Prepared:
    """Put a plan in force on a model, for a training loop that runs the steps itself.

    It applies what concerns the model and the optimizer: recomputed and offloaded units, chunked loss, memory
    format, the optimizer's implementation, allocator settings. The loop does the rest:
    `Prepared.micro_batches` divides each batch of its loader and says each loss's share, and the loop computes
    in `plan.settings.precision`. It may survive out-of-memory errors by `Prepared.retry`. `brimful.apply` does
    all of that, and divides micro-batches where memory runs out again.

    A loop that loads micro-batches itself and has a learning-rate schedule gets a warning: steps of the
    schedule are those of the optimizer, not of the loader.

    Args:
        plan: A plan, or settings.
        model: Changed in place until `remove()`; before or after Accelerate, Lightning, DDP or FSDP2 wrap it.
        optimizer: Over its parameters, also as wrapped by Accelerate or Lightning. None keeps its
            implementation.
        scaler: The loop's `torch.amp.GradScaler` under fp16, for `Prepared.retry`; None takes the scaler of an
            optimizer that Accelerate wrapped.

    Returns:
        What is in force: `remove()` undoes it.

    Raises:
        UsageError: The plan has an optimizer on the host or in backward, prefetched inputs, parameters on the
            host, or ZeRO, which only `apply` or `fit` carry out.
        UnknownNameError: The plan names a unit that the model does not have.
    """
    settings = settings_of(plan)
    planned = plan.sample_sizes if isinstance(plan, Plan) else ()
    return Prepared(
        settings,
        model,
        optimizer,
        scaler=scaler,
        planned=planned,
        warns_of_schedules=True,
        expected=Expected.of(plan),
    )


@undisturbed()
@busy("measuring")
@checks_arguments
def measure(
    job: Job, plan: Plan | Settings, device: str | int | torch.device | None = None, *, seed: int = 0
) -> Measurement:
    """Run a few real steps and measure their memory and time.

    Args:
        job: The job to measure; its model is built again, or copied.
        plan: A plan, or settings.
        device: A torch device: "cpu", "cuda". None takes the kind of device that the plan is for; for settings,
            the GPU if there is one.
        seed: Seeds the weights and the batch.

    Returns:
        The measured counterpart of `estimate`, with the plan's predictions beside it.

    Raises:
        UsageError: This machine has no such device.
    """
    settings = settings_of(plan)
    job = with_longest_batch(job, settings.rank_batch_size).job
    if not isinstance(plan, Plan):
        return measure_step(job, settings, device=choose_device(device, None), seed=seed)
    where = choose_device(device, plan.device_kind)
    measured = measure_step(replace(job, loop=None), settings, device=where, seed=seed)
    if where.type != plan.device_kind:  # predictions for another kind of device do not compare
        return measured
    return replace(
        measured,
        predicted_peak_allocated_bytes=plan.predicted_peak_allocated_bytes,
        predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
        predicted_peak_device_bytes=plan.predicted_peak_device_bytes,
        predicted_step_seconds=plan.predicted_step_seconds,
    )


@takes_options(TrainOptions, TrainKeywords)
def fit(
    job: Job, plan: Plan | Settings, *, compare_plain: bool = False, **options: Unpack[TrainKeywords]
) -> tuple[TrainingResult, TrainingResult | None]:
    """Train with a plan, optionally after the baseline for comparison.

    Args:
        job: The job to train.
        plan: A plan, or settings.
        compare_plain: Train without the plan first, with the same seed and the same batches. That run is not
            saved and calls no callbacks.
        **options: The fields of `TrainOptions`.

    Returns:
        The results of the planned run, and of the plain run or None.

    Raises:
        UsageError: `compare_plain` is set, and `plan` is settings, which do not describe the baseline.
        ResumeError: There is no complete checkpoint, or the checkpoints are of another run.
        TrainingError: Training stopped; the message says where the last good weights are.
        InterruptedRunError: Training was stopped on request before the plan's own run.
    """
    if options.get("device") is None:  # the same for both runs
        options["device"] = choose_device(None, plan.device_kind if isinstance(plan, Plan) else None)
    trainer = Trainer(job, plan, **options)
    plain = None
    shows = compare_plain and options.get("show_progress", True) and current_rank() == 0
    if compare_plain:
        if shows:
            show_title("baseline, without the plan:")
        plain = _trained_plainly(job, plan, options)
    if shows:
        show_title("with the plan:")
    return trainer.fit(), plain


def _trained_plainly(job: Job, plan: Plan | Settings, options: TrainKeywords) -> TrainingResult:
    if not isinstance(plan, Plan):
        raise UsageError("compare_plain needs a plan, which says what the baseline is; these are settings.")
    alone: TrainKeywords = {
        "run_dir": None,
        "resume": False,
        "save_every": None,
        "callbacks": (),
    }
    untouched = copied_model(job.model) if isinstance(job.model, nn.Module) else job.model
    baseline = replace(job, model=untouched, name=f"{job.name}, plain")
    result = Trainer(baseline, plan.plain.settings, **(options | alone)).fit()
    if result.stopped_because is not StopReason.FINISHED:
        raise InterruptedRunError("interrupted while training without the plan, which saves nothing.")
    return result
