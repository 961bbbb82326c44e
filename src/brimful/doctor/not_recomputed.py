"""A recorded run → what it would have held without activation checkpointing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from brimful.trace import EventKind, Op, Phase, Trace


def without_recomputation(trace: Trace) -> Trace | None:
    """The trace of a run in which what backward reads is kept from its forward on, not made again.

    A tensor lives from when the forward made it until the later end of it and of the one that is made again.
    None if nothing is recomputed, or what is has no counterpart in the forward.
    """
    made: dict[int, list[int]] = defaultdict(list)
    for index, made_storage in enumerate(trace.storages):
        if made_storage.op is not None:
            made[made_storage.op].append(index)
    begins, ends = dict[int, int](), dict[int, int]()
    for place, each in enumerate(trace.events):
        (begins if each.kind is EventKind.ALLOCATE else ends)[each.storage] = place
    never, dropped = len(trace.events), set[int]()
    for op, first, last in _recomputed(trace.ops):
        counterparts = [] if first is None else made[first]
        for number, storage in enumerate(made[op]):
            dropped.add(begins[storage])
            end = ends.get(storage, never)
            if end < never and trace.events[end].op <= last:  # backward does not read it
                dropped.add(end)
                continue
            if len(counterparts) <= number:
                return None
            before = counterparts[number]
            if trace.storages[before].size_bytes != trace.storages[storage].size_bytes:
                return None
            dropped.add(min(end, ends.get(before, never)))
    kept = tuple(each for place, each in enumerate(trace.events) if place not in dropped)
    return replace(trace, events=kept) if dropped else None


def _recomputed(ops: Sequence[Op]) -> Iterator[tuple[int, int | None, int]]:
    """Ops that run again: each with that of the forward, if there is one, and the last that runs with it."""
    forward: dict[tuple[int, int, str, str], deque[int]] = defaultdict(deque)
    last = dict[int, int]()
    for index in reversed(range(len(ops))):
        if ops[index].recomputed:
            last[index] = last.get(index + 1, index)
    for index, op in enumerate(ops):
        key = op.step, op.micro_batch, op.module, op.name
        if op.recomputed:
            yield index, forward[key].popleft() if forward[key] else None, last[index]
        elif op.phase is Phase.FORWARD:
            forward[key].append(index)
