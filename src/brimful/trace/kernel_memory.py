"""Memory that CUDA kernels take inside, as functions of the sizes they work on.

Such memory is not affine in the micro-batch as tensors are: it saturates, or sets in above a size. So a trace
keeps what it depends on, and it is computed again for another micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

CUBLAS_WORKSPACE = "cuBLAS workspace"
"""Label of the storage whose size is `Device.cublas_workspace_bytes`, whatever the job."""

# Source of all constants and of the arithmetic below: torch aten/src/ATen/native/cuda/Reduce.cuh,
# setReduceConfig and ReduceConfig. Eight sizes worked out from the header of 2.13 agree, and those measured on
# an H100 (benchmarks/results/gpu_record.json).
_WARP_THREADS = 32
_MOST_THREADS = 512
_LEAST_VALUES_PER_THREAD = 16
_MOST_VALUES_PER_THREAD = 256
_INPUT_VECTOR = 4
_MOST_OUTPUT_VECTOR = 4
_ACCUMULATOR_BYTES = 4
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Parameters that determine the memory of a kernel."""

    name: str
    """One of `KERNELS`."""
    numbers: tuple[int, ...]
    """Number of multiprocessors, maximum threads on each, then sizes and strides, affine in the micro-batch."""

    def size_bytes(self) -> int:
        """Bytes that the kernel takes at these sizes."""
        return KERNELS[self.name](self.numbers)

    @property
    def is_known(self) -> bool:
        """Whether its name is in the table, and it has the numbers that its size is worked out from."""
        try:
            return self.size_bytes() >= 0
        except (KeyError, ValueError):  # a function that takes another number of numbers
            return False

    def on_multiprocessors(self, multiprocessors: int, threads: int) -> Kernel:
        """The kernel on another GPU; its first two numbers are the multiprocessors and their threads."""
        return Kernel(name=self.name, numbers=(multiprocessors, threads, *self.numbers[2:]))

    def scaled(self, other: Kernel, line: Callable[[int, int], int]) -> Kernel:
        """The kernel at another micro-batch, on the line through this one and `other`."""
        numbers = tuple(line(a, b) for a, b in zip(self.numbers, other.numbers, strict=True))
        return Kernel(name=self.name, numbers=numbers)


def reduction_kernels(
    shape: Sequence[int],
    strides: Sequence[int],
    dims: Sequence[int] | None,
    multiprocessors: int,
    threads_per_multiprocessor: int,
    *,
    is_variance: bool = False,
) -> tuple[Kernel, Kernel]:
    """Memory of a reduction's staging and semaphores; of 0 bytes where one block finishes each result.

    `strides` are in elements; `dims` are the dimensions to reduce, None or none for all; `is_variance` is
    whether mean and variance are computed rather than a sum.
    """
    ndim = len(shape)
    reduced = {dim % ndim for dim in dims} if dims else set(range(ndim))
    flags = (int(dim in reduced) for dim in range(ndim))
    numbers = (multiprocessors, threads_per_multiprocessor, *shape, *strides, *flags)
    return (
        Kernel(name="variance staging" if is_variance else "reduction staging", numbers=numbers),
        Kernel(name="reduction semaphores", numbers=numbers),
    )


@cache
def _reduction_buffers_bytes(numbers: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of staging and of semaphores."""
    multiprocessors, threads_per_multiprocessor, *rest = numbers
    ndim = len(rest) // 3
    shape, strides, flags = rest[:ndim], rest[ndim : 2 * ndim], rest[2 * ndim :]
    launch = _Launch.of(shape, strides, {dim for dim in range(ndim) if flags[dim]})
    if launch is None:
        return 0, 0
    resident_blocks = multiprocessors * (threads_per_multiprocessor // (launch.width * launch.height))
    if not launch.splits_block or launch.values_per_thread < _MOST_VALUES_PER_THREAD:
        return 0, 0
    if launch.grid > resident_blocks:
        return 0, 0
    blocks_per_output = max(
        min(
            -(-resident_blocks // launch.grid),
            -(-launch.values_per_thread // _LEAST_VALUES_PER_THREAD),
        ),
        -(-launch.values_per_thread // _MOST_VALUES_PER_THREAD),
    )
    if blocks_per_output <= 1:
        return 0, 0
    staging_bytes = _ACCUMULATOR_BYTES * launch.outputs * blocks_per_output
    if not launch.reduces_across_lanes:
        staging_bytes *= launch.width * launch.output_vector
    return staging_bytes, _SEMAPHORE_BYTES * launch.grid


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """How one block works on a reduction."""

    outputs: int
    width: int
    """Threads of a block along the fastest dimension."""
    height: int
    output_vector: int
    reduces_across_lanes: bool
    """Whether lanes of a warp share a result: they do where the fastest dimension is reduced."""
    splits_block: bool
    """Whether the block's height divides the inputs, rather than the outputs."""
    values_per_thread: int
    grid: int
    """Blocks that the outputs take."""

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], reduced: set[int]) -> _Launch | None:
        """The launch for a tensor; None if there is nothing to add up."""
        ndim = len(shape)
        kept = [dim for dim in range(ndim) if dim not in reduced and shape[dim] > 1]
        reduced = {dim for dim in reduced if shape[dim] > 1}
        if prod(shape) == 0 or not reduced:
            return None
        inputs, outputs = prod(shape[dim] for dim in reduced), prod(shape[dim] for dim in kept)
        fastest_reduced = min(strides[dim] for dim in reduced)
        fastest_kept = min((strides[dim] for dim in kept), default=None)
        across_lanes = fastest_kept is None or fastest_reduced < fastest_kept
        dim0, dim1 = (inputs, outputs) if across_lanes else (outputs, inputs)
        output_vector = 1
        if across_lanes:
            if fastest_reduced == 1 and dim0 > 128 and not kept and _is_contiguous(shape, strides):
                dim0 //= _INPUT_VECTOR
        elif fastest_kept == 1:
            output_vector = _output_vector(shape, strides, min(kept, key=lambda dim: strides[dim]))
            dim0 //= output_vector
        width, height = _block_of(dim0, dim1, _MOST_THREADS // output_vector)
        values_per_thread = -(-inputs // width) if across_lanes else inputs
        splits_block = values_per_thread >= min(height * _LEAST_VALUES_PER_THREAD, _MOST_VALUES_PER_THREAD)
        outputs_per_block = 1 if across_lanes else width
        if splits_block:
            values_per_thread = -(-values_per_thread // height)
        else:
            outputs_per_block *= height
        return cls(
            outputs=outputs,
            width=width,
            height=height,
            output_vector=output_vector,
            reduces_across_lanes=across_lanes,
            splits_block=splits_block,
            values_per_thread=values_per_thread,
            grid=-(-(outputs // output_vector) // outputs_per_block),
        )


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _output_vector(shape: Sequence[int], strides: Sequence[int], fastest: int) -> int:
    """Results that a thread makes at once: the fastest size and all other strides are multiples of it."""
    vector = _MOST_OUTPUT_VECTOR
    others = (stride for dim, stride in enumerate(strides) if dim != fastest)
    for number in (shape[fastest], *others):
        while number % vector:
            vector //= 2
    return vector


def _block_of(dim0: int, dim1: int, most_threads: int) -> tuple[int, int]:
    """Width and height of a block, powers of two."""
    dim0, dim1 = (min(1 << (max(dim, 1).bit_length() - 1), most_threads) for dim in (dim0, dim1))
    width = min(dim0, _WARP_THREADS)
    height = min(dim1, most_threads // width)
    return min(dim0, most_threads // height), height


_SORTED_TOKENS = 3072
"""Most tokens for which an embedding's gradient is summed without sorting. Source: torch
aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda."""
_TOKENS_PER_SUM = 10
"""Source: torch aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, NROWS_PER_THREAD."""


def _embedding_backward_bytes(numbers: tuple[int, ...]) -> int:
    """Temporaries in addition to the gradient while sums of tokens are scattered; see `EmbeddingBackward`."""
    _multiprocessors, _threads, tokens, rows, width, index_bytes, sum_bytes, by_frequency = numbers
    if tokens <= _SORTED_TOKENS and not by_frequency:
        return 0
    runs = min(tokens, rows)
    sums = tokens // _TOKENS_PER_SUM + runs
    indices = (4 if by_frequency else 3) * tokens + 2 * runs + sums
    return indices * index_bytes + sums * width * sum_bytes


_MANY_ROWS = 65536
_ROWS_PER_PART = 32
_COLUMNS_PER_BLOCK = 32
_MOST_PARTS = 32768
"""Source of this and the three constants above: torch aten/src/ATen/native/cuda/layer_norm_kernel.cu,
LaunchGammaBetaBackwardCUDAKernel."""


def _layer_norm_backward_bytes(numbers: tuple[int, ...]) -> int:
    """Parts of the gradient of a weight, where there are many rows and few columns for the GPU."""
    multiprocessors, _threads, rows, columns, element_bytes = numbers
    if rows <= _MANY_ROWS or not columns or columns // _COLUMNS_PER_BLOCK >= multiprocessors // 2:
        return 0
    return _layer_norm_parts(rows, columns) * columns * element_bytes


def _layer_norm_parts(rows: int, columns: int) -> int:
    return min(_MOST_PARTS // -(-columns // _COLUMNS_PER_BLOCK), -(-rows // _ROWS_PER_PART))


def _layer_norm_backward_sums_bytes(numbers: tuple[int, ...]) -> int:
    """Staging of the sum over the parts of one gradient."""
    multiprocessors, threads, rows, columns, _element_bytes = numbers
    if not _layer_norm_backward_bytes(numbers):
        return 0
    parts = _layer_norm_parts(rows, columns)
    return _reduction_buffers_bytes((multiprocessors, threads, parts, columns, columns, 1, 1, 0))[0]


_WELFORD_FLOATS = 4
"""Mean, sum of squares and two counts. Source: torch aten/src/ATen/native/SharedReduceOps.h, WelfordData."""


_LEAST_TRANSFORMED_TILES = 32
"""Fewest tiles, of all samples, for which cuDNN was seen to transform a convolution's weight. Its transform is
made once for all of them: seen with 32 and more, none with 4 to 16 (benchmarks/results/gpu_record.json)."""


def _transforms_bytes(numbers: tuple[int, ...]) -> int:
    """Fourier transforms of input, output and weight of a convolution; see `convolution_workspaces`."""
    _multiprocessors, _threads, samples, tiles, tile_bytes, weights, activations, beside_bytes = numbers
    if samples * tiles < _LEAST_TRANSFORMED_TILES:
        return 0
    return tile_bytes * (weights + activations) + beside_bytes


def _partial_sums_bytes(numbers: tuple[int, ...]) -> int:
    """Tiles of partial sums of a matrix product, and what is there whatever their number.

    Fewer tiles than multiprocessors: each tile is divided among some (split K). More, and the product is
    `continued`: each multiprocessor may keep one that the next completes (segment K, stream K).
    """
    multiprocessors, _threads, tiles, tile_bytes, continued, beside_bytes = numbers
    parts = multiprocessors // max(tiles, 1)
    if parts >= 2:
        return parts * tiles * tile_bytes + beside_bytes
    return (multiprocessors * tile_bytes if continued else 0) + beside_bytes


KERNELS: dict[str, Callable[[tuple[int, ...]], int]] = {
    "reduction staging": lambda numbers: _reduction_buffers_bytes(numbers)[0],
    "reduction semaphores": lambda numbers: _reduction_buffers_bytes(numbers)[1],
    "embedding backward": _embedding_backward_bytes,
    "layer norm backward": _layer_norm_backward_bytes,
    "convolution transforms": _transforms_bytes,
    "convolution partial sums": _partial_sums_bytes,
    "layer norm backward sums": _layer_norm_backward_sums_bytes,
    "variance staging": lambda numbers: _WELFORD_FLOATS * _reduction_buffers_bytes(numbers)[0],
}
"""What a kernel's numbers come to, by its name."""
