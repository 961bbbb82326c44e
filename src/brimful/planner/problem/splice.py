"""What a step does under any choice of actions, told from a capture that recomputes every unit.

Keeping a unit, or saving some of its ops' results, leaves out parts of its recomputation: what they would have
made again is what the forward made. Offloading a unit, what the forward made is freed when the next unit's
forward ends, and made again when that one's backward begins. So the trace of any choice is that of recomputing
everything with some events left out and some put in another place. It takes a tenth of the time of a capture,
and tells what the allocator will reserve well enough to choose by; what is chosen is captured in the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from brimful.memory import chosen_to_leave
from brimful.memory import pinned_host as host
from brimful.planner.problem.savable_ops import CASTS, UnitCall, unit_calls
from brimful.settings import Action, UnitAction, op_kind
from brimful.trace import Event, EventKind, Phase, Trace


class Splicer:
    """Makes traces of choices.

    Args:
        recomputed: A capture that recomputes every unit.
        owner: By op of the trace, the unit it belongs to, or -1.
        unit_count: How many units there are.
        own_checkpointed: Units that the model checkpoints itself, so that what their forward makes is not kept,
            whatever is chosen. They stay recomputed, which takes a little less than keeping them.
    """

    def __init__(
        self,
        recomputed: Trace,
        owner: Sequence[int],
        unit_count: int,
        own_checkpointed: frozenset[int] = frozenset(),
    ) -> None:
        self._trace = recomputed
        self._own_checkpointed = own_checkpointed
        self._calls = [
            [call for run in runs for call in run] for runs in unit_calls(recomputed, owner, unit_count)
        ]
        self._followed_by = _followed_by(recomputed, self._calls)
        self._backward_begins = _backward_begins(recomputed, owner)
        self._op_of_event = [event.op for event in recomputed.events]
        self._made: dict[int, list[int]] = defaultdict(list)
        """By op, what it returns."""
        self._inside: dict[int, list[int]] = defaultdict(list)
        """By op, what else is allocated while it is the latest one begun: memory of its kernel."""
        self._allocated: dict[int, int] = {}
        self._freed: dict[int, int] = {}
        for position, event in enumerate(recomputed.events):
            if event.kind is EventKind.ALLOCATE:
                is_result = recomputed.storages[event.storage].op is not None
                (self._made if is_result else self._inside)[event.op].append(event.storage)
                self._allocated[event.storage] = position
            else:
                self._freed[event.storage] = position

    def can_splice(self) -> bool:
        """Whether every unit's recomputation can be told from its forward."""
        return all(call.pairs is not None for calls in self._calls for call in calls)

    def spliced(self, actions: Sequence[UnitAction]) -> Trace:
        """The step under some actions.

        Args:
            actions: One for each unit, in order.

        Returns:
            The trace of recomputing everything with other events. Its ops are those of recomputing everything,
            so it tells nothing of time.
        """
        left_out: set[int] = set()
        replaced: dict[int, Event] = {}
        inserted: dict[int, list[Event]] = defaultdict(list)
        for unit, (action, calls) in enumerate(zip(actions, self._calls, strict=True)):
            for call in () if unit in self._own_checkpointed else calls:
                pairs = call.pairs or {}
                if action.action in (Action.KEEP, Action.OFFLOAD) and call.again:
                    if action.action is Action.OFFLOAD:
                        self._offload(call, action.most_offloaded_bytes, left_out, inserted)
                    self._keep(call, left_out, replaced)
                elif action.action is Action.SAVE:
                    for name in action.saved:
                        if name in pairs:
                            self._save(*pairs[name], left_out, replaced)
        events: list[Event] = []
        for position, event in enumerate(self._trace.events):
            events += inserted.get(position, ())
            if position not in left_out:
                events.append(replaced.get(position, event))
        return replace(self._trace, events=(*events, *inserted.get(len(self._trace.events), ())))

    def _offload(
        self,
        call: UnitCall,
        most_bytes: int | None,
        left_out: set[int],
        inserted: dict[int, list[Event]],
    ) -> None:
        """Free what the forward made when the next unit's ends; make it again when that one's backward begins.

        What the unit hands on, and what others hold when it ends, is left to be kept; so is everything where no
        other unit's forward and backward follow.
        """
        following = self._followed_by.get(call.forward[0])
        if following is None:
            return
        unit, micro_batch, last_op = following
        begins = self._backward_begins.get((unit, micro_batch))
        if begins is None:
            return
        freed_at = bisect_right(self._op_of_event, last_op)
        made_at = bisect_left(self._op_of_event, begins)
        can_leave = self._can_leave(call)
        sizes_bytes = [self._trace.storages[original].size_bytes for original, _ in can_leave]
        for index in chosen_to_leave(sizes_bytes, most_bytes):
            original, storage = can_leave[index]
            left_out.update({self._freed[original], self._allocated[storage]})
            inserted[freed_at].append(Event(kind=EventKind.FREE, storage=original, op=last_op))
            inserted[made_at].append(Event(kind=EventKind.ALLOCATE, storage=storage, op=begins - 1))

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
            for in_forward, in_recomputation in (call.pairs or {}).values()
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
        return [
            storage for op in ops if op_kind(self._trace.ops[op].name) == CASTS for storage in self._made[op]
        ]

    def _keep(self, call: UnitCall, left_out: set[int], replaced: dict[int, Event]) -> None:
        """Leave out the whole recomputation; what it leaves for backward is what the forward made."""
        last_op = call.again[-1]
        counterpart = {storage: original for original, storage in self._alike(call)}
        for op in call.again:
            for storage in (*self._made[op], *self._inside[op]):
                freed = self._freed.get(storage)
                is_left = freed is None or self._trace.events[freed].op > last_op
                original = counterpart.get(storage)
                if self._allocated[storage] in left_out:
                    continue  # offloaded
                if original is not None and is_left:
                    self._merge(original, storage, left_out, replaced)
                elif original is not None or not is_left:
                    self._leave_out(storage, left_out)

    def _save(
        self, in_forward: int, in_recomputation: int, left_out: set[int], replaced: dict[int, Event]
    ) -> None:
        """Leave out one op of the recomputation."""
        for original, storage in zip(self._made[in_forward], self._made[in_recomputation], strict=False):
            self._merge(original, storage, left_out, replaced)
        for storage in self._inside[in_recomputation]:
            self._leave_out(storage, left_out)

    def _merge(self, original: int, storage: int, left_out: set[int], replaced: dict[int, Event]) -> None:
        """Let what the forward made serve for what the recomputation made, as long as either is there."""
        left_out.add(self._allocated[storage])
        original_freed, freed = self._freed.get(original), self._freed.get(storage)
        if freed is None:
            left_out.update({original_freed} - {None})  # type: ignore[arg-type]  # there is no None left
        elif original_freed is None or original_freed > freed:
            left_out.add(freed)
        else:
            left_out.add(original_freed)
            replaced[freed] = replace(self._trace.events[freed], storage=original)

    def _leave_out(self, storage: int, left_out: set[int]) -> None:
        left_out.add(self._allocated[storage])
        freed = self._freed.get(storage)
        if freed is not None:
            left_out.add(freed)


def _followed_by(trace: Trace, calls: Sequence[Sequence[UnitCall]]) -> dict[int, tuple[int, int, int]]:
    """By the first op of a call: the next unit in its micro-batch, that, and the last op of its forward."""
    ordered = sorted(
        (call.forward[0], unit, trace.ops[call.forward[0]].micro_batch, call.forward[-1])
        for unit, of_unit in enumerate(calls)
        for call in of_unit
        if call.forward
    )
    return {
        first_op: following[1:]
        for (first_op, _, micro_batch, _), following in pairwise(ordered)
        if following[2] == micro_batch
    }


def _backward_begins(trace: Trace, owner: Sequence[int]) -> dict[tuple[int, int], int]:
    """By unit and micro-batch of the last step, the first op of the backward."""
    begins: dict[tuple[int, int], int] = {}
    for index, (op, unit) in enumerate(zip(trace.ops, owner, strict=True)):
        if op.phase is Phase.BACKWARD and op.step == trace.captured_steps - 1 and unit >= 0:
            begins.setdefault((unit, op.micro_batch), index)
    return begins
