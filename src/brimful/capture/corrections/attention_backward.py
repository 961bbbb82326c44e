"""The backward of CUDA's fused attention adds up gradients in float32 buffers of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.base import Rule

# B batch, H heads, M query length, N key length, D head size

aten = torch.ops.aten

_FLOAT_BYTES = 4
_FLASH_ROWS = 128
_EFFICIENT_ROWS = 64
_EFFICIENT_COLUMNS = 64
"""Rows and columns of a tile of the query's gradient; those for large heads have others of like sum.
Source: torch aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, kBlockSizeI."""


class AttentionBackward(Rule):
    """Count the accumulators of the flash and the memory-efficient kernel.

    Flash: sums of gradient times output (B, H, M) and the query's gradient (B, M, H, D), both in float32 with M
    filled up to 128 and D to 32, above 128 to 64. Memory-efficient: the same sums, (B, H, M), and the query's
    gradient in tiles.
    """

    name = "attention_backward"
    source = (
        "torch aten/src/ATen/native/transformers/cuda/: flash_attn/flash_api.cpp, mha_bwd; "
        "attention_backward.cu; mem_eff_attention/kernel_backward.h, workspace_size (not measured)"
    )
    watches_ops = True

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add what the op takes beside the gradients."""
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            sizes = flash_backward_bytes(args[1])
        elif func is aten._scaled_dot_product_efficient_attention_backward.default:
            sizes = efficient_backward_bytes(args[1])
        else:
            return
        for size_bytes in sizes:
            recorder.add_temporary(size_bytes, f"inside {func}")
            self.count(size_bytes)


def flash_backward_bytes(query: Tensor) -> tuple[int, int]:
    """Bytes of the two accumulators of flash attention for a query (B, H, M, D)."""
    samples, heads, rows, head_size = query.shape
    rows = _up_to(rows, _FLASH_ROWS)
    head_size = _up_to(head_size, 32 if head_size <= 128 else 64)
    sums = samples * heads * rows
    return sums * _FLOAT_BYTES, sums * head_size * _FLOAT_BYTES


def efficient_backward_bytes(query: Tensor) -> tuple[int, int]:
    """Bytes of the two accumulators of memory-efficient attention for a query (B, H, M, D)."""
    samples, heads, rows, head_size = query.shape
    tiles = _up_to(rows, _EFFICIENT_ROWS) * _up_to(head_size, _EFFICIENT_COLUMNS)
    return samples * heads * rows * _FLOAT_BYTES, samples * heads * tiles * _FLOAT_BYTES


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
