"""A capture of one step makes optimizer state before it; in training the first update makes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from brimful.trace.records import Category, Event, EventKind, Phase, Trace


def with_state_made_by_first_update(trace: Trace) -> Trace:
    """The allocations of a trace in the order in which training makes them.

    Optimizer state moves from setup to the update of the first step, to where the same op of the optimizer made
    it. The gradients and temporaries with which setup made it are removed, and state that is freed before then.
    Ops do not change.

    The trace has two steps or more, the first of which may be a steady one. It is returned as it is where setup
    has no ops, where gradients are consumed in backward, or where DeepSpeed trains, which creates state first.
    """
    settings = trace.settings
    setup = _setup_of_state(trace)
    update = [i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER and op.step == 0]
    if not setup or not update or settings.optimizer_in_backward or settings.parallelism.is_zero:
        return trace
    places = _places(trace, setup, update)
    freed_at = {event.storage: event.op for event in trace.events if event.kind is EventKind.FREE}
    moved: defaultdict[int, list[int]] = defaultdict(list)
    left_out: set[int] = set()
    made: set[Event] = set()
    for event in trace.events:
        if event.kind is EventKind.ALLOCATE and event.op in places:
            made.add(event)
            if freed_at.get(event.storage, len(trace.ops)) > places[event.op]:
                moved[places[event.op]].append(event.storage)
            else:  # with setup, or as state of a parameter without a gradient
                left_out.add(event.storage)
    rest = (event for event in trace.events if event not in made and event.storage not in left_out)
    return replace(trace, events=tuple(_inserted(rest, moved)))


def _setup_of_state(trace: Trace) -> list[int]:
    """Ops of setup from the first gradient on, with which state is made; not what made the optimizer."""
    categories = {s.op: s.category for s in trace.storages if s.op is not None}
    setup = [i for i, op in enumerate(trace.ops) if op.phase is Phase.SETUP]
    begins = (i for i in setup if categories.get(i, Category.OPTIMIZER_STATE) is not Category.OPTIMIZER_STATE)
    first = next(begins, None)
    return [] if first is None else [i for i in setup if i >= first]


def _places(trace: Trace, setup: list[int], update: list[int]) -> dict[int, int]:
    """For each op of setup the op after which what it made is made in the first update.

    From the end, ops of one name are the same; those of setup alone make state.
    """
    places: dict[int, int] = {}
    left = len(update)
    for i in reversed(setup):
        if left and trace.ops[i].name == trace.ops[update[left - 1]].name:
            left -= 1
            places[i] = update[left]
        else:
            places[i] = (update[left] if left < len(update) else update[-1] + 1) - 1
    return places


def _inserted(events: Iterator[Event], moved: dict[int, list[int]]) -> Iterator[Event]:
    """The events with those that moved, each after all others of its op."""
    waiting = sorted(moved.items())
    for event in events:
        while waiting and waiting[0][0] < event.op:
            op, storages = waiting.pop(0)
            yield from (Event(kind=EventKind.ALLOCATE, storage=storage, op=op) for storage in storages)
        yield event
    for op, storages in waiting:
        yield from (Event(kind=EventKind.ALLOCATE, storage=storage, op=op) for storage in storages)
