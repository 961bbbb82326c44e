"""A job's batch on fake tensors, whose values are known where they are few."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.batches import layout_of, make_micro_batch, map_tensors
from brimful.capture.fakes.model import to_fake
from brimful.capture.values.known import KnownValues
from brimful.errors import BatchError, BrimfulError
from brimful.execution.losses import loss_counts
from brimful.job import Batch, Job
from brimful.settings import Settings


def make_fake_batch(
    job: Job, settings: Settings, mode: FakeTensorMode, known: KnownValues, *, host_is_device: bool
) -> Batch:
    """A micro-batch on fake tensors.

    Args:
        job: Makes the real one.
        settings: How many samples it has.
        mode: The fake mode.
        known: Keeps its values.
        host_is_device: Whether the host's memory is the device's: then the whole global batch is in it.

    Returns:
        The same nest as the real one.

    Raises:
        BatchError: The job cannot count what is in it, so a real step would fail.
    """
    real = make_micro_batch(job, settings.micro_batch_size, settings.rank_batch_size)
    is_there = host_is_device and job.loop is None
    parts = settings.global_batch_size // settings.micro_batch_size if is_there else 1
    if parts > 1 and layout_of(job).copies(real):
        parts *= 2  # the batch, and its parts
    _check_count(job, real)
    fakes: dict[int, Tensor] = {}

    def with_values(tensor: Tensor) -> Tensor:
        if id(tensor) in fakes:
            return fakes[id(tensor)]
        fake = fakes[id(tensor)] = to_fake(tensor, mode, parts=parts if tensor.dim() else 1)
        known.remember(fake, tensor)
        return fake

    return map_tensors(real, with_values)


def _check_count(job: Job, batch: Batch) -> None:
    """Nothing of a captured step depends on what a batch counts, but a real step would fail."""
    if job.count is None or job.loop is not None:
        return
    try:
        loss_counts(job, [batch])
    except BrimfulError:
        raise
    except Exception as error:
        raise BatchError(
            f"{job.name}: count(batch) raised {type(error).__name__}: {error}, on a batch that Job.batch made."
        ) from error
