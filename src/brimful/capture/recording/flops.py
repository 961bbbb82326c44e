"""Floating-point operations of an op, from torch's own table.

`torch.utils.flop_counter.flop_registry` counts matmuls and convolutions, two per multiply-add (checked: torch
2.13). What it lacks or counts wrongly is counted here in the same way: fused attention, recurrent layers, some
products, gradients of grouped convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of scores and their weighted sum, for (B, H, M, D) queries and N keys.

    Keys and values may have fewer heads.
    """
    samples, heads, rows, head_size = query.shape
    return int(2 * samples * heads * rows * key.shape[-2] * (head_size + value.shape[-1]))


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of the scores again and the gradients of weights, values, queries and keys: 5 products for 2."""
    samples, heads, rows, head_size = query.shape
    return int(2 * samples * heads * rows * key.shape[-2] * (3 * head_size + 2 * value.shape[-1]))


def _cpu_rnn(inputs: Any, input_weight: Any, hidden_weight: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of an RNN: each step multiplies its input and the state before it by all gates' weights."""
    steps = inputs.shape[0] * inputs.shape[1]
    return int(2 * steps * (input_weight.numel() + hidden_weight.numel()))


def _cpu_rnn_backward(*args: Any, **kwargs: Any) -> int:
    """FLOPs of the gradients of inputs and of weights, each as many as forward."""
    return 2 * _cpu_rnn(*args, **kwargs)


def _cudnn_rnn(inputs: Any, weights: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of an RNN: each step multiplies by every matrix of every layer and direction."""
    steps = inputs.numel() // inputs.shape[-1]
    return int(2 * steps * sum(weight.numel() for weight in weights if weight.dim() > 1))


def _cudnn_rnn_backward(*args: Any, **kwargs: Any) -> int:
    """FLOPs of the gradients of inputs and of weights, each as many as forward."""
    return 2 * _cudnn_rnn(*args, **kwargs)


def _convolution_backward(
    grad: Any, inputs: Any, weight: Any, _bias_sizes: Any, *rest: Any, **_kwargs: Any
) -> int:
    """FLOPs of the gradients, each as many as forward; torch's own table counts the weight's once per group."""
    _stride, _padding, _dilation, is_transposed, _output_padding, _groups, mask = rest
    positions = math.prod((inputs if is_transposed else grad).shape[2:])
    return int(2 * grad.shape[0] * positions * weight.numel() * (mask[0] + mask[1]))


def _matrix_vector(matrix: Any, _vector: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(2 * matrix.numel())


def _add_matrix_vector(_bias: Any, matrix: Any, _vector: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(2 * matrix.numel())


def _grouped_matmul(a: Any, b: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of (M, K) or (G, M, K) by (G, K, N) or (K, N), whose rows or columns are divided among G groups."""
    if a.dim() == 3 and b.dim() == 2:
        return int(2 * b.numel() * a.shape[-2])
    return int(2 * a.numel() * b.shape[-1])


_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
"""Fused attentions, of which torch's own table refuses shared heads in 2.11 and lacks the last."""

_ADDED: dict[Any, Callable[..., int]] = {
    **{getattr(aten, name): _attention for name in _FUSED_ATTENTION},
    **{getattr(aten, f"{name}_backward"): _attention_backward for name in _FUSED_ATTENTION},
    aten.convolution_backward: _convolution_backward,
    aten.mv: _matrix_vector,
    aten.dot: _matrix_vector,
    aten.addmv: _add_matrix_vector,
    aten._grouped_mm: _grouped_matmul,
    aten.mkldnn_rnn_layer: _cpu_rnn,
    aten.mkldnn_rnn_layer_backward: _cpu_rnn_backward,
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _cudnn_rnn_backward,
}


def _by_rows(inputs: Any, weight: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of (…, K) by weights of (N, K)."""
    return int(2 * inputs.numel() * weight.shape[0])


def _by_packed_rows(inputs: Any, _packed: Any, shape: Any, *_args: Any, **_kwargs: Any) -> int:
    """FLOPs of (…, K) by packed weights of `shape` (N, K)."""
    return int(2 * inputs.numel() * shape[0])


_OF_LIBRARIES: dict[str, Callable[..., int]] = {
    "bitsandbytes::int8_linear_matmul": _by_rows,
    "bitsandbytes_stand_in::int8_linear_matmul": _by_rows,
    "bitsandbytes::gemm_4bit": _by_packed_rows,
}
"""Formulas for ops of libraries by name, as these need not be there."""


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call; 0 for ops that are bound by memory, not arithmetic."""
    if func.namespace != "aten" and func._schema.name in _OF_LIBRARIES:
        return _OF_LIBRARIES[func._schema.name](*args, **kwargs)
    packet = func.overloadpacket
    if packet in _ADDED:
        return _ADDED[packet](*args, **kwargs)
    formula: Any = flop_registry.get(packet)
    if formula is None:
        return 0
    given = [each for each in args if not isinstance(each, torch.dtype)]  # `out_dtype` of mm, addmm, bmm
    return int(formula(*given, **kwargs, out_val=out))
