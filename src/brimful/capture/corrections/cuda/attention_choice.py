"""CUDA's choice of a kernel for scaled dot-product attention: torch's checks, one function per kernel.

Source: torch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, 001f694a (newer than 2.13) and a copy of
about 2.9; what differs between them depends on torch's version below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

# B batch, H heads of the query, G heads of keys and values, M query length, N key length, D head size

_HALF = (torch.float16, torch.bfloat16)
_Version = tuple[int, int]


class AttentionBackend(StrEnum):
    """Torch's name for a kernel of attention."""

    CUDNN = "cudnn"
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """The arguments of `F.scaled_dot_product_attention`, and where it would run."""

    query: Tensor
    """(B, H, M, D)."""
    key: Tensor
    """(B, G, N, D)."""
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    shares_heads: bool
    """`enable_gqa`: several query heads may share one key and value head."""
    capability: _Version
    """Compute capability of the GPU."""
    torch_version: _Version

    @property
    def needs_gradient(self) -> bool:
        """Whether autograd records the call."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))

    @property
    def has_equal_heads(self) -> bool:
        """Whether each query head has a key and value head of its own."""
        return self.query.size(1) == self.key.size(1) == self.value.size(1)

    @property
    def has_shared_heads(self) -> bool:
        """Whether key and value heads may be shared, and come out even."""
        return self.shares_heads and all(self.query.size(1) % t.size(1) == 0 for t in (self.key, self.value))


def choose_backend(call: AttentionCall) -> AttentionBackend:
    """The first kernel, in the order torch prefers, that takes the call; math if none does."""
    enabled = torch.backends.cuda
    takes = {
        AttentionBackend.CUDNN: enabled.cudnn_sdp_enabled()
        and _cudnn_is_preferred(call)
        and _cudnn_takes(call),
        AttentionBackend.FLASH: enabled.flash_sdp_enabled() and _flash_takes(call),
        AttentionBackend.EFFICIENT: enabled.mem_efficient_sdp_enabled() and _efficient_takes(call),
    }
    return next((kernel for kernel, is_taken in takes.items() if is_taken), AttentionBackend.MATH)


def _cudnn_is_preferred(call: AttentionCall, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether cuDNN comes first: on data-center Hopper and Blackwell, where torch's cuDNN is new enough.

    Torch 2.9 asks for cuDNN 9.9, and for 9.0 or 10.0; 2.10 and later ask for a cuDNN after 9.15.0, which is
    bundled from 2.11 on. Elsewhere cuDNN comes after math, so it never runs. Versions: pytorch issue 169849,
    transformers pull request 48163.
    """
    major, minor = call.capability
    if environment.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or call.torch_version == (2, 10):
        return False
    return major in (9, 10) and (minor == 0 or (minor == 3 and call.torch_version > (2, 10)))


def _cudnn_takes(call: AttentionCall) -> bool:
    query, key, value, mask = call.query, call.key, call.value, call.mask
    if not _is_four_dimensional(call) or query.dtype not in _HALF or not _last_strides_are_1(call):
        return False
    sizes = (query.size(-1), value.size(-1))
    if query.size(-1) != key.size(-1) or any(size % 8 for size in sizes):
        return False
    if max(sizes) > 128 and sizes != (192, 128):  # 256 only after cuDNN 9.22, newer than torch 2.13's
        return False
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    if call.dropout and call.torch_version > (2, 13) and not (call.dropout * 16).is_integer():
        return False
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return False
    is_single = key.size(2) == 1 or (call.dropout > 0 and query.size(2) == 1)
    return not is_single and (call.has_equal_heads or call.has_shared_heads)


def _flash_takes(call: AttentionCall) -> bool:
    query, key, value = call.query, call.key, call.value
    if not _is_four_dimensional(call) or not (8, 0) <= call.capability <= (12, 1):
        return False
    head_size = query.size(-1)
    return (
        query.dtype in _HALF
        and call.mask is None
        and head_size == key.size(-1) == value.size(-1) <= 256
        and _last_strides_are_1(call)
        and (call.has_equal_heads or (call.has_shared_heads and key.size(1) == value.size(1)))
        and not (call.is_causal and query.size(-2) != key.size(-2))
        and not (call.needs_gradient and _backward_lacks_room(call, head_size))
    )


def _backward_lacks_room(call: AttentionCall, head_size: int) -> bool:
    """Whether a card has too little shared memory for the backward of large heads, as consumer cards have."""
    is_small = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    return is_small and (192 < head_size <= 224 or (head_size > 224 and call.dropout > 0))


def _efficient_takes(call: AttentionCall) -> bool:
    query, key, value = call.query, call.key, call.value
    if not _is_four_dimensional(call) or not (5, 0) <= call.capability <= (12, 1):
        return False
    if query.dtype not in (*_HALF, torch.float32):
        return False
    if query.dtype is torch.bfloat16 and call.capability < (8, 0):
        return False
    if query.dtype in _HALF:
        alignment = 8 if call.capability >= (7, 0) else 1
    else:
        alignment = 4 if call.capability >= (8, 0) else 1
    return (
        query.size(-1) == key.size(-1)
        and query.size(-1) % alignment == 0
        and value.size(-1) % alignment == 0
        and _last_strides_are_1(call)
        and (call.mask is None or call.mask.stride(-1) == 1)
        and call.has_equal_heads
    )


def _is_four_dimensional(call: AttentionCall) -> bool:
    """Whether all tensors have four dimensions, one batch size and one type, and are not empty."""
    tensors = (call.query, call.key, call.value)
    return (
        all(t.dim() == 4 for t in tensors)
        and len({t.size(0) for t in tensors}) == 1
        and len({t.dtype for t in tensors}) == 1
        and all(t.size(2) > 0 for t in tensors)
    )


def _last_strides_are_1(call: AttentionCall) -> bool:
    tensors = (call.query, call.key, call.value)
    return all(t.stride(-1) == 1 for t in tensors) or call.query.size(-1) == 1
