"""Gradients of indexing, and sorting, go through sorted copies on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.base import Rule

# n indices; x is indexed or sorted

aten = torch.ops.aten

_ACCUMULATES = frozenset(
    {
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index_put.default,
    }
)
_INDEX_BYTES = 8
_INDEX_ARRAYS = 4
"""Linear, sorted and original indices, and a range. Source: Indexing.cu, index_put_with_sort_kernel."""
_SORT_BUFFERS = 2
"""Keys and values of cub's radix sort, which sorts back and forth."""


class IndexBackward(Rule):
    """Count what `index_put_(accumulate=True)`, the backward of `x[indices]`, takes beside its result.

    n indices four times in 8 bytes, and twice more while they are sorted; a contiguous copy of the values
    unless they are so; a copy of the result where the indexed dimensions do not lie together, counted where
    they are not the first.
    """

    name = "index_backward"
    source = (
        "torch aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel (d4c71812); cub: not measured"
    )
    watches_ops = True

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add what the op takes beside its result."""
        if func not in _ACCUMULATES or len(args) < 4 or not args[3]:
            return
        x, indices, values = args[:3]
        given = [index for index in indices if index is not None]
        count = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
        sorting_bytes = (_INDEX_ARRAYS + _SORT_BUFFERS) * count * _INDEX_BYTES
        for size_bytes in (
            sorting_bytes,
            0 if values.is_contiguous() else _bytes(values),
            0 if _lie_together(indices) else _bytes(x),
        ):
            recorder.add_temporary(size_bytes, f"inside {func}")
        self.count(sorting_bytes)


_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_MOST_SORTED_IN_PLACE = 4096
"""Values of a row that one block sorts in shared memory. Source: torch aten/src/ATen/native/cuda/Sort.cpp,
should_use_small_sort (not read)."""


class SortMemory(Rule):
    """Count what sorting long rows takes beside values and indices.

    Several rows are sorted as one: pairs of row and place (8 bytes) twice, and as much for cub at most. One row
    alone: its indices once more, and cub's copy of values and indices.
    """

    name = "sort"
    source = "torch aten/src/ATen/native/cuda/SortStable.cu, launch_stable_sort_kernel; cub: not measured"
    watches_ops = True

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add what the op takes beside its results."""
        if func not in _SORTS:
            return
        x, values = args[0], outputs[0]
        longest = max(x.shape, default=0)
        likely = 0
        if longest > _MOST_SORTED_IN_PLACE:
            likely = 2 * x.numel() * _INDEX_BYTES
        cub_bytes = x.numel() * (values.element_size() + _INDEX_BYTES) if likely else 0
        recorder.add_temporary(likely, f"inside {func}", most_bytes=likely + cub_bytes)
        self.count(likely)


def _lie_together(indices: list[Tensor | None]) -> bool:
    """Whether no dimension between indexed ones is left out."""
    given = [place for place, index in enumerate(indices) if index is not None]
    return given == list(range(given[0], given[0] + len(given)))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
