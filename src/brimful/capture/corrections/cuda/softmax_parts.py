"""Softmax takes tensors as large as its result inside, on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten


class SoftmaxParts(Rule):
    """Count what softmax and attention's softmax take beside their results.

    Backward of softmax: gradient times output, as large as both; that of log_softmax takes nothing. The softmax
    of the math kernel, `_safe_softmax`, looks for rows that are masked as a whole: a byte for each value and
    one for each row.
    """

    name = "softmax_parts"
    source = (
        "torch aten/src/ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out; transformers/attention.cpp, "
        "_safe_softmax; both as measured on an H100 (torch 2.11, benchmarks/results/gpu_record.json)"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a softmax that takes tensors inside."""
        return func in (aten._softmax_backward_data.default, aten._safe_softmax.default)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the temporaries of the op."""
        if func is aten._softmax_backward_data.default:
            gradient, output = args[:2]
            dtype = torch.promote_types(gradient.dtype, output.dtype)
            self.add(gradient.numel() * dtype.itemsize, f"gradient times output inside {func}")
        elif func is aten._safe_softmax.default:
            x, dim = args[:2]
            if x.dim() and x.numel():
                for size_bytes in (x.numel(), x.numel() // x.shape[dim]):
                    self.add(size_bytes, f"mask inside {func}")
