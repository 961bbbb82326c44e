"""Two neighbours in a row of blocks → whether they do the same, each relative to itself: `check_alike`."""

from __future__ import annotations

from collections.abc import Hashable

from brimful.trace.block_regions import OUTSIDE, BlockNames, BlocksDifferError, Region, Regions
from brimful.trace.records import Event, EventKind, Trace


def check_alike(trace: Trace, regions: Regions, names: BlockNames, block: int, other: int) -> None:
    """Check that two blocks have the same ops, allocations and releases; BlocksDifferError if not."""
    _Neighbours(trace, regions, names).check_alike(block, other)


class _Neighbours:
    """What blocks do, relative to the block that runs."""

    def __init__(self, trace: Trace, regions: Regions, names: BlockNames) -> None:
        self._trace, self._regions, self._names = trace, regions, names

    def check_alike(self, block: int, other: int) -> None:
        numbers = sorted(number for each, number in self._regions.of_block if each == block)
        if numbers != sorted(number for each, number in self._regions.of_block if each == other):
            raise BlocksDifferError
        for number in numbers:
            a, b = self._regions.of_block[block, number], self._regions.of_block[other, number]
            if self._relative(a) != self._relative(b):
                raise BlocksDifferError

    def _relative(self, region: Region) -> Hashable:
        ops = [self._relative_op(op, region.block) for op in range(region.start, region.stop)]
        return tuple(ops), tuple(self._relative_event(event, region) for event in self._regions.events[region])

    def _relative_op(self, index: int, block: int) -> Hashable:
        op = self._trace.ops[index]
        maker = self._relative_index(index - op.made_ops_ago, block) if op.made_ops_ago else None
        what = (op.name, op.phase, op.recomputed, op.random, op.on_host, op.compiled, op.dtype, op.line)
        work = (op.flops, op.read_bytes, op.written_bytes, op.weight_bytes, op.extents)
        return what, work, self._relative_name(op.module, block), maker

    def _relative_event(self, event: Event, region: Region) -> Hashable:
        storage, block = self._trace.storages[event.storage], region.block
        made_in, number = self._regions.made_in[event.storage]
        inside = made_in.block != OUTSIDE
        who = (made_in.block - block, made_in.number, number) if inside else event.storage
        where = event.kind, who, inside, event.op - region.start
        if event.kind is EventKind.FREE:
            return where
        freed = self._regions.freed_by.get(event.storage)
        return (
            where,
            (storage.size_bytes, storage.category, storage.most_bytes, storage.kernel),
            self._relative_name(storage.label, block),
            None if storage.op is None else self._relative_index(storage.op, block),
            None if freed is None else self._relative_index(freed[1].op, block),
        )

    def _relative_name(self, name: str, block: int) -> tuple[int | None, str]:
        owner, rest = self._names.split(name)
        return (None, name) if owner == OUTSIDE else (owner - block, rest)

    def _relative_index(self, op: int, block: int) -> tuple[int | None, int, int]:
        region = self._regions.at(op)
        if region.block == OUTSIDE:
            return None, OUTSIDE, op
        return region.block - block, region.number, op - region.start
