"""Sums over rows on CUDA stage their partial results, about 1 MiB for each multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from brimful.capture.corrections.base import Rule

aten = torch.ops.aten

_REDUCTIONS = frozenset(
    {aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.linalg_vector_norm.default}
)
"""They add up in float32. The bias gradient of every Linear is a `sum.dim_IntList` over all rows."""

# Source of all constants and of the arithmetic below: torch aten/src/ATen/native/cuda/Reduce.cuh,
# setReduceConfig and ReduceConfig. Eight sizes worked out from the header of 2.13 agree; no GPU was asked yet.
_WARP_THREADS = 32
_MOST_THREADS = 512
_LEAST_VALUES_PER_THREAD = 16
_MOST_VALUES_PER_THREAD = 256
_INPUT_VECTOR = 4
_MOST_OUTPUT_VECTOR = 4
_ACCUMULATOR_BYTES = 4
_SEMAPHORE_BYTES = 4
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""By compute capability; 2048 elsewhere. Source: CUDA C programming guide, technical specifications."""


class ReductionStaging(Rule):
    """Count the staging and the semaphores of a reduction that several blocks share."""

    name = "reduction_staging"
    source = "torch aten/src/ATen/native/cuda/Reduce.cuh, global_memory_size (header of 2.13; not measured)"
    watches_ops = True

    def after_op(self, recorder: Any, func: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        """Add what the op takes beside its result."""
        if func not in _REDUCTIONS or self.target.sm_count is None or self.target.compute_capability is None:
            return
        x = args[0]
        dims = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else None
        threads = _THREADS_PER_MULTIPROCESSOR.get(self.target.compute_capability, 2048)
        for size_bytes in reduction_buffers_bytes(x, dims, self.target.sm_count, threads):
            recorder.add_temporary(size_bytes, f"inside {func}")
            self.count(size_bytes)


def reduction_buffers_bytes(
    x: Tensor, dims: list[int] | tuple[int, ...] | None, multiprocessors: int, threads_per_multiprocessor: int
) -> tuple[int, ...]:
    """What a reduction of `x` over `dims` allocates beside its result.

    Args:
        x: Of any strides.
        dims: Those added up; None or none means all.
        multiprocessors: Of the GPU.
        threads_per_multiprocessor: The most resident at once.

    Returns:
        Bytes of staging and of semaphores, or nothing where one block finishes each result.
    """
    launch = _Launch.of(x, dims)
    if launch is None:
        return ()
    resident_blocks = multiprocessors * (threads_per_multiprocessor // (launch.width * launch.height))
    if not launch.splits_block or launch.values_per_thread < _MOST_VALUES_PER_THREAD:
        return ()
    if launch.grid > resident_blocks:
        return ()
    blocks_per_output = max(
        min(
            -(-resident_blocks // launch.grid),
            -(-launch.values_per_thread // _LEAST_VALUES_PER_THREAD),
        ),
        -(-launch.values_per_thread // _MOST_VALUES_PER_THREAD),
    )
    if blocks_per_output <= 1:
        return ()
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
    def of(cls, x: Tensor, dims: list[int] | tuple[int, ...] | None) -> _Launch | None:
        """The launch for a tensor; None if there is nothing to add up."""
        reduced = {dim % x.ndim for dim in dims} if dims else set(range(x.ndim))
        sizes, strides = x.shape, x.stride()
        kept = [dim for dim in range(x.ndim) if dim not in reduced and sizes[dim] > 1]
        reduced = {dim for dim in reduced if sizes[dim] > 1}
        if x.numel() == 0 or not reduced:
            return None
        inputs, outputs = prod(sizes[dim] for dim in reduced), prod(sizes[dim] for dim in kept)
        fastest_reduced = min(strides[dim] for dim in reduced)
        fastest_kept = min((strides[dim] for dim in kept), default=None)
        across_lanes = fastest_kept is None or fastest_reduced < fastest_kept
        dim0, dim1 = (inputs, outputs) if across_lanes else (outputs, inputs)
        output_vector = 1
        if across_lanes:
            if fastest_reduced == 1 and dim0 > 128 and not kept and x.is_contiguous():
                dim0 //= _INPUT_VECTOR
        elif fastest_kept == 1:
            output_vector = _output_vector(x, min(kept, key=lambda dim: strides[dim]))
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


def _output_vector(x: Tensor, fastest: int) -> int:
    """Results that a thread makes at once: the fastest size and all other strides are multiples of it."""
    vector = _MOST_OUTPUT_VECTOR
    for number in (x.shape[fastest], *(x.stride(dim) for dim in range(x.ndim) if dim != fastest)):
        while number % vector:
            vector //= 2
    return vector


def _block_of(dim0: int, dim1: int, most_threads: int) -> tuple[int, int]:
    """Width and height of a block, powers of two."""
    dim0, dim1 = (min(1 << (max(dim, 1).bit_length() - 1), most_threads) for dim in (dim0, dim1))
    width = min(dim0, _WARP_THREADS)
    height = min(dim1, most_threads // width)
    return min(dim0, most_threads // height), height
