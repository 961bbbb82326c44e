"""Blocks of memory as they are recorded → storages and events of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from brimful.trace import Category, Event, EventKind, Kernel, Op, Phase, Storage

_KINDS = (EventKind.FREE, EventKind.ALLOCATE)
"""Kinds of events, by whether an event is an allocation."""


@dataclass(slots=True)
class Block:
    """A block of memory: a storage that tensors share, or one that no tensor owns, such as a workspace."""

    size_bytes: int
    op: int | None
    """Index of the op that made it; None if no op did."""
    label: str
    most_bytes: int | None = None
    """The most bytes that it may have, where its size is not known for sure."""
    kernel: Kernel | None = None
    """What decides the size of a block inside a kernel."""
    category: Category | None = None
    """What the block holds; None: decided by the phases in which it is made and freed."""


class BlockEvent(NamedTuple):
    """The allocation or the release of a block."""

    is_allocation: bool
    block: int
    op: int
    """Index of the latest op."""


def to_storages(
    blocks: Sequence[Block], events: Sequence[BlockEvent], ops: Sequence[Op]
) -> tuple[Storage, ...]:
    """The blocks as storages, with what they hold."""
    freed_in = {event.block: event.op for event in events if not event.is_allocation}
    return tuple(
        Storage(
            size_bytes=block.size_bytes,
            category=block.category or _category(block.op, freed_in.get(index), ops),
            op=block.op,
            label=block.label,
            most_bytes=block.most_bytes,
            kernel=block.kernel,
        )
        for index, block in enumerate(blocks)
    )


def to_events(blocks: Sequence[Block], events: Sequence[BlockEvent]) -> tuple[Event, ...]:
    """All allocations and releases, in order.

    What lies outside of the model, made by no op, and stays to the end was there before the first op. Releases
    that follow one another are put in the order of their storages: what is free afterwards is the same, and
    what torch releases in the order of addresses, as autocast its casts, differs from run to run.
    """
    freed = {event.block for event in events if not event.is_allocation}
    from_the_start = dict.fromkeys(
        index
        for index, block in enumerate(blocks)
        if block.category is Category.OTHER_TENSORS and block.op is None and index not in freed
    )
    records = [Event(kind=EventKind.ALLOCATE, storage=block, op=-1) for block in from_the_start]
    others = (event for event in events if event.block not in from_the_start)
    for is_allocation, group in groupby(others, key=itemgetter(0)):
        made = [Event(kind=_KINDS[is_allocation], storage=block, op=op) for _, block, op in group]
        records += made if is_allocation else sorted(made, key=lambda event: (event.op, event.storage))
    return tuple(records)


def _category(made_in: int | None, freed_in: int | None, ops: Sequence[Op]) -> Category:
    phase = None if made_in is None else ops[made_in].phase
    if phase is not Phase.FORWARD and phase is not Phase.EMBEDDING:
        return Category.TEMPORARIES
    if freed_in is None or ops[freed_in].phase is not phase:
        return Category.SAVED_TENSORS
    return Category.TEMPORARIES
