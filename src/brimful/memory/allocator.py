"""PyTorch's CUDA caching allocator, simulated: the blocks it hands out and the segments it holds.

The simulation follows one stream. Given the requests of a training step in order, it says how much memory
is allocated (blocks in use), how much is reserved (segments held), when the cache is flushed and when a
request fails.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from brimful.memory.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.memory.pools import (
    MIN_BLOCK_BYTES,
    SMALL_REQUEST_BYTES,
    UNLIMITED_BYTES,
    Block,
    DeviceMemory,
    ExpandablePool,
    SegmentPool,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A request that could not be met, even after the cache was flushed."""

    key: Hashable
    """Name of the requested block."""
    requested_bytes: int
    allocated_bytes: int
    """Bytes in use at the request."""
    reserved_bytes: int
    """Bytes still held after the flush."""
    capacity_bytes: int


def round_allocation(size_bytes: int, *, power2_divisions: int | None = None) -> int:
    """Bytes that the CUDA caching allocator looks for to serve a request of `size_bytes`.

    The block may be larger, where the rest is too small to be cut off.

    Args:
        size_bytes: Requested bytes, at least 1.
        power2_divisions: Steps between powers of two to round to; 0, 1 and None round to 512 bytes only.

    Returns:
        `size_bytes` rounded up to a multiple of 512, or to the step if `size_bytes` is over 512 × divisions.

    Raises:
        ValueError: `size_bytes` is not positive.

    Source: CUDACachingAllocator.cpp, kMinBlockSize, round_size and roundup_power2_next_division.
    """
    if size_bytes < 1:
        raise ValueError(f"size_bytes is {size_bytes}; a block has at least 1 byte.")
    step_bytes = MIN_BLOCK_BYTES
    if (
        power2_divisions is not None
        and power2_divisions > 1
        and size_bytes > MIN_BLOCK_BYTES * power2_divisions
    ):
        power2_floor_bytes = 1 << (size_bytes.bit_length() - 1)
        step_bytes = power2_floor_bytes // power2_divisions
    return -(-size_bytes // step_bytes) * step_bytes


class CachingAllocator:
    """The allocator of one device, empty at first.

    `capacity_bytes` is what it can reserve: the device's memory less the CUDA context and what others hold.
    None is without limit.

    Source: CUDACachingAllocator.cpp, DeviceCachingAllocator.
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULT_ALLOCATOR, capacity_bytes: int | None = None
    ) -> None:
        self.allocated_bytes = 0
        """Bytes in blocks in use: torch.cuda.memory_allocated."""
        self.peak_allocated_bytes = 0
        self.cache_flushes = 0
        """How often all free segments were given back to make room: the counter num_alloc_retries."""
        self._settings = settings
        self._device = DeviceMemory(UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes)
        threshold = settings.garbage_collection_threshold
        self._collect_above_bytes = UNLIMITED_BYTES
        if threshold is not None and capacity_bytes is not None:
            self._collect_above_bytes = int(threshold * capacity_bytes)
        pool = ExpandablePool if settings.expandable_segments else SegmentPool
        max_split_bytes = settings.max_split_size_bytes or UNLIMITED_BYTES
        self._small = pool(self._device, is_small=True, max_split_bytes=max_split_bytes)
        self._large = pool(self._device, is_small=False, max_split_bytes=max_split_bytes)
        self._in_use: dict[Hashable, Block | None] = {}
        self._rounded: dict[int, int] = {}
        """What requests of a size are rounded to; steps ask for few sizes again and again."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes in segments held: torch.cuda.memory_reserved."""
        return self._device.taken_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes ever in segments held."""
        return self._device.peak_taken_bytes

    @property
    def segment_count(self) -> int:
        """Segments held; an expandable pool is one."""
        return self._small.segment_count + self._large.segment_count

    def allocate(self, key: Hashable, size_bytes: int) -> OutOfMemory | None:
        """Hand out a block; returns None, or why there is none.

        `key` names the block, to free it by: it must not be in use, and is not afterwards if there is no block.
        A request of 0 bytes takes no block.
        """
        assert key not in self._in_use, f"{key!r} is in use"
        if size_bytes == 0:
            self._in_use[key] = None
            return None
        wanted_bytes = self._rounded.get(size_bytes)
        if wanted_bytes is None:
            divisions = self._settings.power2_divisions_for(size_bytes)
            wanted_bytes = round_allocation(size_bytes, power2_divisions=divisions)
            self._rounded[size_bytes] = wanted_bytes
        pool = self._small if wanted_bytes <= SMALL_REQUEST_BYTES else self._large
        block = pool.take(wanted_bytes)
        if block is None:
            block = self._obtain(pool, wanted_bytes)
        if block is None:
            return self._out_of_memory(key, size_bytes)
        if block.size_bytes > wanted_bytes:
            pool.cut(block, wanted_bytes)
        block.free = False
        self._in_use[key] = block
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return None

    def free(self, key: Hashable) -> None:
        """Return the block named `key` to the cache; `KeyError` if no block in use has that name."""
        block = self._in_use.pop(key)
        if block is not None:
            self.allocated_bytes -= block.size_bytes
            block.pool.put_back(block)

    def _obtain(self, pool: SegmentPool | ExpandablePool, wanted_bytes: int) -> Block | None:
        """Memory from the device, after giving back some of the cache, then all of it, if there is too little.

        Source: DeviceCachingAllocator::malloc.
        """
        self._collect_garbage()
        block = pool.grow(wanted_bytes)
        if block is None and pool.release_oversize(wanted_bytes):
            block = pool.grow(wanted_bytes)
        if block is None:
            self._flush_cache()
            block = pool.grow(wanted_bytes)
        return block

    def _collect_garbage(self) -> None:
        """Give back large segments long unused if too much is reserved.

        Source: garbage_collect_cached_blocks.
        """
        excess_bytes = self.reserved_bytes - self._collect_above_bytes
        if excess_bytes > 0:
            self._large.release_unused(excess_bytes)

    def _flush_cache(self) -> None:
        """Give back what no block in use needs. Source: release_cached_blocks."""
        self.cache_flushes += 1
        self._large.release()
        self._small.release()

    def _out_of_memory(self, key: Hashable, size_bytes: int) -> OutOfMemory:
        return OutOfMemory(
            key=key,
            requested_bytes=size_bytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=self._device.capacity_bytes,
        )
