"""One real training step → `Measurement`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from brimful.batches import layout_of, make_batch
from brimful.errors import UsageError
from brimful.execution.executor import StepExecutor
from brimful.execution.job_loop import check_loop_decides
from brimful.execution.losses import counting_parts, loss_weights
from brimful.execution.setup import build_model, choose_device, set_up_allocator
from brimful.execution.step import StepOutcome
from brimful.job import Batch, Job
from brimful.optimizers import make_optimizer
from brimful.profiling.measure_loop import measure_loop
from brimful.profiling.peak import measurement_of, peak_memory
from brimful.profiling.timing import WaitsForCores
from brimful.results import Measurement
from brimful.settings import Settings
from brimful.transforms import apply_memory_format, apply_units
from brimful.utils.one_at_a_time import one_at_a_time

_WARM_STEPS = 2
"""The first step makes optimizer state and workspaces, the second finds the allocator as later ones do."""


def measure_step(
    job: Job, settings: Settings, *, device: torch.device | str = "cpu", steps: int = 5, seed: int = 0
) -> Measurement:
    """Run real training steps and measure their memory and time.

    A new model is built, or copied if the job has a module, so that the job's own stays untrained. After two
    warm-up steps, the peak memory of one step is measured, and then some steps are timed.

    Args:
        job: Its model, loss, batch and optimizer are used as they are, or its loop.
        settings: Settings of the steps, with their global batch size. A job's own loop decides everything but
            the micro-batch size.
        device: "cpu" or a CUDA device of this machine.
        steps: Number of steps to time, at least 1.
        seed: Seeds the model's weights, the batch and dropout.

    Returns:
        Peak memory and median time of a steady step.

    Raises:
        UsageError: The device does not exist, or `steps` is below 1.
        BatchError: The job's batch cannot be made or split.
        LossError: The loss is not a scalar tensor or has no gradient.
    """
    device = choose_device(device, None)
    if steps < 1:
        raise UsageError(f"steps is {steps}; at least 1 must be timed.")
    if job.loop is not None:
        check_loop_decides(job, settings)
        return measure_loop(job, settings.micro_batch_size, device=device, steps=steps, seed=seed)
    set_up_allocator(settings, device)
    with one_at_a_time(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build_model(job, is_copied=True).to(device).train()
        layout = apply_memory_format(model, settings)
        optimizer = make_optimizer(job, model, settings)
        layout.follow(optimizer)
        executor = StepExecutor(job, settings, model, optimizer, device=device)
        applied = apply_units(model, settings)
        batch = make_batch(job, settings.rank_batch_size)
        run = repeated_step(executor, batch)
        first = run()
        for _ in range(_WARM_STEPS - 1):
            run()
        with peak_memory(model, optimizer, device, batch=batch) as peak:
            run()
        waits = WaitsForCores()
        seconds = [_seconds(run, device) for _ in range(steps)]
        waited = waits.fraction()
        applied.remove()
    return measurement_of(peak, seconds, device, loss=float(first.loss), core_wait_fraction=waited)


def repeated_step(executor: StepExecutor, batch: Batch) -> Callable[[], StepOutcome]:
    """One optimizer step on one global batch, to be run again and again.

    Args:
        executor: Runs it.
        batch: On the host.

    Returns:
        Runs the step.

    Raises:
        BatchError: The batch cannot be split.
    """
    job, settings = executor.job, executor.settings
    layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
    parts = layout.split(batch, settings.micro_batch_size)
    return partial(executor, *counting_parts(parts, loss_weights(job, parts)))


def _seconds(run: Callable[[], StepOutcome], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
