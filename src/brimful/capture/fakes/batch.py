"""A job's batch on fake tensors, whose values are known where they are few."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from brimful.batches import layout_of, make_micro_batch, map_tensors
from brimful.capture.fakes.cache import spanned_bytes
from brimful.capture.fakes.model import to_fake
from brimful.capture.values.known import KnownValues
from brimful.errors import BatchError, BrimfulError
from brimful.execution.losses import loss_counts
from brimful.job import Batch, Job
from brimful.settings import Settings


def make_fake_batch(
    job: Job, settings: Settings, mode: FakeTensorMode, known: KnownValues, *, host_is_device: bool
) -> Batch:
    """A micro-batch on fake tensors, in the same nest as the real one; `known` keeps its values.

    With `host_is_device` the host's memory is the device's, and the whole global batch is in it. Raises
    `BatchError` if the job cannot count what is in the batch: a real step would fail.
    """
    real = make_micro_batch(job, settings.micro_batch_size, settings.rank_batch_size)
    is_there = host_is_device and job.loop is None
    parts = settings.global_batch_size // settings.micro_batch_size if is_there else 1
    if parts > 1 and layout_of(job).copies(real):
        parts *= 2  # the batch, and its parts
    _check_count(job, real)
    fakes: dict[int, Tensor] = {}
    shared = _Shared(real)

    def with_values(tensor: Tensor) -> Tensor:
        if id(tensor) in fakes:
            return fakes[id(tensor)]
        if shared.has(tensor):
            fake = shared.fake(tensor, mode, parts)
        else:
            fake = to_fake(tensor, mode, parts=parts if tensor.dim() else 1)
        fakes[id(tensor)] = fake
        known.remember(fake, tensor)
        return fake

    return map_tensors(real, with_values)


class _Shared:
    """Views of one storage in a batch, such as texts and what follows each word, which have its memory once."""

    def __init__(self, batch: Batch) -> None:
        self._ends: dict[tuple[int, torch.dtype], list[tuple[int, int]]] = defaultdict(list)
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}
        map_tensors(batch, self._add)

    def _add(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() and tensor.numel():
            start = int(tensor.storage_offset())
            end = start + spanned_bytes(tensor) // tensor.element_size()
            self._ends[self._key(tensor)].append((start, end))
        return tensor

    def _key(self, tensor: Tensor) -> tuple[int, torch.dtype]:
        return tensor.untyped_storage()._cdata, tensor.dtype

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor overlaps another of the batch."""
        if tensor.layout is not torch.strided or not tensor.dim():
            return False
        ends = sorted(self._ends.get(self._key(tensor), ()))
        return any(second[0] < first[1] for first, second in pairwise(ends))

    def fake(self, tensor: Tensor, mode: FakeTensorMode, parts: int) -> Tensor:
        """A view of a fake that spans all views of the batch on one storage.

        The fake is `parts` times as large, for further parts of the batch.
        """
        key = self._key(tensor)
        first, last = min(start for start, _ in self._ends[key]), max(end for _, end in self._ends[key])
        with mode:
            if key not in self._made:
                self._made[key] = torch.empty(parts * (last - first), dtype=tensor.dtype, device="cpu")
            view = self._made[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset() - first)
        return view.requires_grad_(tensor.requires_grad)


def _check_count(job: Job, batch: Batch) -> None:
    """Check that the job can count its batch: a captured step does not need that, but a real one would fail."""
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
