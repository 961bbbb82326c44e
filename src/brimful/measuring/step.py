"""One real training step → `Measurement`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from brimful.applying import apply_units
from brimful.coupled import check_coupled, embeds_twice, loss_of
from brimful.errors import UsageError
from brimful.execution.host_optimizer import UpdateOnHost
from brimful.execution.prefetch import copied_ahead_to
from brimful.inputs import InputMover
from brimful.job import Batch, Job
from brimful.layout import layout_of, make_batch
from brimful.local import build_model, choose_device, set_up_allocator
from brimful.measurement import Measurement
from brimful.measuring.loop import measure_loop
from brimful.measuring.peak import measurement_of, peak_memory
from brimful.optimizers import make_optimizer
from brimful.own_loops import check_loop_decides
from brimful.settings import Settings
from brimful.step import (
    CarryOut,
    StepOutcome,
    at_once,
    counting_parts,
    device_of,
    loss_weights,
    make_scaler,
    matmul_precision,
    run_step,
)
from brimful.updating import UpdateInBackward

_WARM_STEPS = 2
"""The first step makes optimizer state and workspaces, the second finds the allocator as later ones do."""


def measure_step(
    job: Job, settings: Settings, *, device: torch.device | str = "cpu", steps: int = 5, seed: int = 0
) -> Measurement:
    """Run real training steps and measure what they take.

    The model is built anew, or copied if the job gives a module; it is not left trained. After two steps to
    warm up, one step's peak memory is measured, and then some steps are timed.

    Args:
        job: Its model, loss, batch and optimizer are used as they are, or its loop.
        settings: How the steps are carried out; the batch is of their global batch size. A job's own loop
            decides all but the micro-batch size.
        device: "cpu" or a CUDA device of this machine.
        steps: How many steps to time, at least 1.
        seed: Of the model's weights, the batch and dropout.

    Returns:
        Peak memory of a steady step, and the median time of one.

    Raises:
        UsageError: There is no such device, or `steps` is below 1.
        BatchError: The job's batch cannot be made or split.
        LossError: The loss is no scalar tensor or has no gradient.
    """
    device = choose_device(device, None)
    if steps < 1:
        raise UsageError(f"steps is {steps}; at least 1 must be timed.")
    if job.loop is not None:
        check_loop_decides(job, settings)
        return measure_loop(job, settings.micro_batch_size, device=device, steps=steps, seed=seed)
    check_coupled(job, settings)
    set_up_allocator(settings, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build_model(job, is_copied=True).to(device).train()
        optimizer = make_optimizer(job, model, settings)
        applied = apply_units(model, settings)
        on_host = UpdateOnHost(optimizer) if settings.optimizer_on_host else None
        batch = make_batch(job, settings.rank_batch_size)
        run = repeated_step(
            job,
            settings,
            model,
            optimizer,
            make_scaler(settings.precision, device.type),
            at_once if on_host is None else on_host.run,
            batch=batch,
        )
        with matmul_precision(settings.precision):
            first = run()
            for _ in range(_WARM_STEPS - 1):
                run()
            with peak_memory(model, optimizer, device, batch=batch) as peak:
                run()
            seconds = [_seconds(run, device) for _ in range(steps)]
        applied.remove()
    return measurement_of(peak, seconds, device, loss=float(first.loss))


def repeated_step(
    job: Job,
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None,
    carry_out: CarryOut = at_once,
    *,
    batch: Batch,
) -> Callable[[], StepOutcome]:
    """One optimizer step on one global batch, to be run again and again.

    Args:
        job: Its loss is minimised.
        settings: How the step is carried out.
        model: Is trained where it is.
        optimizer: Of the model's parameters.
        scaler: For float16; None without.
        carry_out: Calls the optimizer's step.
        batch: On the host.

    Returns:
        Runs the step.

    Raises:
        BatchError: The batch cannot be split.
    """
    device = device_of(model)
    parts = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size).split(
        batch, settings.micro_batch_size
    )
    micro_batches, weights = counting_parts(parts, loss_weights(job, parts))
    move = InputMover.to(device)
    copies_ahead = settings.copies_ahead and device.type != "cpu"
    in_backward = UpdateInBackward(optimizer) if settings.step_in_backward else None

    def run() -> StepOutcome:
        with move.one_step(repeats=embeds_twice(job, micro_batches)):
            return run_step(
                model=model,
                loss=loss_of(job),
                optimizer=optimizer,
                micro_batches=micro_batches,
                weights=weights,
                precision=settings.precision,
                scaler=scaler,
                move=move,
                begin_move=copied_ahead_to(device) if copies_ahead else None,
                carry_out=carry_out,
                in_backward=in_backward,
            )

    return run


def _seconds(run: Callable[[], StepOutcome], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
