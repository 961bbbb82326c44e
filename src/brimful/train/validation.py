"""One pass over the validation data: means of the loss and of the job's metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from brimful.batches import count_samples
from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.step import autocast
from brimful.train.data import validation_batches
from brimful.training import ValidationRecord


def validate(
    model: nn.Module,
    job: Job,
    settings: Settings,
    validation: Batch | Iterable[Batch],
    *,
    move: Callable[[Batch], Batch],
    step: int,
    epoch: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> ValidationRecord | None:
    """The validation loss and metrics of a model, in evaluation mode and without gradients.

    The loss is averaged by what the job counts, the metrics by samples, so that neither depends on how the data
    are cut.

    Args:
        model: Its modules' modes are as before when this returns.
        job: Its loss, count and metrics.
        settings: Their micro-batch size and precision.
        validation: One batch with all samples, or an iterable of batches.
        move: Brings a micro-batch to the device.
        step: Optimizer steps taken.
        epoch: The epoch that ends.
        is_stopped: Asked before each micro-batch.

    Returns:
        The means; None if `is_stopped` said so before the end.

    Raises:
        UsageError: The validation data have no samples, or nothing that the job counts.
    """
    start = time.perf_counter()
    samples, terms, loss = 0, 0.0, 0.0
    sums: defaultdict[str, float] = defaultdict(float)
    with _evaluation_mode(model), torch.no_grad():
        for host_batch in validation_batches(validation, settings.micro_batch_size):
            if is_stopped():
                return None
            batch_samples = count_samples(host_batch)
            batch_terms = batch_samples if job.count is None else float(job.count(host_batch))
            batch = move(host_batch)
            with autocast(model, settings.precision):
                batch_loss = job.loss(model, batch)
                metrics = job.metrics(model, batch) if job.metrics is not None else {}
            samples += batch_samples
            terms += batch_terms
            if batch_terms:  # a mean over nothing is not a number
                loss += float(batch_loss) * batch_terms
            for name, value in metrics.items():
                sums[name] += float(value) * batch_samples
    if not terms:
        raise UsageError(
            f"the validation data of {job.name} have {samples} samples and nothing to count in them."
        )
    return ValidationRecord(
        step=step,
        epoch=epoch,
        loss=loss / terms,
        metrics={name: total / samples for name, total in sums.items()},
        samples=samples,
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
