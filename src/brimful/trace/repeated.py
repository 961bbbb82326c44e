"""A step that ran only some of a row of alike blocks → the trace of the step with all of them.

Of a long row only a few blocks at its beginning and at its end run. The last of those at the beginning and the
first of those at the end, neighbours in the short step, must do the same: the same ops, allocations and
releases, each relative to the block that runs. Then what the former does is repeated for every block between
them. Whatever does not show this is refused, so that the whole step is captured instead.

A block is named by the path of its module; a *region* is a block's part of one forward or backward pass, from
its first op to that of the block after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from brimful.settings import Settings
from brimful.trace.records import Category, Event, EventKind, Op, Phase, Storage, Trace

OUTSIDE = -1
"""In the place of a block: what belongs to none."""

_HOST_LINK = "brimful."
"""How the names of ops begin that move an offloaded block's tensors while another block runs."""

Counts = Mapping[str, Sequence[tuple[int, int, int]]]
"""By correction: the index of the next op, occurrences and changed bytes, for all that it counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRow:
    """The blocks that a short step ran, and those that it did not run."""

    blocks: tuple[str, ...]
    """Those that ran, in the order of their forwards."""
    omitted: Mapping[int, tuple[str, ...]]
    """By the index of a block that ran: those after it that do the same and did not run, in order."""
    reach: int
    """How many blocks away what a block refers to may be: fewer than run at either end of a row."""
    placeholders: frozenset[str]
    """Parameters of omitted blocks for which the optimizer was given a gradient that no backward made."""


class _DiffersError(Exception):
    """The blocks do not all do the same."""


def with_all_blocks(trace: Trace, row: ShortRow, settings: Settings, counts: Counts) -> Trace | None:
    """The trace of a step with all blocks.

    Args:
        trace: Of one short step, whose optimizer updated the parameters of all blocks.
        row: Its blocks.
        settings: Those of the whole step.
        counts: Of the trace's corrections.

    Returns:
        What a capture of the whole step is; None where the short one does not show that.
    """
    try:
        return _Repeating(trace, row).whole(settings, counts)
    except _DiffersError:
        return None


class _Region(NamedTuple):
    """A part of a pass: ops from `start` up to `stop`."""

    start: int
    stop: int
    block: int
    number: int
    """Of the pass."""


class _Piece(NamedTuple):
    """A region in its place in the whole step."""

    region: _Region
    place: int
    """Of the block in the whole row; OUTSIDE for none."""
    first_op: int
    """Its index in the whole step."""


_Number = tuple[int, int]
"""Of a storage in the region that allocates it: the op, counted in the region, and how many that op allocated
before. The first of all blocks may allocate one more, such as a library's workspace."""

_StorageKey = tuple[int, int, _Number]
"""Where a storage is allocated: place of the block, number of the pass, number in that region. For a storage
that is allocated outside: OUTSIDE, OUTSIDE and its index."""


class _Names:
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


class _Regions:
    """The regions of a short step, and where its storages are allocated and freed."""

    def __init__(self, trace: Trace, row: ShortRow, names: _Names) -> None:
        self._trace, self._count, self._names = trace, len(row.blocks), names
        self.in_order = list(self._found())
        self.of_block = {(r.block, r.number): r for r in self.in_order if r.block != OUTSIDE}
        self._starts = [region.start for region in self.in_order]
        ops = [event.op for event in trace.events]
        if any(a > b for a, b in pairwise(ops)):
            raise _DiffersError
        self.events = {
            region: trace.events[bisect_left(ops, region.start) : bisect_left(ops, region.stop)]
            for region in self.in_order
        }
        self.made_in: list[tuple[_Region, _Number]] = []
        """By storage: the region that allocates it, and its number there."""
        self.freed_by: dict[int, tuple[_Region, Event]] = {}
        for region in self.in_order:
            last_op, made = -1, 0
            for event in self.events[region]:
                if event.kind is EventKind.FREE:
                    self.freed_by[event.storage] = region, event
                    continue
                if event.storage != len(self.made_in):
                    raise _DiffersError
                made = made + 1 if event.op == last_op else 0
                last_op = event.op
                self.made_in.append((region, (event.op - region.start, made)))

    def at(self, op: int) -> _Region:
        """The region of an op."""
        return self.in_order[bisect_left(self._starts, op + 1) - 1]

    def _found(self) -> Iterator[_Region]:
        """All regions in order; the first one begins before the first op."""
        start = 0
        passes = groupby(self._trace.ops, key=lambda op: (op.phase, op.micro_batch))
        seen = set()
        yield _Region(-1, 0, OUTSIDE, OUTSIDE)
        for number, (key, group) in enumerate(passes):
            ops = list(group)
            if key in seen:
                raise _DiffersError
            seen.add(key)
            borders = self._borders(start, ops) if key[0] in (Phase.FORWARD, Phase.BACKWARD) else []
            end = start + len(ops)
            first = borders[0][0] if borders else end
            if first > start:
                yield _Region(start, first, OUTSIDE, number)
            for (begin, block), (stop, _) in pairwise(borders):
                yield _Region(begin, stop, block, number)
            if borders and borders[-1][0] < end:
                yield _Region(borders[-1][0], end, OUTSIDE, number)
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
            raise _DiffersError
        return [*zip(begins, order, strict=True), (end, OUTSIDE)]


class _Repeating:
    """Puts regions together to the whole step."""

    def __init__(self, trace: Trace, row: ShortRow) -> None:
        self._trace, self._row = trace, row
        self._names = _Names(row.blocks)
        self._regions = _Regions(trace, row, self._names)
        counts = [1 + len(row.omitted.get(index, ())) for index in range(len(row.blocks))]
        self._places = [0, *accumulate(counts)]
        """By block that ran: its place in the whole row."""
        for block in row.omitted:
            self._check_alike(block, block + 1)
        self._gradients = dict(self._gradients_of_omitted())
        """By the storage of a placeholder: where the gradient in its place is made."""
        self._pieces = self._in_order()
        self._first_ops = {(p.place, p.region.number): p.first_op for p in self._pieces if p.place != OUTSIDE}
        self._shifts = {p.region: p.first_op - p.region.start for p in self._pieces if p.place == OUTSIDE}

    def whole(self, settings: Settings, counts: Counts) -> Trace:
        """The trace of the whole step."""
        trace = self._trace
        ops = tuple(op for piece in self._pieces for op in self._ops(piece))
        storages, events, indices = self._memory()
        return replace(
            trace,
            settings=settings,
            ops=ops,
            storages=tuple(storages),
            events=tuple(events),
            module_classes=tuple(self._module_classes()),
            corrections=tuple(
                replace(
                    rule,
                    occurrences=rule.occurrences + self._counted(counts.get(rule.name, ()), 1),
                    changed_bytes=rule.changed_bytes + self._counted(counts.get(rule.name, ()), 2),
                )
                for rule in trace.corrections
            ),
            global_batch=tuple(indices[OUTSIDE, OUTSIDE, (storage, 0)] for storage in trace.global_batch),
        )

    # What two neighbours do, each relative to itself.

    def _check_alike(self, block: int, other: int) -> None:
        numbers = sorted(number for each, number in self._regions.of_block if each == block)
        if numbers != sorted(number for each, number in self._regions.of_block if each == other):
            raise _DiffersError
        for number in numbers:
            a, b = self._regions.of_block[block, number], self._regions.of_block[other, number]
            if self._relative(a) != self._relative(b):
                raise _DiffersError

    def _relative(self, region: _Region) -> Hashable:
        ops = [self._relative_op(op, region.block) for op in range(region.start, region.stop)]
        return tuple(ops), tuple(self._relative_event(event, region) for event in self._regions.events[region])

    def _relative_op(self, index: int, block: int) -> Hashable:
        op = self._trace.ops[index]
        maker = self._relative_index(index - op.made_ops_ago, block) if op.made_ops_ago else None
        what = (op.name, op.phase, op.recomputed, op.random, op.on_host, op.dtype, op.line)
        work = (op.flops, op.read_bytes, op.written_bytes, op.weight_bytes, op.extents)
        return what, work, self._relative_name(op.module, block), maker

    def _relative_event(self, event: Event, region: _Region) -> Hashable:
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

    # The whole step.

    def _in_order(self) -> list[_Piece]:
        """All regions of the whole step."""
        pieces: list[_Piece] = []
        next_op = -1

        def add(region: _Region, place: int) -> None:
            nonlocal next_op
            pieces.append(_Piece(region, place, next_op))
            next_op += region.stop - region.start

        for region in self._regions.in_order:
            if region.block == OUTSIDE:
                add(region, OUTSIDE)
                continue
            place = self._places[region.block]
            omitted = range(place + 1, place + 1 + len(self._row.omitted.get(region.block, ())))
            is_backward = self._trace.ops[region.start].phase is Phase.BACKWARD
            for each in (*reversed(omitted), place) if is_backward else (place, *omitted):
                add(region, each)
        return pieces

    def _place(self, block: int, piece: _Piece) -> int:
        """The place of the block that a piece means by another one of its region's."""
        own = piece.region.block
        if own == OUTSIDE:
            return self._places[block]
        if abs(block - own) <= self._row.reach:
            return piece.place + block - own
        between = range(min(block, own), max(block, own))
        if piece.place != self._places[own] or any(each in self._row.omitted for each in between):
            raise _DiffersError
        return self._places[block]

    def _index(self, op: int, piece: _Piece) -> int:
        """The index in the whole step of an op that a piece refers to."""
        region = self._regions.at(op)
        if region.block == OUTSIDE:
            return op + self._shifts[region]
        return self._first_ops[self._place(region.block, piece), region.number] + op - region.start

    def _name(self, name: str, piece: _Piece) -> str:
        """A name as a piece means it."""
        block, rest = self._names.split(name)
        if block == OUTSIDE or piece.region.block == OUTSIDE:
            return name
        return self._fqn(self._place(block, piece)) + rest

    def _fqn(self, place: int) -> str:
        block = bisect_left(self._places, place + 1) - 1
        behind = place - self._places[block]
        return self._row.omitted[block][behind - 1] if behind else self._row.blocks[block]

    def _ops(self, piece: _Piece) -> Iterator[Op]:
        start, stop = max(piece.region.start, 0), piece.region.stop
        named: dict[str, str] = {}
        for index in range(start, stop):
            op = self._trace.ops[index]
            ago = op.made_ops_ago
            if ago and index - ago < start:
                ago = piece.first_op + index - piece.region.start - self._index(index - ago, piece)
            if op.module not in named:
                named[op.module] = self._name(op.module, piece)
            module = named[op.module]
            yield op if ago == op.made_ops_ago and module == op.module else op.moved(module, ago)

    def _memory(self) -> tuple[list[Storage], list[Event], dict[_StorageKey, int]]:
        """Storages and events of the whole step, and the index of each storage by where it is allocated."""
        indices: dict[_StorageKey, int] = {}
        storages: list[Storage] = []
        found: list[tuple[EventKind, int, int]] = []
        for piece in self._pieces:
            shift = piece.first_op - piece.region.start
            for event in self._regions.events[piece.region]:
                op, storage = event.op + shift, event.storage
                if event.kind is EventKind.FREE:
                    keys = self._freed(storage, piece)
                    if any(key not in indices for key in keys):
                        raise _DiffersError
                    found += [(EventKind.FREE, indices[key], op) for key in keys]
                elif storage not in self._gradients:
                    indices[self._key(storage, piece)] = len(storages)
                    found.append((EventKind.ALLOCATE, len(storages), op))
                    storages.append(self._storage(self._trace.storages[storage], piece))
        return storages, list(_sorted(found)), indices

    def _key(self, storage: int, piece: _Piece) -> _StorageKey:
        region, number = self._regions.made_in[storage]
        if region.block == OUTSIDE:
            return OUTSIDE, OUTSIDE, (storage, 0)
        return self._place(region.block, piece), region.number, number

    def _freed(self, storage: int, piece: _Piece) -> list[_StorageKey]:
        """What a piece frees in the place of a storage; what is outside frees that of omitted blocks too."""
        if storage in self._gradients:
            return [self._gradients[storage]]
        key = self._key(storage, piece)
        block = self._regions.made_in[storage][0].block
        if piece.region.block != OUTSIDE or block not in self._row.omitted:
            return [key]
        if self._trace.storages[storage].category is Category.GRADIENTS:
            return [key]  # those of omitted blocks have placeholders
        return [(key[0] + behind, *key[1:]) for behind in range(1 + len(self._row.omitted[block]))]

    def _storage(self, storage: Storage, piece: _Piece) -> Storage:
        op = None if storage.op is None else self._index(storage.op, piece)
        label = self._name(storage.label, piece)
        if op == storage.op and label == storage.label:
            return storage
        return Storage(
            size_bytes=storage.size_bytes,
            category=storage.category,
            op=op,
            label=label,
            most_bytes=storage.most_bytes,
            kernel=storage.kernel,
        )

    def _gradients_of_omitted(self) -> Iterator[tuple[int, _StorageKey]]:
        """The storage of each placeholder, and where the gradient that it stands for is made."""
        placeholders, made = {}, []
        for index, storage in enumerate(self._trace.storages):
            if storage.category is Category.GRADIENTS:
                if storage.label in self._row.placeholders:
                    placeholders[storage.label] = index
                elif (block := self._regions.made_in[index][0].block) in self._row.omitted:
                    made.append((block, index))
        if placeholders.keys() != self._row.placeholders:
            raise _DiffersError
        for block, index in made:
            region, number = self._regions.made_in[index]
            owner, rest = self._names.split(self._trace.storages[index].label)
            for behind, fqn in enumerate(self._row.omitted[block], 1):
                placeholder = placeholders.pop(fqn + rest, None)
                if owner != block or placeholder is None:
                    raise _DiffersError
                yield placeholder, (self._places[block] + behind, region.number, number)
        if placeholders:
            raise _DiffersError

    def _module_classes(self) -> Iterator[tuple[str, str]]:
        for block, group in groupby(self._trace.module_classes, key=lambda each: self._names.split(each[0])[0]):
            called = list(group)
            yield from called
            for fqn in self._row.omitted.get(block, ()):
                yield from ((fqn + self._names.split(name)[1], class_name) for name, class_name in called)

    def _counted(self, counts: Sequence[tuple[int, int, int]], field: int) -> int:
        """What omitted blocks add to a count of a correction."""
        total = 0
        for count in counts:
            block = self._regions.at(count[0]).block
            total += count[field] * len(self._row.omitted.get(block, ()))
        return total


def _sorted(events: Sequence[tuple[EventKind, int, int]]) -> Iterator[Event]:
    """Events with those releases that follow one another in the order of ops and storages, as captured ones."""
    for kind, group in groupby(events, key=itemgetter(0)):
        made = list(group)
        if kind is EventKind.FREE:
            made.sort(key=itemgetter(2, 1))
        for _, storage, op in made:
            yield Event(kind=kind, storage=storage, op=op)
