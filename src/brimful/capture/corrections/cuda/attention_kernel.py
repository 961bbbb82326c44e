"""Scaled dot-product attention runs in the fused kernel that CUDA would choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.capture.corrections.cuda.attention_choice import AttentionBackend, AttentionCall, choose_backend
from brimful.capture.corrections.cuda.versions import torch_version
from brimful.capture.corrections.rule import Rule
from brimful.torch_utils.replaced import replaced

# B batch, H heads, M query length, N key length, D head size.

aten = torch.ops.aten

_ATTENTION = F.scaled_dot_product_attention
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

_FLASH_MULTIPLE = 8
"""Flash attention fills heads up to a multiple. Source: attention.cpp, pad_last_dim."""
_BIAS_MULTIPLE = 8
"""Memory-efficient attention fills strides of a bias up to a multiple. Source: attention.cpp,
preprocess_mask."""
_CUDNN_MASKED = -65504.0
"""Stands for minus infinity in cuDNN's biases. Source: attention.cpp, convert_boolean_attn_mask_cudnn."""


class AttentionKernel(Rule):
    """Choose between the cuDNN, flash, memory-efficient and math kernels as CUDA does, and prepare as it does.

    Key and value heads that are shared are copied for the math kernel alone.
    """

    name = "attention_kernel"
    source = (
        "torch aten/src/ATen/native/transformers/: cuda/sdp_utils.cpp (001f694a; about 2.9), attention.cpp "
        "(about 2.6)"
    )

    _is_in_math = False

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """A replacement of `F.scaled_dot_product_attention`."""
        return {_ATTENTION: self._attention}

    def context(self) -> AbstractContextManager[object]:
        """Replace the name that `F.multi_head_attention_forward` calls, out of reach of function modes."""
        return replaced(F, "scaled_dot_product_attention", self._attention)

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
        """Attention of (B, H, M, D) queries over (B, H or fewer, N, D) keys and values."""
        query, key, value, attn_mask = self._cast(query, key, value, attn_mask)
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout=dropout_p,
            is_causal=is_causal,
            shares_heads=enable_gqa,
            capability=(0, 0),
            torch_version=torch_version(),
        )
        run = {
            AttentionBackend.CUDNN: _cudnn,
            AttentionBackend.FLASH: _flash,
            AttentionBackend.EFFICIENT: _efficient,
            AttentionBackend.MATH: self._math,
        }
        self.count(0)
        chosen = cache(lambda capability: choose_backend(replace(call, capability=capability)))
        backend = self.target.answer(lambda device: chosen(device.compute_capability or (0, 0)))
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):  # as autocast leaves what it has cast
            return run[backend](call, scale)

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a sum, of which one adds the mask."""
        return func is aten.add.Tensor

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Let the math kernel add its mask in place: torch does not while a dispatch mode is on."""
        if self._is_in_math:
            self.count(-self.recorder.ledger.free_tensor(args[0]), occurrences=0)

    def _cast(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cast to autocast's type, which the direct calls of the kernels would miss."""
        if not torch.is_autocast_enabled("cpu") or query.dtype is torch.float64:
            return query, key, value, mask
        dtype = torch.get_autocast_dtype("cpu")
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return query.to(dtype), key.to(dtype), value.to(dtype), mask

    def _math(self, call: AttentionCall, scale: float | None) -> Tensor:
        """Compute attention op by op, halves in float32."""
        mask = None if call.mask is None else _additive(call.mask, call.query.dtype)
        self._is_in_math = True
        try:
            return aten._scaled_dot_product_attention_math(
                call.query,
                call.key,
                call.value,
                mask,
                call.dropout,
                call.is_causal,
                scale=scale,
                enable_gqa=call.shares_heads,
            )[0]
        finally:
            self._is_in_math = False


def _cudnn(call: AttentionCall, scale: float | None) -> Tensor:
    mask = call.mask
    if mask is not None and mask.dtype is torch.bool:
        zero = torch.zeros((), dtype=call.query.dtype)
        mask = torch.where(mask, zero, torch.full_like(zero, _CUDNN_MASKED))
    return aten._scaled_dot_product_cudnn_attention(
        call.query,
        call.key,
        call.value,
        mask,
        call.needs_gradient,
        call.dropout,
        call.is_causal,
        False,
        scale=scale,
    )[0]


def _flash(call: AttentionCall, scale: float | None) -> Tensor:
    head_size = call.query.size(-1)
    filled = -head_size % _FLASH_MULTIPLE
    query, key, value = (F.pad(t, (0, filled)) if filled else t for t in (call.query, call.key, call.value))
    scale = head_size**-0.5 if scale is None else scale
    output = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout, call.is_causal, scale=scale
    )[0]
    return output[..., :head_size] if filled else output


def _efficient(call: AttentionCall, scale: float | None) -> Tensor:
    bias = None
    if call.mask is not None:
        bias = _aligned(_additive(call.mask, call.query.dtype))
        bias = bias.expand(*call.query.shape[:3], call.key.size(2))
    return aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, bias, call.needs_gradient, call.dropout, call.is_causal, scale=scale
    )[0]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as a bias: what is masked gets minus infinity."""
    if mask.dtype is not torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _aligned(bias: Tensor) -> Tensor:
    """A bias whose rows begin at multiples: itself, or a view of a copy with longer rows."""
    if bias.stride(-1) == 1 and all(stride % _BIAS_MULTIPLE == 0 for stride in bias.stride()[:-1]):
        return bias
    width = bias.size(-1)
    return F.pad(bias, (0, _BIAS_MULTIPLE - width % _BIAS_MULTIPLE))[..., :width]
