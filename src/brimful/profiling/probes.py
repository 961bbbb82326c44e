"""Small pieces of work of each kind that `cost.kinds` knows, for timing them on a torch device.

Results go to memory that is already there, as in a steady step. Each run takes other operands than the one
before, out of a pool larger than most caches: in a step, weights and saved tensors were last touched long ago.

Checked with torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from brimful.cost.kernels import PROBE_CHANNELS, PROBE_SAMPLES
from brimful.execution.precision import matmul_precision
from brimful.settings import Precision

aten = torch.ops.aten

Run = Callable[[], object]


class Pool:
    """Memory for operands, handed out piece after piece, from the start again when it is used up.

    Operands take `size_bytes` and are uniform between 0 and 1; there is as much again for results.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, size_bytes: int) -> None:
        self.device = device
        self.dtype = dtype
        self.taken = 0
        """Numbers handed out so far."""
        self.numbers = size_bytes // dtype.itemsize
        drawn = torch.rand(min(self.numbers, _DRAWN_NUMBERS), device=device).to(dtype)
        self._operands = drawn.repeat(-(-self.numbers // len(drawn)))[: self.numbers]
        self._results = torch.zeros(self.numbers, device=device, dtype=dtype)

    def operand(self, *shape: int) -> Tensor:
        """A tensor of random numbers, to be read only."""
        return self._piece(self._operands, shape)

    def result(self, *shape: int) -> Tensor:
        """A tensor to write to."""
        return self._piece(self._results, shape)

    def _piece(self, memory: Tensor, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        start = self.taken % self.numbers
        if start + count > self.numbers:
            start = 0
        self.taken += -(-count // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS
        if count > self.numbers:  # larger than any cache
            return memory.new_empty(shape).fill_(0.5)
        return memory[start : start + count].view(shape)


_DRAWN_NUMBERS = 1 << 24
"""A pool repeats these random numbers: drawing takes a second for 2**28 on one thread."""

_ALIGNED_NUMBERS = 64
"""Pieces begin at multiples of these, as torch's own tensors begin at multiples of 64 bytes."""

Make = Callable[[int, Pool], tuple[Run, int]]
"""A function from a size to the work to be timed and its amount."""

# s the size of a probe; B samples, C channels, H height and width, T tokens, D width of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Work of one kind at several sizes."""

    kind: str
    make: Make
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    rounds_to_tf32: bool = False
    """Whether float32 products may, for as long as it is timed."""

    def mode(self) -> AbstractContextManager[None]:
        """How torch is set while the probe runs."""
        return matmul_precision(Precision.TF32 if self.rounds_to_tf32 else Precision.FP32)


_ELEMENTS = tuple(4**i for i in range(3, 12))
"""64 elements to 4 M: 256 B to 16 MiB of float32, from a launch to beyond most caches."""
_FEW_ELEMENTS = tuple(4**i for i in range(3, 11))
"""Up to 1 M elements, for work that a cache hardly speeds up."""
_ELEMENTS_ON_GPU = tuple(4**i for i in range(3, 14))
"""Up to 64 M elements, 256 MiB of float32: an H100 works on 4 M for less time than it takes to launch, in its
cache."""
_MATMUL_SIZES = (16, 32, 64, 128, 256, 512, 1024)
_MATMUL_SIZES_ON_GPU = (*_MATMUL_SIZES, 2048, 4096)
_SIDES = (2, 4, 8, 16, 32, 64)
_CHANNELS = (16, 32, 64, 128, 256, 512)
_ATTENTION_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_ATTENTION_SIZES_ON_GPU = (*_ATTENTION_SIZES, 1024, 2048, 4096)
_RECURRENT_SIZES = (16, 32, 64, 128, 256)


def probes(device: torch.device) -> Iterator[Probe]:
    """All probes of a device, with products in each type that training is done in."""
    is_cpu = device.type == "cpu"
    products = _MATMUL_SIZES if is_cpu else _MATMUL_SIZES_ON_GPU
    attended = _ATTENTION_SIZES if is_cpu else _ATTENTION_SIZES_ON_GPU
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        yield Probe(kind=f"matmul:{name}", make=_matmul, sizes=products, dtype=dtype)
        if not is_cpu or dtype is torch.float32:
            yield Probe(kind=f"convolution:{name}", make=_convolution, sizes=_SIDES, dtype=dtype)
            yield Probe(kind=f"attention:{name}", make=_attention, sizes=attended, dtype=dtype)
    if is_cpu:
        yield Probe(kind="matmul:float64", make=_matmul, sizes=products, dtype=torch.float64)
    else:
        yield Probe(kind="matmul:tf32", make=_matmul, sizes=products, rounds_to_tf32=True)
    if is_cpu:
        yield Probe(kind="weight_gradient", make=_weight_gradient, sizes=_CHANNELS)
        yield Probe(kind="depthwise:float32", make=_depthwise, sizes=_SIDES)
        yield Probe(kind="im2col:float32", make=_im2col, sizes=_SIDES)
        yield Probe(kind="recurrent:float32", make=_lstm, sizes=_RECURRENT_SIZES)
    for kind, make in _BY_BYTES.items():
        on_cpu = _ELEMENTS if kind in ("elementwise", "copy", "reduction") else _FEW_ELEMENTS
        yield Probe(kind=kind, make=make, sizes=on_cpu if is_cpu else _ELEMENTS_ON_GPU)


def _matmul(size: int, pool: Pool) -> tuple[Run, int]:
    """A linear layer of a transformer: (s, s) times the transpose of (4s, s)."""
    x, weight, out = pool.operand(size, size), pool.operand(4 * size, size), pool.result(size, 4 * size)
    return partial(torch.mm, x, weight.t(), out=out), 2 * size * size * 4 * size


_CONVOLVED = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
"""Stride, padding, dilation, whether transposed, output padding, groups."""


def _convolution(side: int, pool: Pool) -> tuple[Run, int]:
    """3 × 3 convolution from C channels to C on a (B, C, s, s) image, and its backward: thrice forward's FLOPs.

    On a GPU it is contiguous. On a CPU it is channels_last, which oneDNN computes without copies to and from a
    layout of its own.
    """
    samples, channels = (2, 64) if pool.device.type == "cpu" else (PROBE_SAMPLES, PROBE_CHANNELS)
    return _convolved(side, pool, samples, channels, 1)


def _depthwise(side: int, pool: Pool) -> tuple[Run, int]:
    """3 × 3 convolution of 64 channels by themselves, channels_last as `_convolution`."""
    return _convolved(side, pool, 2, 64, 64)


def _im2col(side: int, pool: Pool) -> tuple[Run, int]:
    """Dilated convolution of 64 channels by themselves, for which oneDNN has no kernel of its own."""
    return _convolved(side, pool, 2, 64, 64, dilation=2)


def _convolved(
    side: int, pool: Pool, samples: int, channels: int, groups: int, dilation: int = 1
) -> tuple[Run, int]:
    layout = torch.channels_last if pool.device.type == "cpu" and dilation == 1 else torch.contiguous_format
    x, gradient, weight = (
        pool.operand(*shape).contiguous(memory_format=layout)
        for shape in (
            (samples, channels, side, side),
            (samples, channels, side, side),
            (channels, channels // groups, 3, 3),
        )
    )
    how = ([1, 1], [dilation] * 2, [dilation] * 2, False, [0, 0], groups)

    def run() -> None:
        aten.convolution(x, weight, None, *how)
        aten.convolution_backward(gradient, x, weight, None, *how, [True, True, False])

    return run, 3 * 2 * samples * side * side * 9 * channels * channels // groups


def _weight_gradient(channels: int, pool: Pool) -> tuple[Run, int]:
    """A gradient of 3 × 3 weights (C, C, 3, 3) from images of 2 × 2, so that hardly anything is computed."""
    x, weight = pool.operand(1, channels, 2, 2), pool.operand(channels, channels, 3, 3)
    arguments = (x, x, weight, None, *_CONVOLVED, [False, True, False])
    return partial(aten.convolution_backward, *arguments), weight.numel() * weight.element_size()


def _attention(size: int, pool: Pool) -> tuple[Run, int]:
    """Fused attention of 8 sequences with 8 heads of 64; sizes below 8 are the heads of one of 8 tokens."""
    samples, heads, tokens = (1, size, 8) if size < 8 else (8, 8, size)
    query, key, value = (pool.operand(samples, heads, tokens, 64) for _ in range(3))  # (B, heads, T, D)
    return partial(F.scaled_dot_product_attention, query, key, value), 4 * samples * heads * tokens**2 * 64


def _lstm(size: int, pool: Pool) -> tuple[Run, int]:
    """One LSTM layer over 32 tokens of 32 sequences, forward."""
    lstm = torch.nn.LSTM(size, size, device=pool.device)
    return partial(lstm, pool.operand(32, 32, size)), 2 * 32 * 32 * (2 * 4 * size * size)


def _rows(size: int, pool: Pool) -> Tensor:
    """A tensor of `size` elements in rows of at most 512."""
    width = min(size, 512)
    return pool.operand(size // width, width)


def _image(size: int, pool: Pool) -> Tensor:
    """A few samples (B, C, 8, W) of `size` elements in all, at most 256 channels on a GPU.

    A GPU's kernels take channels in parallel: thousands of them, each of few pixels, would be slower than any
    layer's.
    """
    if pool.device.type == "cpu":
        samples = 4 if size >= 1024 else 1
        return pool.operand(samples, size // samples // 64, 8, 8)
    samples = 32 if size >= 32 * 512 else 1
    channels = min(size // samples // 64, 256)
    return pool.operand(samples, channels, 8, size // samples // channels // 8)


def _elementwise(size: int, pool: Pool) -> tuple[Run, int]:
    return partial(torch.mul, pool.operand(size), pool.operand(size), out=pool.result(size)), 12 * size


def _unary(function: Callable[..., Any]) -> Make:
    def make(size: int, pool: Pool) -> tuple[Run, int]:
        return partial(function, pool.operand(size), out=pool.result(size)), 8 * size

    return make


def _random(size: int, pool: Pool) -> tuple[Run, int]:
    """Dropout's part that draws: a mask on a CPU; on CUDA all of it, with a mask of one byte an element."""
    if pool.device.type == "cpu":
        return partial(pool.result(size).bernoulli_, 0.9), 4 * size
    return partial(torch.native_dropout, pool.operand(size), 0.1, True), 9 * size


def _softmax(size: int, pool: Pool) -> tuple[Run, int]:
    x = _rows(size, pool)
    return partial(aten._softmax.out, x, -1, False, out=pool.result(*x.shape)), 8 * size


def _normalization(size: int, pool: Pool) -> tuple[Run, int]:
    x = _rows(size, pool)
    scale = pool.operand(x.shape[1])
    return partial(F.layer_norm, x, x.shape[1:], scale, scale), 8 * size


def _batch_norm(size: int, pool: Pool) -> tuple[Run, int]:
    x = _image(size, pool)
    scale = pool.operand(x.shape[1])
    return partial(aten.native_batch_norm, x, scale, scale, None, None, True, 0.1, 1e-5), 8 * size


def _batch_norm_backward(size: int, pool: Pool) -> tuple[Run, int]:
    x, gradient = _image(size, pool), _image(size, pool)
    scale = pool.operand(x.shape[1])
    arguments = (gradient, x, scale, None, None, scale, scale, True, 1e-5, [True, True, True])
    return partial(aten.native_batch_norm_backward, *arguments), 12 * size


def _reduction(size: int, pool: Pool) -> tuple[Run, int]:
    return partial(torch.sum, _rows(size, pool), 0), 4 * size


def _pooling(size: int, pool: Pool) -> tuple[Run, int]:
    """Max pooling that halves both sides; indices are of 8 bytes."""
    return partial(aten.max_pool2d_with_indices, _image(size, pool), [2, 2], [2, 2]), 4 * size + 3 * size


def _selection(size: int, pool: Pool) -> tuple[Run, int]:
    x, y, out = pool.operand(size), pool.operand(size), pool.result(size)
    return partial(torch.where, x > 0.5, x, y, out=out), 13 * size


_TABLE_ROWS = 4096


def _gather(size: int, pool: Pool) -> tuple[Run, int]:
    """Rows gathered from a table."""
    width = min(size, 256)
    rows = torch.randint(0, _TABLE_ROWS, (size // width,), device=pool.device)
    return partial(aten.embedding, pool.operand(_TABLE_ROWS, width), rows), 8 * size + 8 * (size // width)


def _scatter(size: int, pool: Pool) -> tuple[Run, int]:
    """Rows added to those of a table."""
    width = min(size, 256)
    rows = torch.randint(0, _TABLE_ROWS, (size // width,), device=pool.device)
    added, table = pool.operand(size // width, width), pool.result(_TABLE_ROWS, width)
    return partial(table.index_put_, (rows,), added, accumulate=True), 12 * size + 8 * (size // width)


def _copy(size: int, pool: Pool) -> tuple[Run, int]:
    """Heads put before tokens: (B, T, heads, D) to (B, heads, T, D)."""
    heads, width = (8, 32) if size >= 1024 else (2, 4)
    x = pool.operand(1, size // heads // width, heads, width).transpose(1, 2)
    return partial(pool.result(*x.shape).copy_, x), 8 * size


_BY_BYTES: dict[str, Make] = {
    "elementwise": _elementwise,
    "exponential": _unary(torch.exp),
    "tanh": _unary(torch.tanh),
    "activation": _unary(aten.gelu.out),
    "random": _random,
    "softmax": _softmax,
    "normalization": _normalization,
    "batch_norm": _batch_norm,
    "batch_norm_backward": _batch_norm_backward,
    "reduction": _reduction,
    "pooling": _pooling,
    "selection": _selection,
    "gather": _gather,
    "scatter": _scatter,
    "copy": _copy,
}
