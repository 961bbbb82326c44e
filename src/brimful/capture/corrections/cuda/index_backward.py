"""The gradient of indexing goes through sorted indices on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

# n indices; x is indexed

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
    unless they are so; a copy of the result where the indexed dimensions do not lie together.
    """

    name = "index_backward"
    source = (
        "torch aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel (d4c71812); cub: not measured"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op writes to indices."""
        return func in _ACCUMULATES

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        if func not in _ACCUMULATES or len(args) < 4 or not args[3]:
            return
        x, indices, values = args[:3]
        given = [index for index in indices if index is not None]
        count = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
        sorting_bytes = (_INDEX_ARRAYS + _SORT_BUFFERS) * count * _INDEX_BYTES
        values_bytes = 0 if values.is_contiguous() else values.nbytes
        result_bytes = 0 if _lie_together(indices) else x.nbytes
        for size_bytes in (sorting_bytes, values_bytes, result_bytes):
            self.add(size_bytes, f"inside {func}")


def _lie_together(indices: list[Tensor | None]) -> bool:
    """Whether the indexed dimensions follow one another."""
    given = [place for place, index in enumerate(indices) if index is not None]
    return given == list(range(given[0], given[0] + len(given)))
