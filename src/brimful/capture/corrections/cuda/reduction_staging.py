"""Sums and variances over rows on CUDA stage their partial results, 1 or 4 MiB for each multiprocessor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.trace import reduction_kernels

aten = torch.ops.aten

_DIMS: dict[Any, int | None] = {
    aten.sum.default: None,
    aten.sum.dim_IntList: 1,
    aten.mean.default: None,
    aten.mean.dim: 1,
    aten.linalg_vector_norm.default: 2,
    aten.var.correction: 1,
    aten.var_mean.correction: 1,
    aten.std.correction: 1,
    aten.std_mean.correction: 1,
}
"""Position of the dimensions among the arguments of ops that add up in float32; None: they take none. The bias
gradient of every Linear is a `sum.dim_IntList` over all rows."""
_VARIANCES = frozenset(
    {aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction}
)


class ReductionStaging(Rule):
    """Count the staging and the semaphores of a reduction that several blocks share."""

    name = "reduction_staging"
    source = "torch aten/src/ATen/native/cuda/Reduce.cuh, global_memory_size (header of 2.13); as an H100 does"

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a reduction that adds up in float32."""
        return func in _DIMS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        threads = self.target.threads_per_multiprocessor
        if func not in _DIMS or self.target.sm_count is None or threads is None:
            return
        x, place = args[0], _DIMS[func]
        dims = None if place is None else args[place] if len(args) > place else kwargs.get("dim")
        for kernel in reduction_kernels(
            x.shape, x.stride(), dims, self.target.sm_count, threads, is_variance=func in _VARIANCES
        ):
            self.add(kernel.size_bytes(), f"inside {func}", kernel=kernel)
