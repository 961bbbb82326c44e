"""A call of an op → its problem size; see `trace.extents`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brimful.trace.extents import Attention, Convolution, Copy, Product, Rows, Strided

aten = torch.ops.aten

_LAST_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


_SECTOR_ELEMENTS = 8
"""Elements of 4 bytes in a 32-byte sector, the least that a GPU reads. Dimensions of fewer do not decide a
transpose: 32 threads then read several elements of each sector."""


def op_extents(func: torch._ops.OpOverload, args: tuple[Any, ...], out: Any) -> tuple[int, ...]:
    """The problem size of a call: the numbers of a record of `trace.extents`.

    The result is () where FLOPs and bytes alone decide the speed.
    """
    if func.overloadpacket in _ATTENTIONS:
        return tuple(map(int, _attention(func, args)))
    measure = _MEASURES.get(func.overloadpacket)
    if measure is not None:
        return tuple(map(int, measure(*args)))
    if torch.Tag.pointwise not in func.tags or not isinstance(out, Tensor):
        return ()
    operands = [each for each in args if isinstance(each, Tensor) and each.dim() and each is not out]
    if any(_is_transposed(operand, out) for operand in operands):
        return Copy(1)
    return () if _is_vectorized(operands, out) else Strided(out.numel(), len(operands) + 1)


def _is_vectorized(operands: list[Tensor], result: Tensor) -> bool:
    """Whether all elements are neighbours in memory in one order, so that threads load vectors of them.

    Source: aten/src/ATen/native/cuda/CUDALoops.cuh, `gpu_kernel_impl`: `TensorIterator.is_contiguous`.
    """
    if all(operand.shape == result.shape for operand in operands):
        if result.is_contiguous():
            return all(operand.is_contiguous() for operand in operands)
        strides = result.stride()
        return _is_dense(result) and all(operand.stride() == strides for operand in operands)
    return False


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor that does not overlap itself has no gaps."""
    spans = ((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(spans) == tensor.numel()


def _is_transposed(operand: Tensor, result: Tensor) -> bool:
    """Whether a pointwise op reads an operand along another dimension than the one that is contiguous in it."""
    if operand.shape != result.shape or torch.strided is not operand.layout or 0 in operand.stride():
        return False
    fastest = {_fastest_dim(operand), _fastest_dim(result)}
    return len(fastest) == 2 and all(result.shape[dim] >= _SECTOR_ELEMENTS for dim in fastest)


def _fastest_dim(tensor: Tensor) -> int:
    """The dimension of the smallest stride, of those with more than one element."""
    dims = (dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1)
    return min(dims, key=tensor.stride, default=0)


def _product(a: Tensor, b: Tensor, *_: Any) -> Product:
    """The extents of a product of (M, K) by (K, N), or of batches of them."""
    count = a.shape[0] if a.dim() == 3 else 1
    return Product(
        count, a.shape[-2], b.shape[-1], a.shape[-1], _is_matrix_transposed(a), _is_matrix_transposed(b)
    )


def _is_matrix_transposed(matrix: Tensor) -> bool:
    """Whether the last dimension but one of a matrix is the contiguous one."""
    return matrix.stride(-2) == 1 and matrix.stride(-1) != 1


def _grouped_product(a: Tensor, b: Tensor, *_: Any) -> Product:
    """The extents of products whose rows, columns or summands are divided among groups, as one product of all.

    One kernel runs them together. How many rows each group has only data say.
    """
    product = _product(a, b)
    return product if a.dim() == b.dim() else product._replace(products=1)


def _product_and_sum(_summand: Tensor, a: Tensor, b: Tensor, *_: Any) -> Product:
    return _product(a, b)


def _convolution(
    input: Tensor, weight: Tensor, _bias: Any, *how: Any, output: Tensor | None = None, gradients: int = 0
) -> Convolution:
    stride, _padding, dilation, transposed, _output_padding, groups = how
    kernel = math.prod(weight.shape[2:])
    steps = math.prod(stride) if len(stride) == weight.dim() - 2 else stride[0] ** (weight.dim() - 2)
    in_positions = math.prod(input.shape[2:])
    out_positions = in_positions * steps if transposed else -(-in_positions // steps)
    if output is not None:
        out_positions = math.prod(output.shape[2:])
    in_channels, out_channels = input.shape[1], weight.shape[1] * groups if transposed else weight.shape[0]
    if transposed:  # the gradient of a convolution the other way
        in_channels, out_channels = out_channels, in_channels
        in_positions, out_positions = out_positions, in_positions
    return Convolution(
        input.shape[0],
        in_channels,
        out_channels,
        groups,
        kernel,
        steps,
        in_positions,
        out_positions,
        _is_channels_last(input) or _is_channels_last(weight),
        gradients,
        weight.shape[-1],
        max(dilation),
    )


def _convolution_backward(
    grad: Tensor, input: Tensor, weight: Tensor, _bias_sizes: Any, *rest: Any
) -> Convolution:
    *how, mask = rest
    return _convolution(input, weight, None, *how, output=grad, gradients=mask[0] + 2 * mask[1])


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor is channels_last and not contiguous as well."""
    layout = _LAST_LAYOUTS.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def _attention(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> Attention:
    """The extents of a forward or a backward, whose arguments are in another order for each implementation."""
    names = (argument.name for argument in func._schema.arguments)
    named = dict(zip(names, args, strict=False))
    query, key = named["query"], named["key"]
    is_causal = bool(named.get("is_causal", False))
    return Attention(math.prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1], is_causal)


def _layer_norm(input: Tensor, normalized: Any, *_: Any) -> Rows:
    columns = math.prod(normalized)
    return Rows(input.numel() // max(columns, 1), columns, 1)


def _layer_norm_backward(_grad: Any, input: Tensor, normalized: Any, *_: Any) -> Rows:
    return _layer_norm(input, normalized)


def _group_norm(
    _input: Any, _weight: Any, _bias: Any, samples: int, channels: int, positions: int, groups: int, *_: Any
) -> Rows:
    return Rows(samples * groups, channels // groups * positions, 1)


def _group_norm_backward(_grad: Any, input: Tensor, _mean: Any, _rstd: Any, weight: Any, *rest: Any) -> Rows:
    return _group_norm(input, weight, None, *rest)


def _batch_norm(input: Tensor, *_: Any) -> Rows:
    channels = input.shape[1] if input.dim() > 1 else 1
    step = channels if _is_channels_last(input) or input.dim() == 2 else 1
    return Rows(channels, input.numel() // max(channels, 1), step)


def _batch_norm_backward(_grad: Any, input: Tensor, *_: Any) -> Rows:
    return _batch_norm(input)


def _softmax(input: Tensor, dim: int, *_: Any) -> Rows:
    columns = input.shape[dim] if input.dim() else 1
    step = math.prod(input.shape[dim % input.dim() + 1 :]) if input.dim() else 1
    return Rows(input.numel() // max(columns, 1), columns, step)


def _softmax_backward(_grad: Any, output: Tensor, dim: int, *_: Any) -> Rows:
    return _softmax(output, dim)


def _reduction(input: Tensor, dims: Any = None, *_: Any) -> Rows:
    if not isinstance(dims, list | tuple) or not dims or not input.dim():
        return Rows(1, input.numel(), 1)
    reduced = {dim % input.dim() for dim in dims}
    columns = math.prod(input.shape[dim] for dim in reduced)
    step = min((input.stride(dim) for dim in reduced if input.shape[dim] > 1), default=1)
    return Rows(input.numel() // max(columns, 1), columns, step)


def _copy(source: Tensor, *_: Any) -> Copy:
    """The extents of a clone: it keeps the layout of a dense source, else the result is contiguous."""
    return Copy(_run(source, source))


def _copy_into(target: Tensor, source: Any, *_: Any) -> Copy:
    return Copy(_run(source, target) if isinstance(source, Tensor) else target.numel())


def _run(source: Tensor, target: Tensor) -> int:
    """The number of elements that are contiguous in both tensors, which are copied without transposing."""
    run = 1
    shape = target.shape
    if source is target:
        if source.is_contiguous() or _is_channels_last(source):
            return source.numel()
        order = list(range(source.dim() - 1, -1, -1))
    else:
        order = sorted(range(target.dim()), key=lambda dim: target.stride(dim))
    lacking = source.dim() - target.dim()
    for dim in order:
        if shape[dim] == 1:
            continue
        own = dim + lacking
        if own < 0 or source.shape[own] != shape[dim] or source.stride(own) != run:
            break
        run *= shape[dim]
    return run


_ATTENTIONS = frozenset(
    getattr(aten, f"_scaled_dot_product_{kind}_attention{direction}")
    for kind in ("flash", "efficient", "cudnn")
    for direction in ("", "_backward")
)

_MEASURES: dict[Any, Callable[..., tuple[int, ...]]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten._grouped_mm: _grouped_product,
    aten.addmm: _product_and_sum,
    aten.baddbmm: _product_and_sum,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten._fused_rms_norm: _layer_norm,
    aten._fused_rms_norm_backward: _layer_norm_backward,
    aten.native_group_norm: _group_norm,
    aten.native_group_norm_backward: _group_norm_backward,
    aten.native_batch_norm: _batch_norm,
    aten._native_batch_norm_legit: _batch_norm,
    aten._batch_norm_with_update: _batch_norm,
    aten.cudnn_batch_norm: _batch_norm,
    aten.native_batch_norm_backward: _batch_norm_backward,
    aten.batch_norm_backward: _batch_norm_backward,
    aten.cudnn_batch_norm_backward: lambda input, *_: _batch_norm(input),
    aten._softmax: _softmax,
    aten._log_softmax: _softmax,
    aten._softmax_backward_data: _softmax_backward,
    aten._log_softmax_backward_data: _softmax_backward,
    aten.sum: _reduction,
    aten.mean: _reduction,
    aten.amax: _reduction,
    aten.clone: _copy,
    aten._to_copy: _copy,
    aten.copy_: _copy_into,
}
