"""A call of an op → its FLOPs and the bytes that it reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from brimful.capture.recording.extents import op_extents
from brimful.capture.recording.flops import count_flops
from brimful.capture.recording.op_info import OpInfo
from brimful.capture.recording.traffic import traffic_of, view_bytes
from brimful.capture.values.known import is_followed

aten = torch.ops.aten

_CONVOLUTION_WEIGHTS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""Position of the weights among the arguments of convolutions."""


class OpWork(NamedTuple):
    """Work of an op, as far as shapes, strides and types of its arguments determine it."""

    flops: int
    read_bytes: int
    written_bytes: int
    dtype: str
    weight_bytes: int
    extents: tuple[int, ...]
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
    read, written = traffic_of(info, func, args, kwargs, inputs, outputs)
    main = max(inputs or outputs, key=view_bytes, default=None)
    weights = _CONVOLUTION_WEIGHTS.get(func)
    return OpWork(
        flops=count_flops(func, args, kwargs, out),
        read_bytes=read,
        written_bytes=written,
        dtype="" if main is None else str(main.dtype).removeprefix("torch."),
        weight_bytes=0 if weights is None else view_bytes(args[weights]),
        extents=op_extents(func, args, out),
        may_be_known=all(map(is_followed, outputs)),
    )
