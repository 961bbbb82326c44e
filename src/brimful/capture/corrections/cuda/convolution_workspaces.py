"""What cuDNN's convolution algorithms take as workspace, by problem size.

Each formula gives, to the byte or to a few hundred, what torch allocated on an H100 (cuDNN 9.19, torch 2.11;
benchmarks/results/gpu_record.json and the allocation histories of its ResNet-50 and U-Net in float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from brimful.quantities import round_up

# N samples, C input channels, K output channels; (R, S) filter, H × W input, P × Q output

WINOGRAD_TILE = 4
"""Rows and columns of outputs that a tile of F(4 × 4, 3 × 3) gives, from 6 × 6 inputs."""
_WINOGRAD_POINT_BYTES = 36 * 4
"""A transformed tile has 6 × 6 float32 numbers (Lavin and Gray 2015, "Fast Algorithms for Convolutional Neural
Networks", section 4.3)."""
FFT_TILE = 32
"""Side of the tiles of FFT_TILING; each transforms to 32 × 17 complex numbers, as the input is real (cuDNN API
reference, CUDNN_CONVOLUTION_FWD_ALGO_FFT_TILING)."""
_COMPLEX_BYTES = 8
_FFT_TILES_AT_ONCE = 2
"""Of each sample: seen with 1, 4, 9 to 81 tiles a sample, none with 2 or 3."""
HALF_STEP = 8
"""Channels that tensor-core kernels of half types need a multiple of; cuDNN pads others in a copy (NVIDIA,
Convolutional Layers User's Guide, "Channels In And Out")."""
_STREAM_K_TILE_BYTES = 128 * 128 * 4
"""What each multiprocessor may keep of an unfinished tile of 128 × 128 float32 sums: of 132 that is 8.25 MiB,
beside which seen were at most 750 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionShape:
    """Sizes of a convolution; of a transposed one, those of the convolution whose input's gradient it is."""

    samples: int
    in_channels: int
    out_channels: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    in_size: tuple[int, ...]
    out_size: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(
        cls, x: Tensor, weight: Tensor, y: Tensor, *, stride: list[int], dilation: list[int], groups: int
    ) -> ConvolutionShape:
        """From input, weight and output, the latter two swapped by the caller where it is transposed."""
        dims = weight.dim() - 2
        return cls(
            samples=x.shape[0],
            in_channels=x.shape[1],
            out_channels=y.shape[1],
            groups=groups,
            kernel=tuple(weight.shape[2:]),
            stride=tuple(stride) * (dims if len(stride) == 1 else 1),
            dilation=tuple(dilation) * (dims if len(dilation) == 1 else 1),
            in_size=tuple(x.shape[2:]),
            out_size=tuple(y.shape[2:]),
            item_bytes=x.element_size(),
        )

    @property
    def is_depthwise(self) -> bool:
        """Whether each input channel has filters of its own."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a matrix product over channels: filters of one element, at every position."""
        return math.prod(self.kernel) == math.prod(self.stride) == 1

    @property
    def is_plain_3x3(self) -> bool:
        """Whether Winograd's algorithm for 3 × 3 filters can run it."""
        return self.kernel == (3, 3) and self.is_dense and self.groups == 1

    @property
    def is_dense(self) -> bool:
        """Whether its filters move by one and have no holes."""
        return math.prod(self.stride) == math.prod(self.dilation) == 1


def channels_last_copies(shape: ConvolutionShape, *, padded_to: int = 1) -> int:
    """Bytes of input, output and weight in channels_last, beside the tensors themselves.

    Args:
        shape: Of the convolution. Its gradients need as much: of one operand and the result the other way.
        padded_to: Multiple to which channels are filled up.

    Returns:
        The bytes of all three.
    """
    ins, outs = (round_up(c, padded_to) for c in (shape.in_channels, shape.out_channels))
    inputs = shape.samples * ins * math.prod(shape.in_size)
    outputs = shape.samples * outs * math.prod(shape.out_size)
    return (inputs + outputs) * shape.item_bytes + _weight_bytes(shape, ins, outs)


def padded_image(shape: ConvolutionShape, step: int) -> int:
    """Bytes of copies of input and weight with the input's channels filled up to a multiple of `step`."""
    ins = round_up(shape.in_channels, step)
    inputs = shape.samples * ins * math.prod(shape.in_size) * shape.item_bytes
    return inputs + _weight_bytes(shape, ins, shape.out_channels)


def winograd_bytes(shape: ConvolutionShape) -> int:
    """Workspace of the weight's gradient by Winograd's algorithm: transformed input, output and weight.

    36 numbers for each tile of 4 × 4 outputs and channel, and for each pair of channels.
    """
    tiles = shape.samples * math.prod(-(-size // WINOGRAD_TILE) for size in shape.out_size)
    channels, pairs = shape.in_channels + shape.out_channels, shape.in_channels * shape.out_channels
    return _WINOGRAD_POINT_BYTES * (tiles * channels + pairs)


def fft_bytes(shape: ConvolutionShape) -> int:
    """Workspace of a forward or an input's gradient by Fourier transforms in float32.

    Where a tile of 16 or 32 holds the whole input with its border, all samples are transformed at once and the
    weight's transform is there twice; else tiles of 32, two of each sample at a time.
    """
    largest = max(o + k - 1 for o, k in zip(shape.out_size, shape.kernel, strict=True))
    channels, pairs = shape.in_channels + shape.out_channels, shape.in_channels * shape.out_channels
    if largest <= FFT_TILE:
        side = max(16, 1 << (largest - 1).bit_length())
        weight_bytes = _weight_bytes(shape, shape.in_channels, shape.out_channels)
        return _transform_bytes(side) * (2 * pairs + shape.samples * channels) + weight_bytes
    at_once = _FFT_TILES_AT_ONCE * shape.samples
    return _transform_bytes(FFT_TILE) * (pairs + at_once * channels)


def stream_k_bytes(sm_count: int) -> int:
    """The most that a kernel keeps of unfinished tiles, one for each multiprocessor."""
    return sm_count * _STREAM_K_TILE_BYTES


def _transform_bytes(side: int) -> int:
    """Bytes of the transform of a real tile."""
    return side * (side // 2 + 1) * _COMPLEX_BYTES


def _weight_bytes(shape: ConvolutionShape, ins: int, outs: int) -> int:
    return outs * -(-ins // shape.groups) * math.prod(shape.kernel) * shape.item_bytes
