"""The kernels of a convolution and of its gradients, as cuDNN chooses them by layout, groups and channels."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.cost.kernels.kernel import HALF_TYPES, Kernel, Unit, is_aligned
from brimful.cost.kernels.tiles import tiled_flops
from brimful.trace.extents import Convolution

IMAGE_CHANNELS = 8
"""Fewer input channels than this are of an image: cuDNN pads them to 8 for tensor cores."""

GROUPED_CHANNELS = (4, 8, 16, 32)
"""Channels per group for which cuDNN's channels_last kernels of grouped convolutions are fast, if the number of
groups is also a multiple of `GROUPS_STEP`.

Inferred from step times of 45 channels_last models with grouped convolutions on an RTX 3090 (RegNetX, RegNetZ,
ResNeXt, NFNet; CUDA 11.3, benchmarks/times): others take up to 20 times as long. cuDNN does not document it.
"""

GROUPS_STEP = 8

FALLBACK_TILE = 64
"""Output channels per group are padded to this by the other kernels; inferred from the same models."""

CHANNELS_STEP = 16
"""Channels per group are padded to this by grouped kernels on tensor cores: the inner length of their
instructions for half types (PTX ISA, mma.m16n8k16)."""

LARGE_FILTER = 25
"""Elements of a filter from which depthwise convolutions are limited by arithmetic: 5 × 5."""


def convolution_kernels(
    conv: Convolution, dtype: str, weight_bytes: int, sm_count: int, *, is_tf32: bool = False
) -> Iterator[Kernel]:
    """The kernels of a convolution's forward, or of the gradients of its input and weight.

    There is one for each result, and conversions between layouts where tensor cores need channels_last.
    """
    size = 2 if dtype in HALF_TYPES else 4
    inputs = conv.samples * conv.in_channels * conv.in_positions * size
    outputs = conv.samples * conv.out_channels * conv.out_positions * size
    moved_bytes = inputs + outputs + weight_bytes
    results = ("input",) * (conv.gradients & 1) + ("weight",) * (conv.gradients >> 1) or ("output",)
    is_depthwise = conv.groups == conv.in_channels and conv.groups > 1
    in_tensor_cores = size == 2 or (is_tf32 and conv.groups == 1 and conv.kernel * conv.stride > 1)
    converts = in_tensor_cores and not (conv.is_channels_last or conv.in_positions == 1 or is_depthwise)
    for result in results:
        if is_depthwise:
            yield _depthwise(conv, moved_bytes)
        elif conv.groups > 1:
            yield _grouped(conv, moved_bytes)
        else:
            yield _dense(conv, result, moved_bytes, sm_count)
        if converts:
            yield Kernel("layout_conversion", moved_bytes=2 * (inputs + outputs))


def _depthwise(conv: Convolution, moved_bytes: int) -> Kernel:
    """The kernel of a depthwise convolution: each channel alone, without tensor cores."""
    layout = "_channels_last" if conv.is_channels_last else ""
    large = "_large" if conv.kernel >= LARGE_FILTER else ""
    flops = 2.0 * conv.samples * conv.out_positions * conv.out_channels * conv.kernel
    return Kernel(f"depthwise{large}{layout}", flops, Unit.SCALAR, moved_bytes)


def _grouped(conv: Convolution, moved_bytes: int) -> Kernel:
    ins, outs = -(-conv.in_channels // conv.groups), -(-conv.out_channels // conv.groups)
    per_pair = 2.0 * conv.samples * conv.out_positions * conv.groups * conv.kernel
    is_fast = ins in GROUPED_CHANNELS and outs in GROUPED_CHANNELS and conv.groups % GROUPS_STEP == 0
    if conv.is_channels_last and not is_fast:
        flops = per_pair * ins * _padded(outs, FALLBACK_TILE)
        return Kernel("grouped_fallback", flops, Unit.TENSOR, moved_bytes)
    layout = "_channels_last" if conv.is_channels_last else ""
    flops = per_pair * _padded(ins, CHANNELS_STEP) * _padded(outs, CHANNELS_STEP)
    return Kernel(f"grouped{layout}", flops, Unit.TENSOR, moved_bytes)


def _padded(channels: int, step: int) -> int:
    return -(-channels // step) * step


def _dense(conv: Convolution, result: str, moved_bytes: int, sm_count: int) -> Kernel:
    """The kernel of a convolution without groups, as an implicit matrix product (cuDNN's implicit GEMM)."""
    positions, ins, outs = conv.samples * conv.out_positions, conv.in_channels, conv.out_channels
    rows, columns, inner = {
        "output": (positions, outs, ins * conv.kernel),
        "input": (conv.samples * conv.in_positions, ins, max(outs * conv.kernel // conv.stride, 1)),
        "weight": (ins * conv.kernel, outs, positions),
    }[result]
    name = "pointwise" if conv.kernel == 1 else "convolution"
    if ins < IMAGE_CHANNELS:
        name = "stem"
    elif not is_aligned(ins, outs):
        name += "_unaligned"
    flops = tiled_flops(1, rows, columns, inner, sm_count)
    name += ("_weight" if result == "weight" else "") + ("_channels_last" if conv.is_channels_last else "")
    return Kernel(name, flops, Unit.TENSOR, moved_bytes)
