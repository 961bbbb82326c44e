"""The backward of CUDA's fused attention adds up gradients in float32 buffers of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule
from brimful.utils.quantities import round_up

# B batch, H heads, G heads of keys and values, M query length, N key length, D head size

aten = torch.ops.aten

_FLOAT_BYTES = 4
_FLASH_ROWS = 128
_EFFICIENT_ROWS = 64
_EFFICIENT_COLUMNS = 64
"""Rows and columns of a tile of the query's gradient; those for large heads have others of like sum.
Source: torch aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, kBlockSizeI."""


class AttentionBackward(Rule):
    """Count what the backward of each fused attention takes beside the gradients.

    Flash: sums of gradient times output (B, H, M) and the query's gradient (B, M, H, D), both in float32 with M
    filled up to 128 and D to 32, above 128 to 64; where key heads are shared, gradients of keys and values for
    each query head, (B, N, H, D); copies of gradient and output unless (B, M, H, D) lies in that order.
    Memory-efficient: the same sums, (B, H, M), and the query's gradient in tiles. cuDNN: a workspace of its
    own, taken for the same sums and the query's gradient in float32, and where key heads are shared gradients
    of keys and values for each query head; at most twice that and those gradients in float32.
    """

    name = "attention_backward"
    source = (
        "torch aten/src/ATen/native/transformers/cuda/: flash_attn/flash_api.cpp, mha_bwd; "
        "attention_backward.cu; mem_eff_attention/kernel_backward.h, workspace_size; native/cudnn/MHA.cpp, "
        "whose workspace is cuDNN's choice (as measured on an H100 with cuDNN 9.19)"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op is the backward of an attention."""
        return str(func.overloadpacket).endswith("attention_backward")

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add what the op takes beside the gradients."""
        most = None
        if func is aten._scaled_dot_product_flash_attention_backward.default:
            copies = tuple(_copy_bytes(tensor) for tensor in (args[0], args[4]))
            sizes = (*flash_backward_bytes(args[1], args[2]), *copies)
        elif func is aten._scaled_dot_product_efficient_attention_backward.default:
            sizes = efficient_backward_bytes(args[1])
        elif func is aten._scaled_dot_product_cudnn_attention_backward.default:
            likely, most = cudnn_backward_bytes(*args[1:4])
            sizes = (likely,)
        else:
            return
        for size_bytes in sizes:
            self.add(size_bytes, f"inside {func}", most_bytes=most)


def flash_backward_bytes(query: Tensor, key: Tensor) -> tuple[int, ...]:
    """Bytes of the accumulators of flash attention for queries (B, H, M, D) and keys (B, G, N, D).

    These are two in float32, and with G < H the gradients of keys and values for each query head.
    """
    samples, heads, rows, head_size = query.shape
    rows = round_up(rows, _FLASH_ROWS)
    wide = round_up(head_size, 32 if head_size <= 128 else 64)
    sums = samples * heads * rows
    shared = samples * heads * key.size(2) * head_size * key.element_size() if key.size(1) != heads else 0
    return sums * _FLOAT_BYTES, sums * wide * _FLOAT_BYTES, *([shared, shared] if shared else [])


def efficient_backward_bytes(query: Tensor) -> tuple[int, int]:
    """Bytes of the two accumulators of memory-efficient attention for a query (B, H, M, D)."""
    samples, heads, rows, head_size = query.shape
    tiles = round_up(rows, _EFFICIENT_ROWS) * round_up(head_size, _EFFICIENT_COLUMNS)
    return samples * heads * rows * _FLOAT_BYTES, samples * heads * tiles * _FLOAT_BYTES


def cudnn_backward_bytes(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int]:
    """Likely and most bytes of cuDNN's workspace for queries (B, H, M, D), keys and values."""
    likely = (query.numel() // query.size(-1) + query.numel()) * _FLOAT_BYTES
    repeated = query.size(1) // key.size(1) * (key.numel() + value.numel())
    if key.size(1) != query.size(1):
        likely += repeated * key.element_size()
    return likely, 2 * likely + repeated * _FLOAT_BYTES


def _copy_bytes(tensor: Tensor) -> int:
    """Bytes of a copy of (B, H, M, D) for a kernel that wants (B, M, H, D) in order; 0 if it is so already."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()
