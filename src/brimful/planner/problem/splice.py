"""A capture that recomputes every unit → the trace of any choice of actions.

Keeping a unit, or saving some of its ops' results, drops parts of its recomputation: what they would have made
again is what the forward made. If a unit is offloaded, what the forward made is freed when the next unit's
forward ends, and made again when that one's backward begins. So the trace of any choice is that of recomputing
everything with some events dropped and some at other places. It takes a tenth of the time of a capture, and
predicts what the allocator reserves well enough to choose by; the plan's choice is captured in any case.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from msgspec import structs

from brimful.memory import chosen_to_leave
from brimful.memory import pinned_host as host
from brimful.planner.problem.savable_ops import CASTS, UnitCall, unit_calls
from brimful.settings import Action, UnitAction, op_kind
from brimful.trace import Event, EventKind, Op, Phase, Trace, own_checkpointed_units, unit_of_each_op


class Splicer:
    """Makes traces of choices from two captures of a step: one recomputes every unit, one keeps every unit.

    What the forward of units makes that the model checkpoints itself is not kept, whatever is chosen. They stay
    recomputed, which takes a little less than keeping them.
    """

    def __init__(self, recomputed: Trace, kept: Trace, units: Sequence[str]) -> None:
        self._trace = recomputed
        self._own_checkpointed = own_checkpointed_units(kept, units)
        self._calls = [[call for run in runs for call in run] for runs in unit_calls(recomputed, units)]
        self._away = _away(recomputed, self._calls, unit_of_each_op(recomputed, units))
        self._op_of_event = [event.op for event in recomputed.events]
        self._made: dict[int, list[int]] = defaultdict(list)
        """By op, the storages that it returns."""
        self._inside: dict[int, list[int]] = defaultdict(list)
        """By op, other storages that are allocated while it is the latest one begun: memory of its kernel."""
        self._allocated: dict[int, int] = {}
        self._freed: dict[int, int] = {}
        for position, event in enumerate(recomputed.events):
            if event.kind is EventKind.ALLOCATE:
                is_result = recomputed.storages[event.storage].op is not None
                (self._made if is_result else self._inside)[event.op].append(event.storage)
                self._allocated[event.storage] = position
            else:
                self._freed[event.storage] = position
        counterparts = _counterparts(recomputed, kept)
        self._ops_if_kept = frozenset(counterparts.values())
        self._freed_if_kept = _freed_if_kept(recomputed, kept, counterparts, self._made)

    def can_splice(self) -> bool:
        """Whether every unit's recomputation can be matched to its forward."""
        return all(call.pairs is not None for calls in self._calls for call in calls)

    def spliced(self, actions: Sequence[UnitAction]) -> Trace:
        """The step under one action for each unit, in order.

        Its ops are those of recomputing everything, only the events differ, so it has no information about
        time.
        """
        edits = _Edits(self._trace, self._allocated, self._freed)
        for unit, (action, calls) in enumerate(zip(actions, self._calls, strict=True)):
            for call in () if unit in self._own_checkpointed else calls:
                self._apply(action, call, edits)
        return replace(self._trace, events=tuple(edits.events()))

    def _apply(self, action: UnitAction, call: UnitCall, edits: _Edits) -> None:
        """Edit the events of one call of a unit."""
        if action.action is Action.KEEP:
            self._drop_preparation(call, edits)
        if action.action is Action.OFFLOAD and call.again:
            self._offload(call, action.most_offloaded_bytes, edits)
        if action.action in (Action.KEEP, Action.OFFLOAD) and call.again:
            self._keep(call, edits, action.action)
        if action.action is Action.SAVE:
            self._save(call, action.saved, edits)

    def _offload(self, call: UnitCall, most_bytes: int | None, edits: _Edits) -> None:
        """Free what the forward made when the next unit's ends; make it again before the next unit's backward.

        What the unit passes on, and what others hold when it ends, is kept; so is everything where no other
        unit's forward and backward follow.
        """
        if call.forward[0] not in self._away:
            return
        last_op, begins = self._away[call.forward[0]]
        freed_at = bisect_right(self._op_of_event, last_op)
        made_at = bisect_left(self._op_of_event, begins)
        can_leave = self._can_leave(call)
        sizes_bytes = [self._trace.storages[original].size_bytes for original, _ in can_leave]
        for index in chosen_to_leave(sizes_bytes, most_bytes):
            original, storage = can_leave[index]
            edits.dropped.update({self._freed[original], self._allocated[storage]})
            edits.inserted[freed_at].append(Event(kind=EventKind.FREE, storage=original, op=last_op))
            edits.inserted[made_at].append(Event(kind=EventKind.ALLOCATE, storage=storage, op=begins - 1))

    def _can_leave(self, call: UnitCall) -> list[tuple[int, int]]:
        """Storages of the forward and those of the recomputation in their place, which backward needs."""
        found = []
        for original, storage in self._alike(call):
            dropped, freed = self._freed.get(original), self._freed.get(storage)
            is_own = dropped is not None and self._op_of_event[dropped] <= call.forward[-1]
            is_needed = freed is None or self._op_of_event[freed] > call.again[-1]
            size_bytes = self._trace.storages[original].size_bytes
            if is_own and is_needed and size_bytes >= host.LEAST_OFFLOADED_BYTES:
                found.append((original, storage))
        return sorted(found)

    def _alike(self, call: UnitCall) -> list[tuple[int, int]]:
        """Storages of the forward and those of the recomputation in their place.

        Of casts autocast keeps those of weights, so each may run another number of them; those of one size are
        taken for the same, one after another.
        """
        alike = [
            pair
            for in_forward, in_recomputation in (*(call.pairs or {}).values(), *call.input_pairs)
            for pair in zip(self._made[in_forward], self._made[in_recomputation], strict=False)
        ]
        casts: dict[int, list[int]] = defaultdict(list)
        for storage in self._casts(call.forward):
            casts[self._trace.storages[storage].size_bytes].append(storage)
        for storage in self._casts(call.again):
            originals = casts[self._trace.storages[storage].size_bytes]
            if originals:
                alike.append((originals.pop(0), storage))
        return alike

    def _casts(self, ops: Sequence[int]) -> list[int]:
        return [storage for op in ops if _is_cast(self._trace.ops[op]) for storage in self._made[op]]

    def _keep(self, call: UnitCall, edits: _Edits, action: Action) -> None:
        """Drop the whole recomputation; what it leaves for backward is what the forward made.

        A backward node of a kept unit holds what it saved until it ends, one of an offloaded or a recomputed
        unit only until the kernel that reads it begins (`torch.autograd.graph.saved_tensors_hooks`).
        """
        last_op = call.again[-1]
        counterpart = {storage: original for original, storage in self._alike(call)}
        held_until = self._freed_if_kept if action is Action.KEEP else {}
        for op in call.again:
            for storage in (*self._made[op], *self._inside[op]):
                freed = self._freed.get(storage)
                is_left = freed is None or self._trace.events[freed].op > last_op
                original = counterpart.get(storage)
                if self._allocated[storage] in edits.dropped:
                    continue  # offloaded
                if original is not None and self._allocated[original] in edits.dropped:
                    edits.drop(storage)  # copies of buffers, which a kept unit does not make
                elif original in held_until and is_left:
                    last_op_alive = held_until[original]
                    position = bisect_right(self._op_of_event, last_op_alive)
                    edits.merge_until(original, storage, last_op_alive, position)
                elif original is not None and is_left:
                    edits.merge(original, storage)
                elif original is not None or not is_left:
                    edits.drop(storage)

    def _drop_preparation(self, call: UnitCall, edits: _Edits) -> None:
        """Drop what the forward stores for a recomputation: a random state, copies of buffers."""
        before = call.forward[0] - 1
        first_op = next((op for op in call.forward if not self._is_copy(op)), before)
        for op in range(before, first_op):
            made = self._made[op] if op > before and self._is_copy(op) else []
            for storage in (*made, *self._inside[op]):
                freed = self._freed.get(storage)
                if freed is not None and self._op_of_event[freed] > call.forward[-1]:
                    edits.drop(storage)

    def _is_copy(self, op: int) -> bool:
        """Whether an op copies a buffer for a recomputation: a clone that a kept unit does not run."""
        return op_kind(self._trace.ops[op].name) == "clone" and op not in self._ops_if_kept

    def _save(self, call: UnitCall, saved: Sequence[str], edits: _Edits) -> None:
        """Drop some ops of the recomputation."""
        pairs = call.pairs or {}
        for in_forward, in_recomputation in (pairs[name] for name in saved if name in pairs):
            made = zip(self._made[in_forward], self._made[in_recomputation], strict=False)
            for original, storage in made:
                edits.merge(original, storage)
            for storage in self._inside[in_recomputation]:
                edits.drop(storage)


class _Edits:
    """What differs from the events of a trace, given where each storage is allocated and freed."""

    def __init__(self, trace: Trace, allocated: Mapping[int, int], freed: Mapping[int, int]) -> None:
        self._trace = trace
        self._allocated = allocated
        self._freed = freed
        self.dropped: set[int] = set()
        """Positions of events that do not happen."""
        self.inserted: dict[int, list[Event]] = defaultdict(list)
        """Events that happen before the one at a position."""
        self._replaced: dict[int, Event] = {}

    def merge(self, original: int, storage: int) -> None:
        """Let what the forward made serve for what the recomputation made, as long as either is there."""
        self.dropped.add(self._allocated[storage])
        original_freed, freed = self._freed.get(original), self._freed.get(storage)
        if original_freed is None or (freed is not None and original_freed > freed):
            self.dropped.update([] if freed is None else [freed])
            return
        self.dropped.add(original_freed)
        if freed is not None:
            self._replaced[freed] = structs.replace(self._trace.events[freed], storage=original)

    def merge_until(self, original: int, storage: int, last_user: int, position: int) -> None:
        """Merge, but hold what the forward made until an op ends, whose last event is before `position`."""
        self.drop(storage)
        if original in self._freed:
            self.dropped.add(self._freed[original])
        self.inserted[position].append(Event(kind=EventKind.FREE, storage=original, op=last_user))

    def drop(self, storage: int) -> None:
        """Never allocate a storage."""
        self.dropped.add(self._allocated[storage])
        freed = self._freed.get(storage)
        if freed is not None:
            self.dropped.add(freed)

    def events(self) -> Iterator[Event]:
        for position, event in enumerate(self._trace.events):
            yield from self.inserted.get(position, ())
            if position not in self.dropped:
                yield self._replaced.get(position, event)
        yield from self.inserted.get(len(self._trace.events), ())


def _away(
    trace: Trace, calls: Sequence[Sequence[UnitCall]], owner: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """While what each call offloads is away: the last op of the next unit's forward, the first of its backward.

    Calls are named by the first op of their forward. Missing are those that no other unit's forward follows in
    the same micro-batch, or that unit has no backward.
    """
    begins: dict[tuple[int, int], int] = {}
    for index, (op, unit) in enumerate(zip(trace.ops, owner, strict=True)):
        if op.phase is Phase.BACKWARD and op.step == trace.captured_steps - 1 and unit >= 0:
            begins.setdefault((unit, op.micro_batch), index)
    forwards = ((unit, call.forward) for unit, of_unit in enumerate(calls) for call in of_unit if call.forward)
    away = {}
    for (_, forward), (unit, following) in pairwise(sorted(forwards, key=itemgetter(1))):
        micro_batch = trace.ops[following[0]].micro_batch
        if trace.ops[forward[0]].micro_batch == micro_batch and (unit, micro_batch) in begins:
            away[forward[0]] = following[-1], begins[unit, micro_batch]
    return away


def _freed_if_kept(
    recomputed: Trace, kept: Trace, counterparts: Mapping[int, int], made: Mapping[int, Sequence[int]]
) -> dict[int, int]:
    """By storage of the capture that recomputes: the latest op begun when it is freed if its unit is kept."""
    made_if_kept: dict[int, list[int]] = defaultdict(list)
    freed: dict[int, int] = {}
    for event in kept.events:
        if event.kind is EventKind.FREE:
            freed[event.storage] = event.op
        elif (maker := kept.storages[event.storage].op) is not None:
            made_if_kept[maker].append(event.storage)
    return {
        storage: counterparts[freed[same]]
        for op_if_kept, op in counterparts.items()
        for storage, same in zip(made[op], made_if_kept[op_if_kept], strict=False)
        if recomputed.storages[storage].size_bytes == kept.storages[same].size_bytes
        and freed.get(same) in counterparts
    }


def _counterparts(recomputed: Trace, kept: Trace) -> dict[int, int]:
    """By op of the capture that keeps every unit, its counterpart in the capture that recomputes.

    Their ops of forward and backward are the same; only copies of buffers and casts differ in number. The
    mapping is empty if anything else differs.
    """
    found: dict[int, int] = {}
    index = 0
    for position, op in enumerate(recomputed.ops):
        if op.recomputed:
            continue
        while index < len(kept.ops) and kept.ops[index].name != op.name and _is_cast(kept.ops[index]):
            index += 1
        if index < len(kept.ops) and kept.ops[index].name == op.name:
            found[index] = position
            index += 1
        elif not _is_cast(op) and op_kind(op.name) != "clone":
            return {}
    return found


def _is_cast(op: Op) -> bool:
    return op_kind(op.name) == CASTS
