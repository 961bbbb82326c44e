"""Kernels on CUDA copy operands that do not lie as they want them, inside the op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.rule import Rule

aten = torch.ops.aten

_WANT_CONTIGUOUS = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
        aten.native_layer_norm.default,
        aten.native_layer_norm_backward.default,
        aten._fused_rms_norm.default,
        aten._fused_rms_norm_backward.default,
    }
)
"""Ops that want contiguous operands. Source: torch aten/src/ATen/native/cuda/SoftMax.cu and
layer_norm_kernel.cu, `.contiguous()` on entry."""
_MATMULS = {
    aten.mm: (0, 1),
    aten.addmm: (1, 2),
    aten.bmm: (0, 1),
    aten.baddbmm: (1, 2),
}
"""Positions of the two matrices among the arguments."""
_CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
_LAST_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


class HiddenCopies(Rule):
    """Count the copies that softmax, layer norm, matrix products and convolutions make of their operands.

    Softmax and layer norm want contiguous ones. cuBLAS wants matrices whose rows or columns are contiguous.
    A convolution runs channels-last if its input or its weight lies so, and copies what does not.
    """

    name = "hidden_copies"
    source = (
        "torch aten/src/ATen/native/cuda/SoftMax.cu, layer_norm_kernel.cu; cuda/Blas.cpp, "
        "prepare_matrix_for_cublas; ConvUtils.h, cudnn_conv_suggest_memory_format"
    )

    def watches_op(self, func: Any) -> bool:
        """Whether an op may copy its operands."""
        return func in _WANT_CONTIGUOUS or func.overloadpacket in _MATMULS or func in _CONVOLUTIONS

    def after_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        """Add the copies, each its own block."""
        for size_bytes in _copies(func, args):
            self.add(size_bytes, f"copy inside {func}")


def _copies(func: Any, args: tuple[Any, ...]) -> list[int]:
    """Bytes of each copy that an op makes of an operand."""
    if func in _WANT_CONTIGUOUS:
        return [t.nbytes for t in args if isinstance(t, Tensor) and not t.is_contiguous()]
    if func.overloadpacket in _MATMULS:
        matrices = (args[place] for place in _MATMULS[func.overloadpacket])
        return [each.nbytes for each in matrices if not _is_row_or_column_major(each)]
    if func is aten.convolution.default:
        return _layout_copies(args[:2], of_layout=args[:2])
    if func is aten.convolution_backward.default:
        return _layout_copies(args[:3], of_layout=args[1:3])
    return []


def _layout_copies(operands: Iterable[Tensor], of_layout: Iterable[Tensor]) -> list[int]:
    """Bytes of copies of operands that do not lie in the layout, channels-last if one in `of_layout` is."""
    tensors = list(operands)
    layout = _LAST_LAYOUTS.get(tensors[0].dim())
    if layout is None:
        return [t.nbytes for t in tensors if not t.is_contiguous()]
    is_last = any(not t.is_contiguous() and t.is_contiguous(memory_format=layout) for t in of_layout)
    wanted = layout if is_last else torch.contiguous_format
    return [t.nbytes for t in tensors if not t.is_contiguous(memory_format=wanted)]


def _is_row_or_column_major(matrix: Tensor) -> bool:
    """Whether one of the last two dimensions has stride 1 and the other one at least the first's size."""
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    return (column_stride == 1 and row_stride >= max(1, columns)) or (
        row_stride == 1 and column_stride >= max(1, rows)
    )
