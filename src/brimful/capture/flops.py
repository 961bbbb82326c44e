"""Floating-point operations of an op, from torch's own table.

`torch.utils.flop_counter.flop_registry` counts matmuls, convolutions and attention, two per multiply-add. The
CPU's flash attention is missing there (checked: torch 2.13) and is added with the same formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _cpu_attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_a: Any, **_k: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_ADDED = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
}


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call; 0 for ops that are bound by memory, not arithmetic."""
    packet = func.overloadpacket
    if packet in _ADDED:
        return _ADDED[packet](*args, **kwargs)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
