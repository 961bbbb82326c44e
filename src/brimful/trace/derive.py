"""Traces derived from others: of one micro-batch from two, of one step more, of a size from other steps.

They serve the search; its final choice is captured.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from brimful.trace.first_update import with_state_made_by_first_update
from brimful.trace.records import Category, Event, EventKind, Op, Phase, Trace
from brimful.trace.scaling import TraceLine


def with_one_micro_batch(trace: Trace) -> Trace:
    """A step of one micro-batch, from the capture of one step of two.

    The forward and backward of the second, and what they make, are removed. What the weighting of the first
    one's loss takes, a few scalars, stays.
    """
    is_dropped = [op.micro_batch > 0 and op.phase in (Phase.FORWARD, Phase.BACKWARD) for op in trace.ops]
    index, ops = [], []
    for op, dropped in zip(trace.ops, is_dropped, strict=True):
        if not dropped:
            ops.append(op if op.micro_batch == 0 else structs.replace(op, micro_batch=0))
        index.append(len(ops) - 1)
    first_dropped = is_dropped.index(True) if True in is_dropped else len(ops)
    gone: set[int] = set()
    events = []
    for event in trace.events:
        if event.kind is EventKind.ALLOCATE:
            is_second_batch = (
                event.op == first_dropped - 1 and trace.storages[event.storage].category is Category.INPUTS
            )
            if (event.op >= 0 and is_dropped[event.op]) or is_second_batch:
                gone.add(event.storage)
        if event.storage not in gone:
            now = index[event.op] if event.op >= 0 else event.op
            events.append(event if now == event.op else structs.replace(event, op=now))
    alone = trace.with_settings(replace(trace.settings, gradient_accumulation_steps=1))
    return replace(
        alone,
        captured_micro_batches=1,
        ops=tuple(ops),
        storages=tuple(
            s if s.op is None or s.op == index[s.op] else structs.replace(s, op=index[s.op])
            for s in alone.storages
        ),
        events=tuple(events),
    )


def with_last_step_again(trace: Trace) -> Trace:
    """The trace as if its last step were run once more; see `Trace.with_last_step_again`."""
    step = trace.captured_steps - 1
    first = next((i for i, op in enumerate(trace.ops) if op.step == step and op.phase is not Phase.SETUP), 0)
    ops = [structs.replace(op, step=step + 1) for op in trace.ops[first:]]
    shift = len(trace.ops) - first
    freed = {event.storage for event in trace.events if event.kind is EventKind.FREE and event.op >= first}
    # What the step makes before its first op, such as a saved random state, follows the last op before it.
    events = [
        event
        for event in trace.events
        if event.op >= first
        or (
            event.op == first - 1
            and event.storage in freed
            and trace.storages[event.storage].category in (Category.INPUTS, Category.TEMPORARIES)
        )
    ]
    allocated = [event.storage for event in events if event.kind is EventKind.ALLOCATE]
    replaced = dict(_replaced_by_forward(trace, [storage for storage in allocated if storage not in freed]))
    again_made = freed | set(replaced.values())
    made = [storage for storage in allocated if storage in again_made]
    again = {storage: len(trace.storages) + i for i, storage in enumerate(made)}
    storages = [trace.storages[storage] for storage in made]
    repeated = replace(
        trace,
        captured_steps=trace.captured_steps + 1,
        ops=(*trace.ops, *ops),
        storages=(
            *trace.storages,
            *(s if s.op is None else structs.replace(s, op=s.op + shift) for s in storages),
        ),
        events=(*trace.events, *_events_again(events, again, replaced, shift)),
    )
    return repeated if step else with_state_made_by_first_update(repeated)


def _events_again(
    events: Sequence[Event], again: Mapping[int, int], replaced: Mapping[int, int], shift: int
) -> Iterator[Event]:
    for event in events:
        if event.storage in again:
            op = event.op + shift
            yield Event(kind=event.kind, storage=again[event.storage], op=op)
            if event.kind is EventKind.ALLOCATE and event.storage in replaced:
                yield Event(kind=EventKind.FREE, storage=replaced[event.storage], op=op)


def _replaced_by_forward(trace: Trace, left: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a storage that a forward makes and the one of the step before whose place it takes.

    A module may set an attribute in each forward, such as a weight under weight normalisation, and again where
    it is recomputed. What the last micro-batch left is replaced in the first of the next step.
    """
    last: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for index in left:
        maker = trace.storages[index].op
        if maker is not None and (trace.ops[maker].recomputed or trace.ops[maker].phase is Phase.FORWARD):
            last[_attribute_key(trace, index)].append(index)
    if not last:
        return
    for index, storage in enumerate(trace.storages):
        op = None if storage.op is None else trace.ops[storage.op]
        if op is not None and op.step == trace.captured_steps - 1 and op.phase is Phase.FORWARD:
            waiting = last.get(_attribute_key(trace, index))
            if waiting and (replaced := waiting.popleft()) != index:
                yield index, replaced


def _attribute_key(trace: Trace, storage: int) -> Hashable:
    made = trace.storages[storage]
    assert made.op is not None
    op = trace.ops[made.op]
    return op.name, op.module, made.size_bytes


class Counterparts:
    """Derives a trace with recomputed units at other micro-batch sizes, from a capture at one.

    What a recomputation runs, the forward ran too. So each op of `trace`, captured at the smaller size of
    `kept`, is like one of the step with everything kept, which was captured at two sizes. Only copies of
    buffers are added, whose size does not depend on the micro-batch.
    """

    def __init__(self, trace: Trace, kept: TraceLine) -> None:
        self._trace, self._kept = trace, kept
        copies = _copies_of_buffers(trace, kept)
        self._ops = _counterparts(
            _op_keys(trace),
            _op_keys(kept.small),
            [_op_key(op)[1:] for op in kept.large.ops],
            constant=frozenset(copies),
        )
        self._storages = _counterparts(
            list(_storage_keys(trace)),
            list(_storage_keys(kept.small)),
            [(storage.size_bytes, storage.most_bytes, storage.kernel) for storage in kept.large.storages],
            constant=frozenset((copy.name, copy.written_bytes, None, None, copy) for copy in copies),
        )

    def at(self, micro_batch_size: int) -> Trace | None:
        """The trace at a size; None if an op or a storage has no counterpart, or several that differ."""
        if self._ops is None or self._storages is None:
            return None
        kept = self._kept.at(micro_batch_size)
        ops, storages = list(self._trace.ops), list(self._trace.storages)
        changing_ops, changing_storages = set(self._kept.changing_ops), set(self._kept.changing_storages)
        for i, index in enumerate(self._ops):
            if index in changing_ops:
                like = kept.ops[index]
                ops[i] = structs.replace(
                    ops[i],
                    flops=like.flops,
                    read_bytes=like.read_bytes,
                    written_bytes=like.written_bytes,
                    extents=like.extents,
                )
        for i, index in enumerate(self._storages):
            same = kept.storages[index]
            if index in changing_storages:
                storages[i] = structs.replace(
                    storages[i], size_bytes=same.size_bytes, most_bytes=same.most_bytes, kernel=same.kernel
                )
        settings = replace(self._trace.settings, micro_batch_size=micro_batch_size)
        return replace(self._trace, settings=settings, ops=tuple(ops), storages=tuple(storages))


class _OpKey(NamedTuple):
    """The work of an op: ops with the same at one size have the same at another, almost always."""

    name: str
    flops: int
    read_bytes: int
    written_bytes: int
    extents: tuple[int, ...]


def _op_key(op: Op) -> _OpKey:
    return _OpKey(op.name, op.flops, op.read_bytes, op.written_bytes, op.extents)


def _op_keys(trace: Trace) -> list[_Keys]:
    """For each op its key, and a finer key that has its place in its module too.

    What differs in what it runs may have the same work at one size. But what the model runs between its modules
    does not belong to the same one when it is recomputed.
    """
    keys: list[_Keys] = []
    before: Counter[Hashable] = Counter()
    for op in trace.ops:
        key = _op_key(op)
        is_backward = op.phase is Phase.BACKWARD and not op.recomputed
        run = key, op.module, op.phase, op.recomputed, op.micro_batch, op.step
        keys.append((key, (key, op.module, is_backward, before[run])))
        before[run] += 1
    return keys


def _storage_keys(trace: Trace) -> Iterator[_Keys]:
    """For each storage the keys of the op that makes it, with sizes and which of that op's results it is."""
    ops = _op_keys(trace)
    results: Counter[int] = Counter()
    for storage in trace.storages:
        maker, maker_in_module, number = None, None, 0
        if storage.op is not None:
            (maker, maker_in_module), number = ops[storage.op], results[storage.op]
            results[storage.op] += 1
        key = storage.label, storage.size_bytes, storage.most_bytes, storage.kernel, maker
        yield key, (key, maker_in_module, number)


_COPY = "aten.clone.default"


def _copies_of_buffers(trace: Trace, kept: TraceLine) -> set[_OpKey]:
    """Keys of ops that copy what is there before training and has one size in all micro-batches."""
    storages = zip(kept.small.storages, kept.large.storages, strict=True)
    sizes = {
        a.size_bytes for a, b in storages if a.category is Category.PARAMETERS and a.size_bytes == b.size_bytes
    }
    copies = (op for op in trace.ops if op.name == _COPY and op.read_bytes == op.written_bytes)
    return {_op_key(op) for op in copies if op.written_bytes in sizes}


_CONSTANT = -1
"""Index in place of a counterpart's, for what has none and is the same at all sizes."""


_Keys = tuple[Hashable, Hashable]
"""The key that counterparts share, and the finer one that decides among several that grow differently."""


def _counterparts(
    wanted: Sequence[_Keys],
    known: Sequence[_Keys],
    at_other_size: Sequence[Hashable],
    *,
    constant: frozenset[Hashable],
) -> list[int] | None:
    """For each key wanted the index of one known; None if there is none, or several that grow differently."""
    index: dict[Hashable, int] = {}
    ambiguous: set[Hashable] = set()
    for i, keys in enumerate(known):
        for key in keys:
            first = index.setdefault(key, i)
            if at_other_size[first] != at_other_size[i]:
                ambiguous.add(key)
    found = []
    for key, finer in wanted:
        chosen = finer if key in ambiguous else key
        if chosen in ambiguous or (chosen not in index and chosen not in constant):
            return None
        found.append(index.get(chosen, _CONSTANT))
    return found
