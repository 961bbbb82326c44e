"""A call of an op → the bytes that it reads and writes in the device's memory.

An op reads each operand once and writes each result once, unless a table below says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from brimful.batches import tensors_in
from brimful.capture.fakes.cache import spanned_bytes
from brimful.capture.recording.op_info import OpInfo

aten = torch.ops.aten


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


_ALLOCATE = _packets("empty empty_like empty_strided new_empty new_empty_strided")
"""Ops that move nothing."""
_FIRST_IS_NOT_READ = _packets(
    "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full "
    "zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ "
    "_foreach_zero_ _foreach_copy_"
)
"""Ops that take only the shape of their first argument, or only write to it."""
_GATHERS = _packets("embedding index index_select gather")
"""Ops that read of their first argument as much as they return."""

COMPILED_KERNELS = "inductor_kernels"
"""Namespace of kernels that Inductor made; their last argument is what they move, in bytes, or None."""

Traffic = tuple[int, int]
"""Bytes read and written."""


def traffic_of(
    info: OpInfo,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
) -> Traffic:
    """The traffic of a call; `inputs` and `outputs` are the tensors in its arguments and in its result."""
    packet = func.overloadpacket
    if packet in _ALLOCATE:
        return 0, 0
    written = _bytes_of(outputs)
    if info.written_arguments:
        written = _bytes_of(tensors_in([args[i] for i in info.written_arguments if i < len(args)]))
    if packet in _GATHERS:
        return written + _bytes_of(inputs[1:]), written
    if packet in _FIRST_IS_NOT_READ:
        return _bytes_of(tensors_in((args[1:], kwargs))), written
    if func.namespace == COMPILED_KERNELS and args[-1] is not None:
        return max(args[-1] - written, 0), written
    special = _SPECIAL.get(packet)
    if special is not None:
        return special(written, *args, **kwargs)
    read = {id(tensor): tensor for tensor in inputs}
    read.pop(id(kwargs.get("out")), None)
    return _bytes_of(read.values()), written


def view_bytes(tensor: Tensor) -> int:
    """Bytes that a kernel accesses for a tensor: elements of an expanded one count once."""
    own = _distinct_bytes(tensor)
    return min(own, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else own


def depends_on_shape_alone(tensor: Tensor) -> bool:
    """Whether shape and strides decide `view_bytes`, whatever storage the tensor lies in."""
    return tensor.layout is torch.strided and _distinct_bytes(tensor) <= spanned_bytes(tensor)


def _distinct_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; those that dimensions of stride 0 repeat count once."""
    numel = tensor.numel()
    if numel and tensor.layout is torch.strided and 0 in tensor.stride():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        numel = math.prod(size for size, stride in sizes if stride)
    return numel * tensor.element_size()


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(map(view_bytes, tensors))


def _nll_loss(
    written: int, log_probs: Tensor, target: Tensor, weight: Tensor | None = None, *_: Any
) -> Traffic:
    """Traffic of a loss that reads one log probability and one weight of each row."""
    gathered = log_probs.element_size() + (0 if weight is None else weight.element_size())
    return view_bytes(target) + target.numel() * gathered, written


def _nll_loss_backward(
    written: int,
    grad: Tensor,
    _log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None,
    _reduction: int,
    _ignored: int,
    total_weight: Tensor,
) -> Traffic:
    """Traffic of a gradient that is filled with zeros, before one number of each row is written."""
    gathered = 0 if weight is None else target.numel() * weight.element_size()
    read = _bytes_of((grad, target, total_weight)) + gathered
    return read, written + target.numel() * grad.element_size()


def _backward_of_view(written: int, grad: Tensor, *_: Any, **__: Any) -> Traffic:
    """Traffic of a result that is filled with zeros, before the gradient is copied to its place."""
    return view_bytes(grad), written + grad.numel() * grad.element_size()


def _index_write(
    written: int, target: Tensor, _dim: int, index: Tensor, source: Any, *_: Any, **__: Any
) -> Traffic:
    """Traffic of a write to rows of a target that are as large as the source."""
    rows = source.numel() * target.element_size() if isinstance(source, Tensor) else written
    return _bytes_of(tensors_in((index, source))), min(rows, written)


def _index_put(written: int, target: Tensor, indices: Any, values: Tensor, *rest: Any, **__: Any) -> Traffic:
    """Traffic of a write of as much of a target as there are values; one value may fill all of it."""
    rows = min(values.numel() * target.element_size(), written) if values.numel() > 1 else written
    adds = bool(rest) and rest[0] is True
    return _bytes_of(tensors_in((indices, values))) + (rows if adds else 0), rows


def _scatter(
    written: int, target: Tensor, _dim: int, index: Tensor, source: Any, *_: Any, **__: Any
) -> Traffic:
    """Traffic of a write to as many elements as there are indices; the source has at least as many."""
    numel = index.numel()
    read = numel * source.element_size() if isinstance(source, Tensor) else 0
    return view_bytes(index) + read, min(numel * target.element_size(), written)


def _adding(measure: Callable[..., Traffic]) -> Callable[..., Traffic]:
    """Traffic of an op that reads what it writes to before, from that of one that only writes."""

    def run(*args: Any, **kwargs: Any) -> Traffic:
        read, written = measure(*args, **kwargs)
        return read + written, written

    return run


_SPECIAL: dict[Any, Callable[..., Traffic]] = {
    aten.nll_loss_forward: _nll_loss,
    aten.nll_loss2d_forward: _nll_loss,
    aten.nll_loss_backward: _nll_loss_backward,
    aten.nll_loss2d_backward: _nll_loss_backward,
    aten.slice_backward: _backward_of_view,
    aten.select_backward: _backward_of_view,
    aten.diagonal_backward: _backward_of_view,
    aten.index_put_: _index_put,
    aten.index_copy_: _index_write,
    aten.index_add_: _adding(_index_write),
    aten.scatter_: _scatter,
    aten.scatter_add_: _adding(_scatter),
}
"""Functions for the traffic of ops, from the bytes of all results and the arguments."""
