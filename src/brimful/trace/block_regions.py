"""A step with a row of blocks → its regions: a block's part of one pass, with the storages made there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from brimful.trace.records import Event, EventKind, Op, Phase, Trace

OUTSIDE = -1
"""Index in place of a block's, for what belongs to no block."""

_HOST_LINK = "brimful."
"""Prefix of the names of ops that move an offloaded block's tensors while another block runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRow:
    """The blocks that a short step ran, and those that it did not run."""

    blocks: tuple[str, ...]
    """The blocks that ran, in the order of their forwards."""
    omitted: Mapping[int, tuple[str, ...]]
    """By the index of a block that ran: the blocks after it that do the same and did not run, in order."""
    reach: int
    """How many blocks away what a block refers to may be: fewer than run at either end of a row."""
    placeholders: frozenset[str]
    """Parameters of omitted blocks for which the optimizer was given a gradient that no backward made."""


class BlocksDifferError(Exception):
    """The blocks do not all do the same."""


class Region(NamedTuple):
    """A part of a pass: ops from `start` up to `stop`."""

    start: int
    stop: int
    block: int
    number: int
    """Number of the pass."""


StorageNumber = tuple[int, int]
"""A storage in the region that allocates it: the op, counted in the region, and how many that op allocated
before. The first of all blocks may allocate one more, such as a library's workspace."""


class BlockNames:
    """Which block a dotted name is inside of."""

    def __init__(self, blocks: Sequence[str]) -> None:
        self._blocks = {fqn: index for index, fqn in enumerate(blocks)}
        self._known: dict[str, tuple[int, str]] = {}

    def split(self, name: str) -> tuple[int, str]:
        """The block of a name, and the rest of it; OUTSIDE and the name itself if it is in none."""
        if name not in self._known:
            end = len(name)
            while end > 0 and name[:end] not in self._blocks:
                end = name.rfind(".", 0, end)
            self._known[name] = (self._blocks[name[:end]], name[end:]) if end > 0 else (OUTSIDE, name)
        return self._known[name]


class Regions:
    """The regions of a short step, and where its storages are allocated and freed."""

    def __init__(self, trace: Trace, row: ShortRow, names: BlockNames) -> None:
        self._trace, self._count, self._names = trace, len(row.blocks), names
        self.in_order = list(self._found())
        self.of_block = {(r.block, r.number): r for r in self.in_order if r.block != OUTSIDE}
        self._starts = [region.start for region in self.in_order]
        ops = [event.op for event in trace.events]
        if any(a > b for a, b in pairwise(ops)):
            raise BlocksDifferError
        self.events = {
            region: trace.events[bisect_left(ops, region.start) : bisect_left(ops, region.stop)]
            for region in self.in_order
        }
        self.made_in: list[tuple[Region, StorageNumber]] = []
        """By storage: the region that allocates it, and its number there."""
        self.freed_by: dict[int, tuple[Region, Event]] = {}
        for region in self.in_order:
            last_op, made = -1, 0
            for event in self.events[region]:
                if event.kind is EventKind.FREE:
                    self.freed_by[event.storage] = region, event
                    continue
                if event.storage != len(self.made_in):
                    raise BlocksDifferError
                made = made + 1 if event.op == last_op else 0
                last_op = event.op
                self.made_in.append((region, (event.op - region.start, made)))

    def at(self, op: int) -> Region:
        """The region of an op."""
        return self.in_order[bisect_left(self._starts, op + 1) - 1]

    def _found(self) -> Iterator[Region]:
        """All regions in order; the first one begins before the first op."""
        start = 0
        passes = groupby(self._trace.ops, key=lambda op: (op.phase, op.micro_batch))
        seen = set()
        yield Region(-1, 0, OUTSIDE, OUTSIDE)
        for number, (key, group) in enumerate(passes):
            ops = list(group)
            if key in seen:
                raise BlocksDifferError
            seen.add(key)
            borders = self._borders(start, ops) if key[0] in (Phase.FORWARD, Phase.BACKWARD) else []
            end = start + len(ops)
            first = borders[0][0] if borders else end
            if first > start:
                yield Region(start, first, OUTSIDE, number)
            for (begin, block), (stop, _) in pairwise(borders):
                yield Region(begin, stop, block, number)
            if borders and borders[-1][0] < end:
                yield Region(borders[-1][0], end, OUTSIDE, number)
            start = end

    def _borders(self, start: int, ops: Sequence[Op]) -> list[tuple[int, int]]:
        """Where each block begins, in the order of the pass, and where the last one ends."""
        firsts: dict[int, int] = {}
        lasts: dict[int, int] = {}
        for index, op in enumerate(ops, start):
            block = self._names.split(op.module)[0]
            if block != OUTSIDE:
                lasts[block] = index
                if not op.name.startswith(_HOST_LINK):
                    firsts.setdefault(block, index)
        order = list(range(self._count))
        if ops[0].phase is Phase.BACKWARD:
            order.reverse()
        begins = [firsts.get(block, -1) for block in order]
        end = lasts.get(order[-1], -1) + 1
        strictly = all(a < b for a, b in zip(begins, [*begins[1:], end], strict=True))
        if begins[0] < 0 or not strictly or any(last >= end for last in lasts.values()):
            raise BlocksDifferError
        return [*zip(begins, order, strict=True), (end, OUTSIDE)]
