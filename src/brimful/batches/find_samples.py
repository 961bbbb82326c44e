"""Finds the samples of a batch: which of its entries have them, and in which dimension.

Samples are looked for in this order:

1. in the dimension that is named, if one is,
2. as lists with one entry for each sample, such as the targets of a detector: dicts of tensors of any shapes,
3. in the first dimension of all tensors,
4. as lists of tensors of different shapes, or as one list of dicts.

Batches of graphs, as PyTorch Geometric makes them, know their samples; they may be the batch or an entry of it.
0-dimensional tensors and leaves that hold no tensor belong to the batch as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brimful.batches.tensors import SampleList, SampleTuple, is_record, named_tensors, named_where
from brimful.errors import BatchError
from brimful.job import Batch

_MOST_ENTRIES_NAMED = 8


class WholeBatchError(BatchError):
    """A batch whose samples cannot be identified, so that it cannot be split."""


@dataclass(frozen=True, slots=True)
class SampleLocations:
    """Where the samples of a batch are."""

    samples: int
    dim: int = 0
    """Batch dimension of tensors that have it; tensors of fewer dimensions have their samples in the first."""
    has_lists: bool = False
    """Whether lists have one entry per sample."""
    plain: frozenset[int] = frozenset()
    """Identities of further lists with one entry per sample, such as file names."""
    is_certain: bool = True
    """Whether this holds even if all tensors agree in their first dimension."""

    def is_leaf(self, entry: Any) -> bool:
        """Whether a part of the batch has one entry per sample."""
        is_list = self.has_lists and (_is_sample_list(entry) or id(entry) in self.plain)
        return is_list or _is_sampled(entry)


def find_samples(batch: Batch, dim: int | None = None, *, expected: int | None = None) -> SampleLocations:
    """Find the samples of a batch: their number, and where they are.

    Args:
        batch: Nested tensors.
        dim: The batch dimension of its tensors; None finds the samples.
        expected: The expected number of samples. It decides where lists have this number of entries, and all
            tensors agree in a larger first dimension.

    Returns:
        The number of samples, and where they are.

    Raises:
        WholeBatchError: The samples cannot be identified.
        BatchError: No tensor has dimensions, or a tensor has no values.
    """
    check_tensors(batch)
    if not any(tensor.ndim for _path, tensor in named_tensors(batch)):
        raise BatchError(
            f"the batch ({type(batch).__name__}) has no tensor with samples. A batch is nested dicts, lists "
            "and tuples of tensors whose first dimension is the samples. For a list of samples that are not "
            "tensors, such as texts, pass Job(split=list, collate=list)."
        )
    if dim is not None:
        return _in_rows(batch, dim)
    lists = _in_lists(batch)
    if lists is not None and lists.is_certain:
        return lists
    try:
        rows = _in_rows(batch, 0)
    except WholeBatchError:
        if lists is None:
            raise
        return lists
    is_expected = lists is not None and expected is not None and lists.samples == expected < rows.samples
    return lists if is_expected and lists is not None else rows


def shapes_in(batch: Batch) -> str:
    """The shapes of the first tensors of a batch, for a message."""
    entries = [(path, tensor) for path, tensor in named_tensors(batch) if tensor.ndim > 0]
    named = [f"{path} has shape {tuple(tensor.shape)}" for path, tensor in entries[:_MOST_ENTRIES_NAMED]]
    more = len(entries) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def dim_of(tensor: Tensor, dim: int) -> int:
    """The dimension of a tensor's samples: `dim` if the tensor has it, else the first."""
    return dim if tensor.ndim > dim else 0


def _count_of(leaf: Any, dim: int) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[dim_of(leaf, dim)] if leaf.ndim else None
    return int(leaf.num_graphs)


def is_graph_batch(value: Any) -> bool:
    """Whether a value is a batch of graphs that can be taken apart.

    Source: torch_geometric/data/batch.py, `Batch.to_data_list`, `from_data_list`, `num_graphs` (checked: 2.9).
    """
    kind = type(value)
    return all(hasattr(kind, name) for name in ("to_data_list", "from_data_list", "num_graphs"))


def _is_sampled(value: Any) -> bool:
    return isinstance(value, Tensor) or is_graph_batch(value)


def _is_sampled_or_list(value: Any) -> bool:
    return _is_sampled(value) or _is_sample_list(value)


def _is_sample_list(value: Any) -> bool:
    """Whether entries of a list or tuple may be samples: tensors of one kind, or records of one kind."""
    if isinstance(value, SampleList | SampleTuple):
        return True
    if not isinstance(value, list | tuple) or hasattr(value, "_fields") or not value:
        return False
    if all(isinstance(entry, Tensor) for entry in value):
        return len({(entry.ndim, entry.dtype) for entry in value}) == 1
    kinds = {tuple(entry) if isinstance(entry, Mapping) else type(entry) for entry in value}
    return len(kinds) == 1 and all(map(_is_sample_record, value))


def _is_sample_record(value: Any) -> bool:
    """Whether a value may be one sample: a dict, a dataclass or an object with a tensor in it."""
    if not is_record(value) or is_graph_batch(value):
        return False
    return any(tensor.ndim > 0 for _path, tensor in named_tensors(value))


def _in_lists(batch: Batch) -> SampleLocations | None:
    """Lists of samples, all of the length of the other tensors' first dimension; None if there are none.

    The result is certain if a list of dicts (targets) is next to other entries. A single list of dicts may also
    be a pair of inputs with the same names, each for all samples, and a list of tensors a pair of inputs.
    """
    leaves = [leaf for _path, leaf in named_where(batch, _is_sampled_or_list)]
    lists = [leaf for leaf in leaves if not _is_sampled(leaf)]
    rows = [rows for leaf in leaves if _is_sampled(leaf) and (rows := _count_of(leaf, 0)) is not None]
    counts = {*map(len, lists), *rows}
    if not lists or len(counts) != 1:
        return None
    is_part = any(isinstance(leaf, SampleList | SampleTuple) for leaf in lists)
    if lists[0] is batch and isinstance(batch[0], Tensor) and not is_part:
        return None
    (samples,) = counts
    has_targets = len(lists) + len(rows) > 1 and any(not isinstance(leaf[0], Tensor) for leaf in lists)
    return SampleLocations(
        samples, has_lists=True, plain=_plain_lists(batch, samples), is_certain=is_part or has_targets
    )


def _plain_lists(batch: Batch, samples: int) -> frozenset[int]:
    """Lists of names or numbers that are entries of the batch itself and as long as its lists of samples."""
    entries: list[Any] = []
    if isinstance(batch, Mapping):
        entries = [entry for entry in batch.values() if isinstance(entry, list)]
    elif isinstance(batch, list | tuple):
        entries = [entry for entry in batch if isinstance(entry, list | tuple)]
    return frozenset(
        id(entry)
        for entry in entries
        if len(entry) == samples and all(isinstance(each, str | int | float) for each in entry)
    )


def check_tensors(batch: Batch) -> None:
    """Raise `BatchError` if a tensor of a batch has no values (meta device), or is sparse."""
    for path, tensor in named_tensors(batch):
        if tensor.ndim > 0:
            _check_tensor(path, tensor)


def _check_tensor(path: str, tensor: Tensor) -> None:
    if tensor.device.type == "meta":
        raise BatchError(
            f"{path} is on the meta device, where it has a shape and no values. Make the batch on the CPU."
        )
    if tensor.layout not in (torch.strided, torch.jagged):
        layout = str(tensor.layout).removeprefix("torch.")
        raise BatchError(
            f"{path} is a sparse tensor ({layout}), which cannot be cut into micro-batches, and whose "
            "memory cannot be predicted. Give a dense one: tensor.to_dense()."
        )


def _in_rows(batch: Batch, dim: int) -> SampleLocations:
    """Locate samples in dimension `dim` of all tensors and in batches of graphs, which must agree in number."""
    leaves = [leaf for _path, leaf in named_where(batch, _is_sampled)]
    counts = {_count_of(leaf, dim) for leaf in leaves} - {None}
    if len(counts) != 1:
        raise WholeBatchError(
            f"the entries of the batch do not agree on its number of samples: {shapes_in(batch)}. Samples are "
            f"sought in dimension {dim} of every tensor, and in lists with an entry for each sample. Name "
            "another dimension, Job(batch_dim=1), or give functions that make a list of samples from a batch "
            "and a batch from that, Job(split=…, collate=…). Pass what belongs to the whole batch as a "
            "0-dimensional tensor or a plain number."
        )
    (samples,) = counts
    assert samples is not None
    return SampleLocations(samples, dim)
