"""Scaled dot-product attention runs in the fused kernel that CUDA would choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.capture.corrections.base import Rule

# B batch, H heads, M query length, N key length, D head size.

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class FusedAttention(Rule):
    """Choose between the flash, memory-efficient and math kernels as CUDA does.

    cuDNN's kernel, which Hopper prefers with a recent cuDNN, saves what flash saves; it is taken for flash.
    """

    name = "attention_kernel"
    source = "torch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (about 2.9)"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """`F.scaled_dot_product_attention`."""
        return {F.scaled_dot_product_attention: self._attention}

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention of (B, H, M, D) queries over (B, H, N, D) keys and values."""
        query, key, value, attn_mask = self._cast(query, key, value, attn_mask)
        if self._flash_takes(query, key, value, attn_mask, is_causal, enable_gqa):
            self.count(0)
            if enable_gqa and key.size(1) != query.size(1):
                # The op's fake form wants equal heads; flash reads shared heads without a copy.
                key, value = (_shared_heads(t, query.size(1)) for t in (key, value))
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        if self._efficient_takes(query, key, value, enable_gqa):
            self.count(0)
            bias = None if attn_mask is None else _additive(attn_mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, True, dropout_p, is_causal, scale=scale
            )[0]
        self.count(0)
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _cast(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """To autocast's type, which the direct calls of the kernels would miss."""
        if not torch.is_autocast_enabled("cpu"):
            return query, key, value, mask
        dtype = torch.get_autocast_dtype("cpu")
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return query.to(dtype), key.to(dtype), value.to(dtype), mask

    def _flash_takes(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> bool:
        head_size = query.size(-1)
        return (
            self._capability() >= (8, 0)
            and query.dtype in _HALF
            and mask is None
            and query.dim() == 4
            and head_size == key.size(-1) == value.size(-1) <= 256
            and (enable_gqa or query.size(1) == key.size(1))
            and not (is_causal and query.size(-2) != key.size(-2))
        )

    def _efficient_takes(self, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
        capability = self._capability()
        if query.dtype is torch.bfloat16 and capability < (8, 0):
            return False
        if query.dtype in _HALF:
            alignment = 8 if capability >= (7, 0) else 1
        else:
            alignment = 4 if capability >= (8, 0) else 1
        return (
            query.dtype in (*_HALF, torch.float32)
            and query.dim() == 4
            and query.size(-1) % alignment == 0
            and value.size(-1) % alignment == 0
            and (query.size(1) == key.size(1) or not enable_gqa)
        )

    def _capability(self) -> tuple[int, int]:
        return self.target.compute_capability or (0, 0)


def _shared_heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, G, N, D) as (B, heads, N, D) without a copy where the layout permits it."""
    return tensor.repeat_interleave(heads // tensor.size(1), 1)


def _additive(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as a bias of the query's type, expanded to (B, H, M, N)."""
    if mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=query.dtype)
        mask = torch.where(mask, zero, torch.full((), float("-inf"), dtype=query.dtype))
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
