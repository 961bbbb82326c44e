"""Sums over rows on CUDA stage their partial results, about 1 MiB for each multiprocessor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.base import Rule
from brimful.kernels import reduction_kernels

aten = torch.ops.aten

_REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.linalg_vector_norm.default}
)
"""They add up in float32. The bias gradient of every Linear is a `sum.dim_IntList` over all rows."""


class ReductionStaging(Rule):
    """Count the staging and the semaphores of a reduction that several blocks share."""

    name = "reduction_staging"
    source = "torch aten/src/ATen/native/cuda/Reduce.cuh, global_memory_size (header of 2.13; not measured)"
    watches_ops = True

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add what the op takes beside its result."""
        threads = self.target.threads_per_multiprocessor
        if func not in _REDUCTIONS or self.target.sm_count is None or threads is None:
            return
        x = args[0]
        dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else None
        for kernel in reduction_kernels(x.shape, x.stride(), dims, self.target.sm_count, threads):
            size_bytes = recorder.add_kernel(kernel, f"inside {func}")
            if size_bytes:
                self.count(size_bytes)
