"""Batches: counting, splitting, resizing, selecting and moving their samples.

A `Batch` is a nest of dicts, lists, tuples, named tuples and dataclasses (also mapping classes such as
transformers' `BatchEncoding`) with tensors at its leaves. A tensor that has dimensions has the samples
first; 0-dimensional tensors and leaves that are no tensors belong to the batch as a whole and are
carried along unchanged.

The walk is our own: `torch.utils._pytree` is private, and it takes a mapping class or a dataclass for
one leaf unless its library has registered it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from brimful.errors import BatchError, UsageError
from brimful.job import Batch, Job

_MOST_ENTRIES_NAMED = 8

_Leaf = TypeVar("_Leaf")


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """The same nest with every tensor replaced by `change(tensor)`; other leaves are carried along."""
    return map_leaves(batch, Tensor, change)


def map_leaves(batch: Batch, kind: type[_Leaf], change: Callable[[_Leaf], Any]) -> Batch:
    """The same nest with every leaf of one kind replaced by `change(leaf)`; others are carried along."""
    if isinstance(batch, kind):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # keeps the class and whatever else the object holds
        for key, entry in batch.items():
            changed[key] = map_leaves(entry, kind, change)
        return changed
    if isinstance(batch, Mapping):
        return {key: map_leaves(entry, kind, change) for key, entry in batch.items()}
    if isinstance(batch, list):
        return [map_leaves(entry, kind, change) for entry in batch]
    if isinstance(batch, tuple):
        entries = [map_leaves(entry, kind, change) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else tuple(entries)
    if _is_dataclass_instance(batch):
        changed = copy.copy(batch)
        for field in dataclasses.fields(batch):
            # past a frozen dataclass's own __setattr__: `changed` is still ours alone
            object.__setattr__(changed, field.name, map_leaves(getattr(batch, field.name), kind, change))
        return changed
    return batch


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of what ops take and return: nests of tuples, lists and dicts, walked quickly."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor that is divided among ranks; any other tensor is its own."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    part: Any = getattr(tensor, "ds_tensor", None)  # DeepSpeed's
    return tensor if part is None else _without_padding(tensor, part)


def _without_padding(parameter: Any, part: Any) -> Tensor:
    """A rank's part of what DeepSpeed divides, without what fills it up, which has any values at all.

    Source: partition_parameters.py, `ds_tensor`, `ds_numel`, `ds_zero_partition_rank` (checked: 0.19.8).
    """
    begin = parameter.ds_zero_partition_rank * part.ds_numel
    own: Tensor = part.narrow(0, 0, min(max(parameter.ds_numel - begin, 0), part.ds_numel))
    return own


def count_samples(batch: Batch) -> int:
    """Samples in a batch.

    Args:
        batch: A nest of tensors.

    Returns:
        The size that the first dimension of all its tensors has; may be 0.

    Raises:
        BatchError: No tensor has dimensions, or their first dimensions differ.
    """
    entries = [(path, tensor) for path, tensor in named_tensors(batch) if tensor.ndim > 0]
    if not entries:
        raise BatchError(
            f"the batch ({type(batch).__name__}) has no tensor with samples. "
            "A batch is nested dicts, lists and tuples of tensors whose first dimension is the samples."
        )
    counts = {tensor.shape[0] for _, tensor in entries}
    if len(counts) > 1:
        raise BatchError(
            f"the entries of the batch do not agree on its number of samples: {_shapes(entries)}. "
            "The first dimension of every tensor is the samples; pass what belongs to the whole batch "
            "as a 0-dimensional tensor or a plain number."
        )
    return counts.pop()


def split_batch(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """The micro-batches of a batch.

    Args:
        batch: At least one sample.
        micro_batch_size: Samples in each micro-batch; the last one may have fewer.

    Returns:
        Views of the batch, in the order of its samples; the batch itself where it is one micro-batch.

    Raises:
        BatchError: `batch` has no sample, or its entries disagree on how many.
        UsageError: `micro_batch_size` is below 1.
    """
    _check_positive("micro_batch_size", micro_batch_size)
    samples = _count_some(batch)
    if samples <= micro_batch_size:
        return [batch]
    return [
        _slice(batch, start, min(start + micro_batch_size, samples))
        for start in range(0, samples, micro_batch_size)
    ]


def resize_batch(batch: Batch, samples: int) -> Batch:
    """A batch cut or repeated to a number of samples.

    Args:
        batch: At least one sample.
        samples: How many to return.

    Returns:
        Sample i is the batch's sample i modulo its size. A cut is a view, a repetition a copy.

    Raises:
        BatchError: `batch` has no sample, or its entries disagree on how many.
        UsageError: `samples` is below 1.
    """
    _check_positive("samples", samples)
    present = _count_some(batch)
    if samples <= present:
        return _slice(batch, 0, samples)
    times, rest = divmod(samples, present)
    return _map_samples(batch, lambda tensor: torch.cat([tensor] * times + [tensor[:rest]]))


def take(batch: Batch, indices: Tensor) -> Batch:
    """The samples at some indices, copied.

    Args:
        batch: Where to take them from.
        indices: 1-dimensional, int64; on any device.

    Returns:
        A batch of as many samples as there are indices, in their order.

    Raises:
        BatchError: The batch's entries disagree on how many samples there are.
    """
    count_samples(batch)
    return _map_samples(batch, lambda tensor: tensor.index_select(0, indices.to(tensor.device)))


def to_device(batch: Batch, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
    """`batch` with every tensor on `device`; a tensor that is there already is not copied."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def make_batch(job: Job, samples: int) -> Batch:
    """A batch for a job, of the number of samples asked for.

    Args:
        job: Its `batch` makes the batch, or is a real one to be resized.
        samples: How many the batch is to have.

    Returns:
        The batch, on the device that the job's own is on.

    Raises:
        BatchError: What `job.batch` returns has another number of samples, or none can be counted.
        UsageError: `samples` is below 1.
    """
    _check_positive("samples", samples)
    if not callable(job.batch):
        return resize_batch(job.batch, samples)
    batch = job.batch(samples)
    try:
        made = count_samples(batch)
    except BatchError as error:
        raise BatchError(f"{job.name}: batch({samples}) returned no proper batch: {error}") from error
    if made != samples:
        raise BatchError(
            f"{job.name}: batch({samples}) returned {made} samples: {_shapes(list(named_tensors(batch)))}. "
            "It must return as many samples as it is asked for."
        )
    return batch


def _map_samples(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """Like `map_tensors`, leaving 0-dimensional tensors as they are."""
    return map_tensors(batch, lambda tensor: change(tensor) if tensor.ndim > 0 else tensor)


def _slice(batch: Batch, start: int, stop: int) -> Batch:
    return _map_samples(batch, lambda tensor: tensor[start:stop])


def named_tensors(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the expression that reaches it, such as `batch["images"][0]`."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, entry in batch.items():
            yield from named_tensors(entry, f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]")
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        for name, entry in zip(batch._fields, batch, strict=True):
            yield from named_tensors(entry, f"{path}.{name}")
    elif isinstance(batch, list | tuple):
        for index, entry in enumerate(batch):
            yield from named_tensors(entry, f"{path}[{index}]")
    elif _is_dataclass_instance(batch):
        for field in dataclasses.fields(batch):
            yield from named_tensors(getattr(batch, field.name), f"{path}.{field.name}")


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _count_some(batch: Batch) -> int:
    samples = count_samples(batch)
    if samples == 0:
        raise BatchError(f"the batch has 0 samples: {_shapes(list(named_tensors(batch)))}.")
    return samples


def _shapes(entries: list[tuple[str, Tensor]]) -> str:
    named = [f"{path} has shape {tuple(tensor.shape)}" for path, tensor in entries[:_MOST_ENTRIES_NAMED]]
    more = len(entries) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} is {value}; it must be at least 1.")
