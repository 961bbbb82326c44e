"""Floating-point operations of an op, from torch's own table.

`torch.utils.flop_counter.flop_registry` counts matmuls, convolutions and attention, two per multiply-add. The
CPU's flash attention and fused LSTM and cuDNN's recurrent layers are missing there (checked: torch 2.13) and
are added alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


def _cpu_attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(grad: Any, query: Any, key: Any, value: Any, *_a: Any, **_k: Any) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _cpu_rnn(inputs: Any, input_weight: Any, hidden_weight: Any, *_args: Any, **_kwargs: Any) -> int:
    """Each step multiplies its input and the state before it by all gates' weights."""
    steps = inputs.shape[0] * inputs.shape[1]
    return int(2 * steps * (input_weight.numel() + hidden_weight.numel()))


def _cpu_rnn_backward(*args: Any, **kwargs: Any) -> int:
    """Gradients of inputs and of weights, each as much as forward."""
    return 2 * _cpu_rnn(*args, **kwargs)


def _cudnn_rnn(inputs: Any, weights: Any, *_args: Any, **_kwargs: Any) -> int:
    """Each step multiplies by every matrix of every layer and direction."""
    steps = inputs.numel() // inputs.shape[-1]
    return int(2 * steps * sum(weight.numel() for weight in weights if weight.dim() > 1))


def _cudnn_rnn_backward(*args: Any, **kwargs: Any) -> int:
    """Gradients of inputs and of weights, each as much as forward."""
    return 2 * _cudnn_rnn(*args, **kwargs)


_ADDED: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
    aten.mkldnn_rnn_layer: _cpu_rnn,
    aten.mkldnn_rnn_layer_backward: _cpu_rnn_backward,
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
}


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call; 0 for ops that are bound by memory, not arithmetic."""
    packet = func.overloadpacket
    if packet in _ADDED:
        return _ADDED[packet](*args, **kwargs)
    formula: Any = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
