"""A call of an op → its FLOPs and the bytes that it reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brimful.batches import tensors_in
from brimful.capture.fakes.cache import spanned_bytes
from brimful.capture.recording.flops import count_flops
from brimful.capture.recording.op_info import OpInfo
from brimful.capture.values.known import is_followed

aten = torch.ops.aten

_WITHOUT_WRITE = frozenset(
    {aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default}
)
_CONVOLUTION_WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Position of the weights among the arguments."""
_GATHERS = frozenset(
    {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}
)
"""Ops that read of their first argument only as much as they return."""


class OpWork(NamedTuple):
    """What an op does, as far as its arguments' shapes, strides and types decide it."""

    flops: int
    read_bytes: int
    written_bytes: int
    dtype: str
    weight_bytes: int
    may_be_known: bool
    """Whether its results are few enough numbers for their values to be followed."""


def work_of(
    info: OpInfo,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    inputs: list[Tensor],
    outputs: list[Tensor],
) -> OpWork:
    """The work of a call; `inputs` and `outputs` are the tensors in its arguments and in `out`."""
    written = 0 if func in _WITHOUT_WRITE else sum(map(_view_bytes, outputs))
    if info.written_arguments:
        written = sum(map(_view_bytes, tensors_in([args[i] for i in info.written_arguments if i < len(args)])))
    if func in _GATHERS:
        read = written + sum(map(_view_bytes, inputs[1:]))
    elif func in _WITHOUT_WRITE:
        read = 0
    else:
        read = sum(map(_view_bytes, inputs))
    main = max(inputs or outputs, key=_view_bytes, default=None)
    weights = _CONVOLUTION_WEIGHTS.get(func)
    return OpWork(
        flops=count_flops(func, args, kwargs, out),
        read_bytes=read,
        written_bytes=written,
        dtype="" if main is None else str(main.dtype).removeprefix("torch."),
        weight_bytes=0 if weights is None else _view_bytes(args[weights]),
        may_be_known=all(map(is_followed, outputs)),
    )


def depends_on_shape_alone(tensor: Tensor) -> bool:
    """Whether shape and strides decide `_view_bytes`, whatever storage the tensor lies in."""
    return tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= spanned_bytes(tensor)


def _view_bytes(tensor: Tensor) -> int:
    """Bytes a kernel touches for a tensor; an expanded one is no larger than what it views."""
    own = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return own
    return min(own, tensor.untyped_storage().nbytes())
