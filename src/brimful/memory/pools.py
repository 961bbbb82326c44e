"""Blocks of device memory and the two kinds of pool that keep them, as PyTorch's CUDA allocator does.

A pool obtains memory from the device in segments, cuts blocks off them, and merges a returned block with
its free neighbours. `SegmentPool` asks the device for one fixed segment after another; `ExpandablePool` has a
single segment and maps pages at its end, or into its holes.

The rules are those of c10/cuda/CUDACachingAllocator.cpp for one stream, read at commit 001074d (before torch
2.5) and compared with a copy from torch 2.10 or later; each function names the one it follows. The constants
were checked in torch 2.13, c10/core/AllocatorConfig.h.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from bisect import bisect_left, insort

from brimful.utils.quantities import MIB, round_up

MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this. Source: kMinBlockSize."""
SMALL_REQUEST_BYTES = 1 * MIB
"""Largest request of the small pool; also, the large pool keeps a rest up to this uncut. Source: kSmallSize."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segment, or page, of the small pool. Source: kSmallBuffer."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segment that large requests share, and page of the expandable large pool. Source: kLargeBuffer."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from here on get a segment of their own size. Source: kMinLargeAlloc."""
SEGMENT_ROUNDING_BYTES = 2 * MIB
"""A segment of its own size is a multiple of this. Source: kRoundLarge."""
UNLIMITED_BYTES = sys.maxsize
"""Stands for no limit, as `std::numeric_limits<size_t>::max()` does in the source."""

_ADDRESS_SPACE_BYTES = 1 << 50
"""Addresses of an expandable pool; segments lie below.

PyTorch takes 9/8 of the device's memory and starts a second segment where they run out; that is not modelled.
"""

_ADDRESS_BITS = 60
"""Bits of the address in a free block's place in the order of its pool, where they stand below its size. One
number is compared and kept at half the cost of a pair; addresses are below 2**60, as no device has a thousandth
of that."""
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


class DeviceMemory:
    """Memory that all pools take from, with a limit on what can be taken at one time."""

    __slots__ = ("capacity_bytes", "peak_taken_bytes", "taken_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.taken_bytes = 0
        self.peak_taken_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Take `size_bytes` if that much is left; say whether it was."""
        if self.taken_bytes + size_bytes > self.capacity_bytes:
            return False
        self.taken_bytes += size_bytes
        self.peak_taken_bytes = max(self.peak_taken_bytes, self.taken_bytes)
        return True

    def give_back(self, size_bytes: int) -> None:
        """Return what was taken."""
        self.taken_bytes -= size_bytes


class Block:
    """A run of addresses in one pool: in use, free, or not mapped to memory."""

    __slots__ = ("address", "cached_at", "free", "mapped", "next", "pool", "previous", "size_bytes")

    def __init__(self, pool: Pool, address: int, size_bytes: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        """Offset in the pool; later segments lie below earlier ones."""
        self.size_bytes = size_bytes
        self.mapped = mapped
        """Backed by memory; False only for the unused addresses of an expandable pool."""
        self.free = True
        self.cached_at = 0
        """Searches made in the pool before the block came into its cache. Source: gc_count_base."""
        self.previous: Block | None = None
        """Neighbour in the same segment, at lower addresses."""
        self.next: Block | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether no other block shares its segment."""
        return self.previous is None and self.next is None

    def absorb(self, neighbour: Block) -> None:
        """Take over the addresses of a neighbour."""
        if neighbour is self.previous:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if neighbour.previous is not None:
                neighbour.previous.next = self
        else:
            self.next = neighbour.next
            if neighbour.next is not None:
                neighbour.next.previous = self
        self.size_bytes += neighbour.size_bytes

    def insert_after(self, block: Block) -> None:
        """Become the upper neighbour of `block`."""
        self.previous, self.next = block, block.next
        if block.next is not None:
            block.next.previous = self
        block.next = self


class Pool(ABC):
    """The free blocks for small requests, up to `SMALL_REQUEST_BYTES`, or those for large ones.

    Memory comes from `device`. Blocks from `max_split_bytes` on are neither cut nor given to smaller requests.
    """

    def __init__(self, device: DeviceMemory, *, is_small: bool, max_split_bytes: int = UNLIMITED_BYTES) -> None:
        self._device = device
        self._is_small = is_small
        self._max_split_bytes = max_split_bytes
        self._order: list[int] = []  # of each free block size << _ADDRESS_BITS | address, sorted
        self._free: dict[int, Block] = {}  # the free blocks by address
        self._searches = 0  # the clock by which cached blocks age: get_free_blocks_call_count

    @property
    def free_blocks(self) -> tuple[Block, ...]:
        """The free blocks, smallest first, then lowest address first."""
        return tuple(self._free[place & _ADDRESS_MASK] for place in self._order)

    @property
    @abstractmethod
    def segment_count(self) -> int:
        """Segments held."""

    @abstractmethod
    def grow(self, wanted_bytes: int) -> Block | None:
        """Take memory from the device for a block of at least `wanted_bytes`; None if there is too little."""

    @abstractmethod
    def release(self) -> None:
        """Give back to the device what no block in use needs. Source: release_blocks."""

    @abstractmethod
    def release_oversize(self, wanted_bytes: int) -> bool:
        """Give back uncuttable blocks to make room for `wanted_bytes`; say whether enough were found."""

    @abstractmethod
    def release_unused(self, target_bytes: int) -> None:
        """Give back what was not used for long, until `target_bytes` are given back or nothing is left."""

    def take(self, wanted_bytes: int) -> Block | None:
        """Remove the best free block for a request from the pool: the smallest, then the lowest.

        Source: get_free_block.
        """
        self._searches += 1
        index = self._best_fit(wanted_bytes)
        if index == len(self._order):
            return None
        block = self._free[self._order[index] & _ADDRESS_MASK]
        limit_bytes = self._max_split_bytes
        if limit_bytes != UNLIMITED_BYTES and not _may_serve(block.size_bytes, wanted_bytes, limit_bytes):
            return None
        del self._order[index], self._free[block.address]
        return block

    def cut(self, block: Block, wanted_bytes: int) -> None:
        """Leave `wanted_bytes` in `block` and free the rest, if the rest is large enough to be kept apart."""
        rest_bytes = block.size_bytes - wanted_bytes
        if not self._is_cut(wanted_bytes, rest_bytes):
            return
        rest = Block(self, block.address + wanted_bytes, rest_bytes)
        rest.insert_after(block)
        block.size_bytes = wanted_bytes
        self._insert(rest)

    def put_back(self, block: Block) -> None:
        """Free `block`, in no list itself, and merge it with its free neighbours.

        Source: free_block and try_merge_blocks.
        """
        block.free = True
        below, above = block.previous, block.next
        if below is not None and below.free and below.mapped == block.mapped:
            self._remove(below)
            block.absorb(below)
        if above is not None and above.free and above.mapped == block.mapped:
            self._remove(above)
            block.absorb(above)
        self._insert(block)

    def _best_fit(self, wanted_bytes: int) -> int:
        """Position in `_order` of the block that fits best; its length if none does."""
        return bisect_left(self._order, wanted_bytes << _ADDRESS_BITS)

    def _is_cut(self, wanted_bytes: int, rest_bytes: int) -> bool:
        """Whether a block is cut for a request. Source: should_split."""
        if self._is_small:
            return rest_bytes >= MIN_BLOCK_BYTES
        return wanted_bytes < self._max_split_bytes and rest_bytes > SMALL_REQUEST_BYTES

    def _insert(self, block: Block) -> None:
        block.cached_at = self._searches
        insort(self._order, block.size_bytes << _ADDRESS_BITS | block.address)
        self._free[block.address] = block

    def _remove(self, block: Block) -> None:
        del self._order[bisect_left(self._order, block.size_bytes << _ADDRESS_BITS | block.address)]
        del self._free[block.address]


def _may_serve(size_bytes: int, wanted_bytes: int, max_split_bytes: int) -> bool:
    """Whether a block is not too large: max_split_size and max_non_split_rounding_size."""
    if wanted_bytes < max_split_bytes:
        return size_bytes < max_split_bytes
    return size_bytes < wanted_bytes + LARGE_SEGMENT_BYTES


class SegmentPool(Pool):
    """A pool of segments, each one cudaMalloc of a fixed size.

    Each lies below those obtained before. Among free blocks of one size the lowest is taken, so this decides
    which segment is cut. Six histories of an H100 (tests/helpers/gpu_allocations) are reproduced segment by
    segment; with rising addresses one of them is not.
    """

    def __init__(self, device: DeviceMemory, *, is_small: bool, max_split_bytes: int = UNLIMITED_BYTES) -> None:
        super().__init__(device, is_small=is_small, max_split_bytes=max_split_bytes)
        self._segment_count = 0
        self._lowest_address = _ADDRESS_SPACE_BYTES

    @property
    def segment_count(self) -> int:
        """Segments held."""
        return self._segment_count

    def grow(self, wanted_bytes: int) -> Block | None:
        """A new segment as one block; None if the device has too little left. Source: alloc_block."""
        size_bytes = self._segment_bytes(wanted_bytes)
        if not self._device.take(size_bytes):
            return None
        self._lowest_address -= size_bytes
        block = Block(self, self._lowest_address, size_bytes)
        self._segment_count += 1
        return block

    def release(self) -> None:
        """Give back every segment that is free as a whole."""
        for block in self.free_blocks:
            if block.is_whole_segment:
                self._release_segment(block)

    def release_oversize(self, wanted_bytes: int) -> bool:
        """Give back uncuttable segments, the best fit or else the largest ones, until `wanted_bytes` are free.

        Source: release_available_cached_blocks, which does nothing while every block may be cut.
        """
        if self._max_split_bytes == UNLIMITED_BYTES:
            return False
        missing_bytes = max(wanted_bytes, self._max_split_bytes)
        index = self._best_fit(missing_bytes)
        if index < len(self._order):
            self._release_segment(self.free_blocks[index])
            return True
        for block in reversed(self.free_blocks):
            if missing_bytes <= 0 or block.size_bytes < self._max_split_bytes:
                break
            self._release_segment(block)
            missing_bytes -= block.size_bytes
        return missing_bytes <= 0

    def release_unused(self, target_bytes: int) -> None:
        """Give back the whole segments of average age or older, again and again until enough are given back.

        The age of a segment is the number of searches in the pool since it came into the cache. All segments as
        old as the average go, even where fewer would be enough.

        Source: garbage_collect_cached_blocks.
        """
        unused = [block for block in self.free_blocks if block.is_whole_segment]
        while unused and target_bytes > 0:
            average = sum(self._searches - block.cached_at for block in unused) / len(unused)
            old = [block for block in unused if self._searches - block.cached_at >= average]
            unused = [block for block in unused if self._searches - block.cached_at < average]
            for block in old:
                self._release_segment(block)
                target_bytes -= block.size_bytes

    def _segment_bytes(self, wanted_bytes: int) -> int:
        """Size of the segment obtained for a request. Source: get_allocation_size."""
        if self._is_small:
            return SMALL_SEGMENT_BYTES
        if wanted_bytes < OWN_SEGMENT_BYTES:
            return LARGE_SEGMENT_BYTES
        return round_up(wanted_bytes, SEGMENT_ROUNDING_BYTES)

    def _release_segment(self, block: Block) -> None:
        assert block.is_whole_segment, "only a segment that is free as a whole can be given back"
        self._remove(block)
        self._device.give_back(block.size_bytes)
        self._segment_count -= 1


class ExpandablePool(Pool):
    """A pool of one segment whose addresses are reserved at once and mapped to memory page by page."""

    def __init__(self, device: DeviceMemory, *, is_small: bool, max_split_bytes: int = UNLIMITED_BYTES) -> None:
        super().__init__(device, is_small=is_small, max_split_bytes=max_split_bytes)
        self._page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        self._mapped_bytes = 0
        self._unmapped = [Block(self, 0, _ADDRESS_SPACE_BYTES, mapped=False)]  # sorted by address

    @property
    def segment_count(self) -> int:
        """1 once any page is mapped."""
        return int(self._mapped_bytes > 0)

    def grow(self, wanted_bytes: int) -> Block | None:
        """Map pages at the lowest addresses where a request fits; None if the device has too few left.

        A failure part of the way leaves the pages mapped so far in the pool, as PyTorch does.

        Source: try_allocate_expandable_block.
        """
        block = self._lowest_room(wanted_bytes)
        if not block.mapped and not self._map(block, min(block.size_bytes, wanted_bytes)):
            return None
        while block.size_bytes < wanted_bytes:
            beyond = block.next
            assert beyond is not None, "room for the request was found, so another block follows"
            if not self._map(beyond, min(wanted_bytes - block.size_bytes, beyond.size_bytes)):
                return None
            block = beyond  # mapping it made it swallow the free block below
        self._remove(block)
        return block

    def release(self) -> None:
        """Unmap every page that lies in a free block as a whole."""
        for block in self.free_blocks:
            self._unmap(block)

    def release_oversize(self, wanted_bytes: int) -> bool:
        """Do nothing: expandable segments are only given back page by page."""
        return False

    def release_unused(self, target_bytes: int) -> None:
        """Do nothing: PyTorch collects fixed segments only (since torch 2.5; earlier ones could stop here)."""

    def _best_fit(self, wanted_bytes: int) -> int:
        """Position in `_order` of the best fit, where unmapped addresses after a block count as its own.

        So a closed gap is filled before the end of the segment is used up.
        """
        index = super()._best_fit(wanted_bytes)
        while index + 1 < len(self._order) and self._reach_bytes(index + 1) < self._reach_bytes(index):
            index += 1
        return index

    def _reach_bytes(self, index: int) -> int:
        """Size of a free block together with the unmapped addresses after it. Source: expandable_size."""
        block = self._free[self._order[index] & _ADDRESS_MASK]
        upper = block.next
        return block.size_bytes if upper is None or upper.mapped else block.size_bytes + upper.size_bytes

    def _is_cut(self, wanted_bytes: int, rest_bytes: int) -> bool:
        """Whether a block is cut for a request: any rest of block size is kept apart. Source: should_split."""
        return rest_bytes >= MIN_BLOCK_BYTES

    def _lowest_room(self, wanted_bytes: int) -> Block:
        """The lowest free or unmapped block from which a request fits. Source: find_expandable_block."""
        for block in self._unmapped:
            start = block if block.previous is None or not block.previous.free else block.previous
            if self._has_room(start, wanted_bytes):
                return start
        raise AssertionError("the addresses of an expandable pool are used up")

    def _has_room(self, block: Block | None, wanted_bytes: int) -> bool:
        while wanted_bytes > 0 and block is not None and block.free:
            wanted_bytes -= block.size_bytes
            block = block.next
        return wanted_bytes <= 0

    def _map(self, block: Block, size_bytes: int) -> bool:
        """Back the start of an unmapped block by memory, in whole pages. Source: map_block."""
        size_bytes = round_up(size_bytes, self._page_bytes)
        if not self._device.take(size_bytes):
            return False
        self._mapped_bytes += size_bytes
        self._remove(block)
        if size_bytes < block.size_bytes:
            rest = Block(self, block.address + size_bytes, block.size_bytes - size_bytes, mapped=False)
            rest.insert_after(block)
            self._insert(rest)
        block.size_bytes = size_bytes
        block.mapped = True
        self.put_back(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages of a free block. Source: unmap_block."""
        first = round_up(block.address, self._page_bytes)
        last = (block.address + block.size_bytes) // self._page_bytes * self._page_bytes
        if first >= last:
            return
        self._remove(block)
        middle = self._part_above(block, first)
        above = self._part_above(middle, last)
        for part in (block, above):
            if part is not middle:
                self._insert(part)
        middle.mapped = False
        self._device.give_back(middle.size_bytes)
        self._mapped_bytes -= middle.size_bytes
        self.put_back(middle)

    def _part_above(self, block: Block, address: int) -> Block:
        """Cut a block at an address inside it and return the upper part; at its ends, the block itself."""
        lower_bytes = address - block.address
        if lower_bytes in (0, block.size_bytes):
            return block
        upper = Block(self, address, block.size_bytes - lower_bytes)
        upper.insert_after(block)
        block.size_bytes = lower_bytes
        return upper

    def _insert(self, block: Block) -> None:
        if block.mapped:
            super()._insert(block)
        else:
            insort(self._unmapped, block, key=lambda unmapped: unmapped.address)

    def _remove(self, block: Block) -> None:
        if block.mapped:
            super()._remove(block)
        else:
            self._unmapped.remove(block)
