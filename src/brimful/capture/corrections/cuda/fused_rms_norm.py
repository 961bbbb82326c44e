"""RMS norm runs in one kernel on CUDA, which keeps one number of each row; a CPU runs it op by op.

Private torch API used here: `torch._decomp` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_OPS = (aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)


class FusedRmsNorm(Rule):
    """Give the CPU `_fused_rms_norm` and its backward, which `rms_norm` then chooses as on CUDA.

    Without a kernel of its own a device runs the parts, each with its gradient. With one, autograd saves input,
    weight and `rstd`, in float32 for half types, and calls `_fused_rms_norm_backward`. Torch itself falls back
    to the parts where input and weight differ in type, and for channels-last inputs.
    """

    name = "fused_rms_norm"
    source = (
        "torch aten/src/ATen/native/layer_norm.cpp, rms_norm_symint; cuda/layer_norm_kernel.cu, "
        "_fused_rms_norm_cuda (2840b56e; newer than 2.13)"
    )

    def applies(self) -> bool:
        """Whether the target is CUDA, and torch knows the shapes of both ops."""
        return super().applies() and all(op in decomposition_table for op in _OPS)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Register the kernels while the context is open."""
        library = torch.library.Library("aten", "IMPL")
        try:
            for op in _OPS:
                library.impl(op, decomposition_table[op], "CPU")
            yield
        finally:
            library._destroy()

    def watches_op(self, func: Any) -> bool:
        """Whether an op is the forward."""
        return func is _OPS[0]

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Count the forward."""
        self.count(0)
