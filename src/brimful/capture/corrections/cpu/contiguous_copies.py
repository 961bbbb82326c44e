"""CPU kernels copy arguments that do not lie contiguously, and those of another type, before they read them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0, 1),
    aten._log_softmax_backward_data.default: (0, 1),
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (0, 1),
    aten.log_sigmoid_forward.default: (0,),
    aten.index_select.default: (0,),
    aten.embedding_dense_backward.default: (0,),
}
"""Positions of arguments that are made contiguous."""

_DENSE: dict[Any, tuple[int, ...]] = {
    aten.max_pool2d_with_indices.default: (0,),
    aten.max_pool2d_with_indices_backward.default: (0,),
    aten.avg_pool2d.default: (0,),
    aten.avg_pool2d_backward.default: (0,),
    aten._adaptive_avg_pool2d.default: (0,),
    aten._adaptive_avg_pool2d_backward.default: (0,),
    aten.upsample_nearest2d_backward.default: (0,),
    aten.upsample_bilinear2d_backward.default: (0,),
}
"""Positions of arguments that are made contiguous unless they have their channels last."""

_OF_ONE_TYPE = frozenset(
    {"add", "sub", "rsub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "pow",
     "where", "remainder", "fmod", "atan2", "lerp", "addcmul", "addcdiv"}
)  # fmt: skip
"""Ops that compute in the type that all operands can be cast to."""

_IN_THE_RESULTS_TYPE = frozenset({"sum", "mean", "prod", "cumsum", "cumprod"})
"""Ops that cast their first argument to the type of their result, as a sum of booleans is one of integers."""


class ContiguousCopies(Rule):
    """Count the copies that CPU kernels make of their arguments."""

    name = "contiguous_copies"
    source = (
        "torch aten/src/ATen/native: `contiguous` in SoftMax.cpp, layer_norm.cpp, Embedding.cpp and others; "
        "TensorIterator.cpp, promote_inputs_to_common_dtype; seen by torch 2.13's profiler"
    )
    device_kinds = ("cpu",)

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the copies to the op's outputs."""
        for size_bytes in copied_bytes(func, args, outputs):
            self.add(size_bytes, f"copy inside {func}")


def copied_bytes(func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> list[int]:
    """Bytes of each copy that an op makes of an argument."""
    if func in _CONTIGUOUS:
        return [args[i].nbytes for i in _CONTIGUOUS[func] if not args[i].is_contiguous()]
    if func in _DENSE:
        return [args[i].nbytes for i in _DENSE[func] if not _is_dense(args[i])]
    name = _base_name(func)
    if name in _IN_THE_RESULTS_TYPE:
        return _cast_bytes(args[:1], outputs[0].dtype) if outputs else []
    if name in _OF_ONE_TYPE:
        tensors = [
            arg for arg in args[1 if name == "where" else 0 :] if isinstance(arg, Tensor) and arg.dim() > 0
        ]
        return _cast_bytes(tensors, _common_dtype(args, outputs)) if outputs else []
    return []


@cache
def _base_name(func: Any) -> str:
    """The name of an op without overload, such as "add" for `aten.add_.Tensor`."""
    return str(func.overloadpacket._qualified_op_name).removeprefix("aten::").rstrip("_")


def _cast_bytes(tensors: Any, dtype: torch.dtype) -> list[int]:
    return [tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype is not dtype]


def _common_dtype(args: tuple[Any, ...], outputs: list[Tensor]) -> torch.dtype:
    """The type that an op computes in: that of its result, but for comparisons, whose result is boolean."""
    if outputs[0].dtype is not torch.bool:
        return outputs[0].dtype
    return torch.result_type(args[0], args[1])


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
