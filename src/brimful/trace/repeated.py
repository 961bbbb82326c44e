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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import NamedTuple

from msgspec import structs

from brimful.settings import Settings
from brimful.trace.alike_blocks import check_alike
from brimful.trace.block_regions import (
    OUTSIDE,
    BlockNames,
    BlocksDifferError,
    Region,
    Regions,
    ShortRow,
    StorageNumber,
)
from brimful.trace.records import Category, Correction, Event, EventKind, Op, Phase, Storage, Trace

Counts = Mapping[str, Sequence[tuple[int, int, int]]]
"""By correction: the index of the next op, occurrences and changed bytes, for all that it counted."""


def with_all_blocks(trace: Trace, row: ShortRow, settings: Settings, counts: Counts) -> Trace | None:
    """The trace that a capture of the whole step would give; None where the short step does not show that.

    `trace` is of one short step, whose optimizer updated the parameters of all blocks; `settings` are those of
    the whole step.
    """
    try:
        return _Repeating(trace, row).whole(settings, counts)
    except BlocksDifferError:
        return None


class _Piece(NamedTuple):
    """A region in its place in the whole step."""

    region: Region
    place: int
    """Place of the block in the whole row; OUTSIDE for none."""
    first_op: int
    """Its index in the whole step."""


_StorageKey = tuple[int, int, StorageNumber]
"""Where a storage is allocated: place of the block, number of the pass, number in that region. For a storage
that is allocated outside: OUTSIDE, OUTSIDE and its index."""


class _Repeating:
    """Puts regions together to the whole step."""

    def __init__(self, trace: Trace, row: ShortRow) -> None:
        self._trace, self._row = trace, row
        self._names = BlockNames(row.blocks)
        self._regions = Regions(trace, row, self._names)
        counts = [1 + len(row.omitted.get(index, ())) for index in range(len(row.blocks))]
        self._places = [0, *accumulate(counts)]
        """By block that ran: its place in the whole row."""
        for block in row.omitted:
            check_alike(trace, self._regions, self._names, block, block + 1)
        self._gradients = dict(self._gradients_of_omitted())
        """By the storage of a placeholder: where the gradient in its place is made."""
        self._pieces = _in_order(trace, row, self._regions, self._places)
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
            module_classes=tuple(_module_classes(trace, self._row, self._names)),
            corrections=tuple(
                _corrected(rule, self._regions, self._row, counts.get(rule.name, ()))
                for rule in trace.corrections
            ),
            global_batch=tuple(indices[OUTSIDE, OUTSIDE, (storage, 0)] for storage in trace.global_batch),
        )

    # The whole step.

    def _place(self, block: int, piece: _Piece) -> int:
        """The place of the block that a piece means by another one of its region's."""
        own = piece.region.block
        if own == OUTSIDE:
            return self._places[block]
        if abs(block - own) <= self._row.reach:
            return piece.place + block - own
        between = range(min(block, own), max(block, own))
        if piece.place != self._places[own] or any(each in self._row.omitted for each in between):
            raise BlocksDifferError
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
            yield (
                op
                if ago == op.made_ops_ago and module == op.module
                else structs.replace(op, module=module, made_ops_ago=ago)
            )

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
                        raise BlocksDifferError
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
        return structs.replace(storage, op=op, label=label)

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
            raise BlocksDifferError
        for block, index in made:
            region, number = self._regions.made_in[index]
            owner, rest = self._names.split(self._trace.storages[index].label)
            for behind, fqn in enumerate(self._row.omitted[block], 1):
                placeholder = placeholders.pop(fqn + rest, None)
                if owner != block or placeholder is None:
                    raise BlocksDifferError
                yield placeholder, (self._places[block] + behind, region.number, number)
        if placeholders:
            raise BlocksDifferError


def _in_order(trace: Trace, row: ShortRow, regions: Regions, places: Sequence[int]) -> list[_Piece]:
    """All regions of the whole step."""
    pieces: list[_Piece] = []
    next_op = -1

    def add(region: Region, place: int) -> None:
        nonlocal next_op
        pieces.append(_Piece(region, place, next_op))
        next_op += region.stop - region.start

    for region in regions.in_order:
        if region.block == OUTSIDE:
            add(region, OUTSIDE)
            continue
        place = places[region.block]
        omitted = range(place + 1, place + 1 + len(row.omitted.get(region.block, ())))
        is_backward = trace.ops[region.start].phase is Phase.BACKWARD
        for each in (*reversed(omitted), place) if is_backward else (place, *omitted):
            add(region, each)
    return pieces


def _module_classes(trace: Trace, row: ShortRow, names: BlockNames) -> Iterator[tuple[str, str]]:
    for block, group in groupby(trace.module_classes, key=lambda each: names.split(each[0])[0]):
        called = list(group)
        yield from called
        for fqn in row.omitted.get(block, ()):
            yield from ((fqn + names.split(name)[1], class_name) for name, class_name in called)


def _corrected(
    rule: Correction, regions: Regions, row: ShortRow, counts: Sequence[tuple[int, int, int]]
) -> Correction:
    """A correction with what it counts in omitted blocks."""
    return replace(
        rule,
        occurrences=rule.occurrences + _counted(regions, row, counts, 1),
        changed_bytes=rule.changed_bytes + _counted(regions, row, counts, 2),
    )


def _counted(regions: Regions, row: ShortRow, counts: Sequence[tuple[int, int, int]], field: int) -> int:
    """What omitted blocks add to a count of a correction."""
    total = 0
    for count in counts:
        block = regions.at(count[0]).block
        total += count[field] * len(row.omitted.get(block, ()))
    return total


def _sorted(events: Sequence[tuple[EventKind, int, int]]) -> Iterator[Event]:
    """Events with those releases that follow one another in the order of ops and storages, as captured ones."""
    for kind, group in groupby(events, key=itemgetter(0)):
        made = list(group)
        if kind is EventKind.FREE:
            made.sort(key=itemgetter(2, 1))
        for _, storage, op in made:
            yield Event(kind=kind, storage=storage, op=op)
