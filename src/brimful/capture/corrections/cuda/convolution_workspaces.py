"""Workspaces of cuDNN's convolution algorithms, by problem size.

Each formula gives, to the byte or to a few hundred, what torch allocated on an H100 (cuDNN 9.19, torch 2.11;
benchmarks/results/gpu_record.json and the allocation histories of its ResNet-50 and U-Net in float32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from brimful.trace import Kernel
from brimful.utils.quantities import round_up

_ALIGNMENT_BYTES = 16
"""Bytes beside copies, whatever their size; likely so that their address can be a multiple of it."""
_FLOAT_BYTES = 4
_COMPLEX_BYTES = 8
_WINOGRAD_OUTPUTS = 4
"""Rows and columns of outputs that a tile of F(4 × 4, 3 × 3) gives."""
_WINOGRAD_POINTS = 36
"""Numbers in a transformed tile, whose inputs are 6 × 6 (Lavin and Gray 2015, "Fast Algorithms for
Convolutional Neural Networks", section 4.3)."""
_FFT_SIDES = (16, 32)
"""Sides of the tiles of a forward. A real tile transforms to half as many columns, and one more, of complex
numbers."""
_FFT_TILES_AT_ONCE = 2
"""Tiles of each sample in an input's gradient: two of 4, 9, 25 and 81 tiles of a sample; the only one of 1."""
_PRODUCTS_PER_POINT = 4
"""Multiplications of two complex numbers."""


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
        """The sizes of a convolution of `x` to `y`."""
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
        """Whether this is a matrix product over channels: filters of one element, at every position."""
        return math.prod(self.kernel) == math.prod(self.stride) == 1

    @property
    def is_plain_3x3(self) -> bool:
        """Whether transforms of tiles can run this: filters of 3 × 3 that move by one, in one group."""
        moves_by_one = math.prod(self.stride) == math.prod(self.dilation) == 1
        return self.kernel == (3, 3) and moves_by_one and self.groups == 1

    @property
    def fewest_channels(self) -> int:
        """The fewer of input and output channels."""
        return min(self.in_channels, self.out_channels)

    def input_bytes(self, padded_to: int = 1) -> int:
        """Bytes of the input with its channels filled up to a multiple."""
        channels = round_up(self.in_channels, padded_to)
        return self.samples * channels * math.prod(self.in_size) * self.item_bytes

    def output_bytes(self, padded_to: int = 1) -> int:
        """Bytes of the output with its channels filled up to a multiple."""
        channels = round_up(self.out_channels, padded_to)
        return self.samples * channels * math.prod(self.out_size) * self.item_bytes

    def weight_bytes(self, padded_to: int = 1) -> int:
        """Bytes of the weight with its input channels filled up to a multiple."""
        ins = round_up(self.in_channels, padded_to) // self.groups
        return self.out_channels * ins * math.prod(self.kernel) * self.item_bytes

    @property
    def weight_share(self) -> float:
        """Size of the weight relative to that of input and output of one sample."""
        return self.weight_bytes() * self.samples / (self.input_bytes() + self.output_bytes())


def copied_bytes(shape: ConvolutionShape, *, padded_to: int = 1) -> int:
    """Bytes of copies of input, output and weight in another layout, channels filled up to a multiple.

    The gradients need as much: two of the three are operands, the other the result. A weight of 1 × 1 is the
    same in both layouts.
    """
    weight_bytes = 0 if math.prod(shape.kernel) == 1 else shape.weight_bytes(padded_to)
    return shape.input_bytes(padded_to) + shape.output_bytes(padded_to) + weight_bytes + _ALIGNMENT_BYTES


def padded_image_bytes(shape: ConvolutionShape, padded_to: int) -> int:
    """Bytes of copies of input and weight with the input's channels filled up to a multiple."""
    return shape.input_bytes(padded_to) + shape.weight_bytes(padded_to) + _ALIGNMENT_BYTES


def winograd_bytes(shape: ConvolutionShape) -> int:
    """Workspace of the weight's gradient by Winograd's algorithm: input, output and weight, transformed."""
    tiles = shape.samples * math.prod(-(-size // _WINOGRAD_OUTPUTS) for size in shape.out_size)
    channels, pairs = shape.in_channels + shape.out_channels, shape.in_channels * shape.out_channels
    return _WINOGRAD_POINTS * _FLOAT_BYTES * (tiles * channels + pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transforms:
    """Fourier transforms of the tiles of a forward or of an input's gradient, in float32.

    A forward has one tile that holds the whole input with its border, and the weight's transform twice. An
    input's gradient has tiles of 32, of which two of each sample are there at a time (cuDNN's FFT and
    FFT_TILING).
    """

    shape: ConvolutionShape
    is_forward: bool
    side: int
    tiles: int
    """Tiles of one sample."""

    @classmethod
    def of(cls, shape: ConvolutionShape, *, is_forward: bool) -> Transforms | None:
        """The transforms; None where a forward has no tile large enough."""
        border = max(shape.kernel) - 1
        largest = max(shape.out_size) + border
        fitting = [side for side in _FFT_SIDES if largest <= side]
        if is_forward:
            return cls(shape=shape, is_forward=True, side=fitting[0], tiles=1) if fitting else None
        side = _FFT_SIDES[-1]
        tiles = 1 if fitting else math.prod(-(-size // (side - border)) for size in shape.out_size)
        return cls(shape=shape, is_forward=False, side=side, tiles=tiles)

    @property
    def gain(self) -> float:
        """How many times fewer multiplications transforms need than the sum that defines a convolution."""
        points = self.tiles * self.side * (self.side // 2 + 1) * _PRODUCTS_PER_POINT
        return math.prod(self.shape.out_size) * math.prod(self.shape.kernel) / points

    def size_bytes(self, beside_bytes: int) -> int:
        """Bytes of the transforms and of what is there beside them."""
        _samples, _tiles, tile_bytes, weights, activations, beside_bytes = self._numbers(beside_bytes)
        return tile_bytes * (weights + activations) + beside_bytes

    def kernel(self, beside_bytes: int) -> Kernel:
        """The transforms as a `Kernel`, of 0 bytes where too few tiles make the weight's transform pay."""
        return Kernel(name="convolution transforms", numbers=(0, 0, *self._numbers(beside_bytes)))

    def _numbers(self, beside_bytes: int) -> tuple[int, int, int, int, int, int]:
        shape = self.shape
        tile_bytes = self.side * (self.side // 2 + 1) * _COMPLEX_BYTES
        weights = shape.in_channels * shape.out_channels
        if self.is_forward:
            weights, beside_bytes = 2 * weights, beside_bytes + shape.weight_bytes()
        at_once = shape.samples * min(self.tiles, _FFT_TILES_AT_ONCE)
        activations = at_once * (shape.in_channels + shape.out_channels)
        return shape.samples, self.tiles, tile_bytes, weights, activations, beside_bytes


def partial_sums(shape: ConvolutionShape, multiprocessors: int, beside_bytes: int) -> Kernel:
    """Workspace of a weight's gradient on tensor cores, whose sum over samples and positions is divided.

    Tiles are 128 × 128 float32, or 64 × 64 for a smaller weight. Kernels of four-byte types continue tiles of
    each other (segment K: 21 of 29 of a ResNet-50 in TF32 on an H100), most of half types do not (8 of 22).
    """
    rows = -(-shape.in_channels // shape.groups) * math.prod(shape.kernel)
    columns = shape.out_channels // shape.groups
    side = 128 if min(rows, columns) >= 128 else 64
    tiles = shape.groups * -(-rows // side) * -(-columns // side)
    numbers = (multiprocessors, 0, tiles, side * side * _FLOAT_BYTES, int(shape.item_bytes == 4), beside_bytes)
    return Kernel(name="convolution partial sums", numbers=numbers)
