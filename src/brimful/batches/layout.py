"""Count, split, resize and select the samples of a batch.

A job's own functions define the samples, `Job(split=…, collate=…)`; otherwise `find_samples.py` finds them in
each batch. Entries that belong to the batch as a whole are passed on unchanged. A batch whose samples cannot be
identified is never split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from brimful.batches.find_samples import (
    SampleLocations,
    WholeBatchError,
    check_tensors,
    dim_of,
    find_samples,
    is_graph_batch,
    shapes_in,
)
from brimful.batches.tensors import (
    SampleList,
    SampleTuple,
    is_applicable,
    map_tensors,
    map_where,
    named_tensors,
    named_where,
)
from brimful.errors import BatchError, UsageError
from brimful.job import Batch, Job


class _Selection(Protocol):
    """A selection of samples."""

    def of_tensor(self, tensor: Tensor, dim: int) -> Tensor:
        """Select from a tensor with samples in dimension `dim`."""

    def of_list(self, samples: Sequence[Any]) -> list[Any]:
        """Select from a list of samples."""


class _Range(NamedTuple):
    """A range of samples."""

    start: int
    stop: int

    def of_tensor(self, tensor: Tensor, dim: int) -> Tensor:
        if dim == 0:
            return tensor[self.start : self.stop]
        return tensor.narrow(dim, self.start, self.stop - self.start).contiguous()

    def of_list(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples[self.start : self.stop])


class _Indices(NamedTuple):
    """Samples at some indices, in their order."""

    indices: Tensor

    def of_tensor(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.index_select(dim, self.indices.to(tensor.device))

    def of_list(self, samples: Sequence[Any]) -> list[Any]:
        return [samples[index] for index in self.indices.tolist()]


class _Repeated(NamedTuple):
    """All samples repeated `times` times, and then the first `rest` samples."""

    times: int
    rest: int

    def of_tensor(self, tensor: Tensor, dim: int) -> Tensor:
        return torch.cat([tensor] * self.times + [_Range(0, self.rest).of_tensor(tensor, dim)], dim)

    def of_list(self, samples: Sequence[Any]) -> list[Any]:
        return [*samples] * self.times + [*samples[: self.rest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Finds the samples of a job's batches; see `layout_of`."""

    batch_dim: int | None = None
    """As `Job.batch_dim`."""
    to_samples: Callable[[Batch], Sequence[Any]] | None = None
    """`Job.split`."""
    collate: Callable[[list[Any]], Batch] | None = None
    """`Job.collate`; given if `to_samples` is."""
    whole: int = 1
    """Number of samples that a batch counts as if they cannot be identified."""
    expected: int | None = None
    """As `expected` of `find_samples`; None if batches may have any number of samples."""

    def count(self, batch: Batch) -> int:
        """Count the samples in a batch; `whole` if they cannot be identified.

        Raises `BatchError` if no tensor has dimensions, or a tensor has no values.
        """
        if self.to_samples is not None:
            return len(self._samples(batch))
        try:
            return self._found(batch).samples
        except WholeBatchError:
            return self.whole

    def why_whole(self, batch: Batch) -> str | None:
        """Why a batch cannot be split; None if it can. Raises `BatchError` as `count` does."""
        try:
            if self.to_samples is None:
                self._found(batch)
        except WholeBatchError as error:
            return str(error)
        return None

    def places(self, batch: Batch) -> SampleLocations | None:
        """Where a batch's samples are; None if they cannot be identified, or `to_samples` identifies them."""
        if self.to_samples is not None:
            return None
        try:
            return self._found(batch)
        except WholeBatchError:
            return None

    def _found(self, batch: Batch) -> SampleLocations:
        return find_samples(batch, self.batch_dim, expected=self.expected)

    def copies(self, batch: Batch) -> bool:
        """Whether the parts of a batch are copies, not views of it."""
        if self.to_samples is not None or self.batch_dim:
            return True
        return any(True for _ in named_where(batch, is_graph_batch))

    def samples_vary_in_size(self, batch: Batch) -> bool:
        """Whether samples may differ in size, so that micro-batches of equal sample count differ in memory."""
        if self.to_samples is not None or any(True for _ in named_where(batch, is_graph_batch)):
            return True
        return self.why_whole(batch) is None and self._found(batch).has_lists

    def split(self, batch: Batch, micro_batch_size: int) -> list[Batch]:
        """Split a batch into micro-batches in the order of the samples; the last one may have fewer samples.

        A batch of at most `micro_batch_size` samples is returned itself. Raises `BatchError` if the batch has
        no samples, or has to be split and its samples cannot be identified.
        """
        _check_positive("micro_batch_size", micro_batch_size)
        samples = self._count_some(batch)
        if samples <= micro_batch_size:
            return [batch]
        bounds = pairwise([*range(0, samples, micro_batch_size), samples])
        return self._selected(batch, [_Range(start, stop) for start, stop in bounds])

    def part(self, batch: Batch, start: int, stop: int) -> Batch:
        """Samples `start` to `stop` of a batch; views, except of graphs and of later batch dimensions.

        Raises `BatchError` if the samples cannot be identified.
        """
        (part,) = self._selected(batch, [_Range(start, stop)])
        return part

    def take(self, batch: Batch, indices: Tensor) -> Batch:
        """Copy the samples at some indices, in the order of the indices.

        `indices` is 1-dimensional, int64, on any device. Raises `BatchError` if the samples cannot be
        identified.
        """
        (taken,) = self._selected(batch, [_Indices(indices)])
        return taken

    def resize(self, batch: Batch, samples: int) -> Batch:
        """A batch cut or repeated to a number of samples: its sample i is sample i modulo the size of `batch`.

        Raises `BatchError` if `batch` has no samples, or they cannot be identified.
        """
        _check_positive("samples", samples)
        present = self._count_some(batch)
        if samples == present and self.why_whole(batch) is not None:
            return map_tensors(batch, lambda tensor: tensor)
        if samples <= present:
            return self.part(batch, 0, samples)
        (repeated,) = self._selected(batch, [_Repeated(*divmod(samples, present))])
        return repeated

    def _selected(self, batch: Batch, selections: Sequence[_Selection]) -> list[Batch]:
        """Make several selections of samples of a batch, whose samples are found only once."""
        if self.to_samples is not None:
            assert self.collate is not None
            samples = self._samples(batch)
            return [self.collate(selection.of_list(samples)) for selection in selections]
        places = self._found(batch)
        graphs: dict[int, list[Any]] = {}

        def select(selection: _Selection, leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return selection.of_tensor(leaf, dim_of(leaf, places.dim)) if leaf.ndim else leaf
            if is_graph_batch(leaf):
                if id(leaf) not in graphs:
                    graphs[id(leaf)] = leaf.to_data_list()
                return type(leaf).from_data_list(selection.of_list(graphs[id(leaf)]))
            kind = SampleTuple if isinstance(leaf, tuple) else SampleList
            return kind(selection.of_list(leaf))

        return [map_where(batch, places.is_leaf, partial(select, selection)) for selection in selections]

    def _samples(self, batch: Batch) -> Sequence[Any]:
        assert self.to_samples is not None
        check_tensors(batch)
        samples = self.to_samples(batch)
        if not isinstance(samples, Sequence) or isinstance(samples, str):
            raise BatchError(
                f"Job(split=…) returned an object of type {type(samples).__name__}. It must return a list of "
                "the samples of a batch, of which Job(collate=…) makes a batch again."
            )
        return samples

    def _count_some(self, batch: Batch) -> int:
        samples = self.count(batch)
        if samples == 0:
            raise BatchError(f"the batch has 0 samples: {shapes_in(batch)}.")
        return samples


def layout_of(job: Job, *, whole: int = 1, expected: int | None = None) -> BatchLayout:
    """The layout that counts and splits a job's batches, by its `batch_dim`, or its `split` and `collate`.

    `whole` is the number of samples that a batch counts as if they cannot be identified; `expected` is the
    number of samples in a full batch, if known.
    """
    return BatchLayout(
        batch_dim=job.batch_dim, to_samples=job.split, collate=job.collate, whole=whole, expected=expected
    )


def make_batch(job: Job, samples: int) -> Batch:
    """Make a batch with a number of samples for a job, on the device of the job's own batches.

    `job.batch` makes the batch, or is a real batch to resize. A batch that cannot be split counts as one sample
    if it is real, as `samples` if a function returned it. Raises `BatchError` if `job.batch` returned another
    number of samples, or something that is not a batch.
    """
    _check_positive("samples", samples)
    if is_real(job.batch):
        try:
            return layout_of(job).resize(job.batch, samples)
        except WholeBatchError as error:
            raise BatchError(
                f"{job.name}: a batch of {samples} samples cannot be made of Job(batch=…): {error} As it is it "
                "counts as one sample: micro_batch_size=1. Or pass a function, batch(n), that makes batches."
            ) from error
    _check_takes_samples(job)
    batch = job.batch(samples)
    try:
        made = layout_of(job, whole=samples, expected=samples).count(batch)
    except BatchError as error:
        raise BatchError(f"{job.name}: batch({samples}) returned an unsupported batch: {error}") from error
    if made != samples:
        second = [tensor.shape[1] for _path, tensor in named_tensors(batch) if tensor.ndim > 1]
        advice = "If its samples are in dimension 1, pass Job(batch_dim=1)." if {*second} == {samples} else ""
        raise BatchError(
            f"{job.name}: batch({samples}) returned {made} samples: {shapes_in(batch)}. "
            f"It must return as many samples as it is asked for. {advice}".rstrip()
        )
    return batch


def make_micro_batch(job: Job, micro_batch_size: int, global_batch_size: int) -> Batch:
    """A micro-batch of a global batch, the largest if its samples have different sizes.

    `global_batch_size` is a multiple of `micro_batch_size`. Raises `BatchError` as `make_batch` does.
    """
    batch = make_batch(job, micro_batch_size)
    layout = layout_of(job, whole=micro_batch_size, expected=micro_batch_size)
    if micro_batch_size == global_batch_size or not layout.samples_vary_in_size(batch):
        return batch
    layout = layout_of(job, whole=global_batch_size, expected=global_batch_size)
    return max(layout.split(make_batch(job, global_batch_size), micro_batch_size), key=_padded_bytes)


def _padded_bytes(batch: Batch) -> int:
    """Bytes of a batch if all samples of a list were as large as the largest of that list."""
    total = sum(tensor.nbytes for _path, tensor in named_tensors(batch))
    for _path, samples in named_where(batch, lambda value: isinstance(value, SampleList | SampleTuple)):
        sizes = [sum(tensor.nbytes for _path, tensor in named_tensors(sample)) for sample in samples]
        total += len(sizes) * max(sizes, default=0) - sum(sizes)
    return total


def _check_takes_samples(job: Job) -> None:
    try:
        inspect.signature(job.batch).bind(1)
    except ValueError:  # raised for a function in C
        return
    except TypeError as error:
        raise BatchError(
            f"{job.name}: Job(batch=…) is called with the number of samples, as in "
            f"batch=lambda n: torch.randn(n, 8); it does not take one: {error}."
        ) from error


def why_not_split(job: Job, samples: int) -> str | None:
    """Why a job's batches cannot be split, judged by one of them; None if they can, or have a single sample.

    `samples` is the number of samples of the batch that would be split. Raises `BatchError` if `job.batch`
    returned something that is not a batch.
    """
    if samples == 1:
        return None
    return layout_of(job).why_whole(job.batch if is_real(job.batch) else make_batch(job, samples))


def is_real(batch: Any) -> bool:
    """Whether `Job.batch` is a batch and not a function; PyTorch Geometric's batches are callable too."""
    return not callable(batch) or is_applicable(batch)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1.")
