"""Plans in force on this machine: verified, applied to a model, measured, trained by."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from brimful import profiling
from brimful.errors import InterruptedRunError, UsageError
from brimful.execution.planned_step import PlannedStep
from brimful.execution.setup import choose_device
from brimful.job import Job
from brimful.planner import (
    Plan,
)
from brimful.profiling import (
    check_may_split,
    check_split,
    measure_step,
)
from brimful.results import EquivalenceReport, Measurement, StopReason, TrainingResult
from brimful.settings import (
    Settings,
)
from brimful.status import busy
from brimful.trainer import Trainer
from brimful.trainer.options import TrainKeywords, takes_train_options


@busy("comparing with plain training")
def verify(job: Job, plan: Plan | Settings, device: str | None = None, *, seed: int = 0) -> EquivalenceReport:
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
    return profiling.verify(job, settings, device=chosen, is_stand_in=is_stand_in, seed=seed)


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
            splits batches: EquivalenceError if they differ, a warning where that cannot be known.
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


@takes_train_options
def fit(
    job: Job, plan: Plan | Settings, *, compare_plain: bool = False, **options: Unpack[TrainKeywords]
) -> tuple[TrainingResult, TrainingResult | None]:
    """Train by a plan, on request after plain training for comparison.

    Args:
        job: What is trained.
        plan: The plan, or plain settings.
        compare_plain: Train without the plan first, from the same seed, on the same batches; nothing of that
            run is saved, and callbacks are not called.
        **options: Those of `TrainOptions`, by name.

    Returns:
        The planned run, and the plain one or None.

    Raises:
        UsageError: A comparison is wanted and `plan` does not say what plain training is.
        ResumeError: No save is whole, or they are of another run.
        TrainingError: Training stopped; the message says where the last good weights are.
        InterruptedRunError: It was stopped on request before the plan's own run.
    """
    if options.get("device") is None:  # the same for both runs
        options["device"] = choose_device(None, plan.device_kind if isinstance(plan, Plan) else None)
    trainer = Trainer(job, plan, **options)
    plain = _trained_plainly(job, plan, options) if compare_plain else None
    return trainer.fit(), plain


def _trained_plainly(job: Job, plan: Plan | Settings, options: TrainKeywords) -> TrainingResult:
    if not isinstance(plan, Plan):
        raise UsageError("compare_plain needs a plan, which says what plain training is; these are settings.")
    alone: TrainKeywords = {"run_dir": None, "resume": False, "save_every": None, "callbacks": ()}
    untouched = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model
    baseline = replace(job, model=untouched, name=f"{job.name}, plain")
    result = Trainer(baseline, plan.plain.settings, **(options | alone)).fit()
    if result.stopped_because is not StopReason.FINISHED:
        raise InterruptedRunError("interrupted while training without the plan, which saves nothing.")
    return result
