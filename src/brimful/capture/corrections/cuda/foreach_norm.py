"""The norms of a list of tensors, as gradient clipping takes them, are added up from parts on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_CHUNK_NUMEL = 65536
_FLOAT_BYTES = 4


class ForeachNorm(Rule):
    """Count the temporaries of `_foreach_norm`: per tensor, a number per chunk of 65536 of the largest tensor.

    Its results, one number per tensor, are outputs.
    """

    name = "foreach_norm"
    source = "torch aten/src/ATen/native/cuda/ForeachReduceOp.cu (6430a5db), kChunkSize"

    def watches_op(self, func: Any) -> bool:
        """Whether an op takes the norms of a list."""
        return func is aten._foreach_norm.Scalar

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the parts, in float32."""
        chunks = max(-(-tensor.numel() // _CHUNK_NUMEL) for tensor in args[0])
        size_bytes = len(args[0]) * chunks * _FLOAT_BYTES
        self.add(size_bytes, f"inside {func}")
