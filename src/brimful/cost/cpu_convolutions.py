"""What oneDNN does for a convolution on a CPU: which kernels, and which copies to and from its own layout.

Source: ONEDNN_VERBOSE=profile_exec of torch 2.13 on an AMD EPYC with AVX-512, and oneDNN's
src/cpu/x64/jit_uni_dw_conv_kernel_utils.cpp.
"""

from __future__ import annotations

from brimful.cost.kinds import DEPTHWISE, IM2COL
from brimful.trace.extents import Convolution

_BLOCK = 16
"""Channels of a block of oneDNN's layout with AVX-512. Inputs of fewer are read as they are."""
_WIDEST_DEPTHWISE_GRADIENT = 3
"""Widest filter that oneDNN's kernel for a depthwise convolution's weight gradient takes."""
_OF_INPUT, _OF_WEIGHT = 1, 2
"""Bits of `Convolution.gradients`."""


def kernels(shape: Convolution, flops: int) -> list[tuple[str, int]]:
    """The kind of each kernel of a call, and its FLOPs.

    `flops` are those of the whole call: forward, or the gradients that it computes.
    """
    kinds = _kinds(shape)
    return [(kind, flops // len(kinds)) for kind in kinds]


def layout_copy_bytes(shape: Convolution, weight_bytes: int) -> int:
    """Bytes read and written by copies of the images to and from oneDNN's layout, for all kernels of a call.

    Each kernel copies two images: its input to that layout and its result from it, or, for the weight's
    gradient, the input and the gradient to it. Images that are channels_last are not copied, nor those of a
    convolution by im2col. The bytes of one number follow from those of the filter, `weight_bytes`.
    """
    copies = 0 if shape.is_channels_last else sum(kind != IM2COL for kind in _kinds(shape))
    copied = _images(shape, with_input=shape.in_channels >= _BLOCK)
    return 2 * copies * copied * _number_bytes(shape, weight_bytes)


def images_bytes(shape: Convolution, weight_bytes: int) -> int:
    """Bytes of the two images of each kernel of a call whose filter takes `weight_bytes`."""
    return _images(shape) * _number_bytes(shape, weight_bytes)


def _images(shape: Convolution, *, with_input: bool = True) -> int:
    inputs = shape.in_channels * shape.in_positions if with_input else 0
    return shape.samples * (inputs + shape.out_channels * shape.out_positions)


def _number_bytes(shape: Convolution, weight_bytes: int) -> int:
    weights = shape.out_channels * shape.in_channels // shape.groups * shape.kernel
    return weight_bytes // max(weights, 1)


def _kinds(shape: Convolution) -> list[str]:
    """Kinds of the kernel of forward, or of those of the gradients that a call computes."""
    results = [bit for bit in (_OF_INPUT, _OF_WEIGHT) if shape.gradients & bit] or [0]
    return [_kind(shape, result) for result in results]


def _kind(shape: Convolution, result: int) -> str:
    if shape.groups == 1 or shape.in_channels // shape.groups >= _BLOCK:
        return "convolution"
    is_depthwise = shape.groups == shape.in_channels == shape.out_channels
    is_wide = result == _OF_WEIGHT and shape.width > _WIDEST_DEPTHWISE_GRADIENT
    return DEPTHWISE if is_depthwise and shape.dilation == 1 and not is_wide else IM2COL
