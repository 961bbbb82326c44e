"""Sorting takes buffers beside values and indices on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.utils.quantities import MIB

aten = torch.ops.aten

_INDEX_BYTES = 8
_SORTS = frozenset({aten.sort.default, aten.sort.stable})
_MOST_SORTED_IN_PLACE = 4096
"""Values of a row that are sorted where they are. Source: Sort.h, should_use_small_sort."""
_ROW_SORTED_ALONE = 1_000_000
_CUB_REST_BYTES = 2 * MIB
"""Most measured beyond keys and places: 1.5 MiB, for 8 Mi numbers."""
_MOST_ROWS_SORTED_TOGETHER = 127
"""The largest number of rows that are sorted together; more use cub's segmented sort. A single row, and longer
rows, are sorted one after another. Source: SortStable.cu, launch_stable_sort_kernel."""


class Sort(Rule):
    """Count what sorting rows of more than 4096 values takes beside values and indices.

    One row after another: the places of a row (8 bytes each). Several as one: pairs of row and place (8 bytes)
    twice and the sorted values. Many: places for all. Rows that do not lie in memory as such are copied, and so
    are both results. cub takes keys and places once more, and up to 2 MiB.
    """

    name = "sort"
    source = (
        "torch aten/src/ATen/native/cuda/Sort.cpp, sort_cuda_kernel, and SortStable.cu, "
        "launch_stable_sort_kernel (public copies of about 2.9); cub: as "
        "measured on an H100 (torch 2.11, benchmarks/results/gpu_record.json)"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op sorts."""
        return func in _SORTS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        if func not in _SORTS or args[0].dim() == 0:
            return
        x = args[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 and func is aten.sort.default else -1)
        length = x.shape[dim]
        if length <= _MOST_SORTED_IN_PLACE:
            return
        sorted_at_once, key_bytes = x.numel(), x.element_size()
        rows = x.numel() // length
        if rows == 1 or length >= _ROW_SORTED_ALONE:
            sorted_at_once = length
            likely = length * _INDEX_BYTES
        elif rows <= _MOST_ROWS_SORTED_TOGETHER:
            likely = x.numel() * (2 * _INDEX_BYTES + key_bytes)
        else:
            likely = x.numel() * _INDEX_BYTES
        if x.stride(dim) != 1 or not torch._prims_common.is_non_overlapping_and_dense_or_false(x):
            likely += x.numel() * (2 * key_bytes + _INDEX_BYTES)
        cub_bytes = sorted_at_once * (key_bytes + _INDEX_BYTES)
        for size_bytes, most_bytes in ((likely, None), (cub_bytes, cub_bytes + _CUB_REST_BYTES)):
            self.add(size_bytes, f"inside {func}", most_bytes=most_bytes)
