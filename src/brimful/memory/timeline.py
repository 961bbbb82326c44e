"""What memory holds over a trace, by category, in few moments: for charts and exports."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brimful.memory.allocator_settings import AllocatorSettings
from brimful.memory.attribution import HeldStorage, held_storage, replay_allocations
from brimful.memory.liveness import LiveProfile
from brimful.trace import Category, EventKind, Phase, Trace

MOMENTS = 300
"""Moments of a timeline: more than a chart on a phone has pixels for a few each. A choice."""

_LARGEST = 3
"""Blocks that a moment names. A choice."""

_STAYS = frozenset({Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE})
"""Categories whose blocks are not named at each moment: their largest are the same all the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Memory after one event of a trace."""

    position: int
    """Index of the event."""
    phase: Phase
    step: int
    micro_batch: int
    op: str | None
    """Name of the latest op; None in setup."""
    module: str | None
    """`fqn` of that op's module; None in setup."""
    line: str
    """Line of code that calls that op, as "file.py:12"; "" if not known."""
    held_bytes: tuple[int, ...]
    """Bytes in whole blocks, by category in the order of `Category`; they sum to what is allocated."""
    largest: tuple[HeldStorage, ...]
    """The largest blocks but for parameters, gradients and optimizer state, largest first."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.held_bytes)


def memory_timeline(
    trace: Trace, *, allocator: AllocatorSettings | None = None, moments: int = MOMENTS
) -> tuple[Moment, ...]:
    """Moments of a trace in order: events are divided evenly, and each part gives the moment of its peak.

    So the highest moment is the peak of the trace. `allocator` is as for `predict_memory`. A trace without
    events has no moments.
    """
    profile = replay_allocations(trace, allocator=allocator).profile
    count = len(profile.live_bytes)
    parts = np.array_split(np.arange(count), min(moments, count)) if count else []
    positions = [int(part[np.argmax(profile.live_bytes[part])]) for part in parts]
    held = _held_by_category(profile)
    largest = _largest_at(profile, frozenset(positions))
    return tuple(_moment(profile, each, held[:, each], largest[each]) for each in positions)


def _moment(
    profile: LiveProfile, position: int, held: NDArray[np.int64], largest: tuple[HeldStorage, ...]
) -> Moment:
    op = profile.op_at(position)
    return Moment(
        position=position,
        phase=op.phase if op else Phase.SETUP,
        step=op.step if op else 0,
        micro_batch=op.micro_batch if op else 0,
        op=op.name if op else None,
        module=op.module if op else None,
        line=op.line if op else "",
        held_bytes=tuple(held.tolist()),
        largest=largest,
    )


def _held_by_category(profile: LiveProfile) -> NDArray[np.int64]:
    """Bytes held after each event, (C, E), C in the order of `Category`."""
    numbers = {category: number for number, category in enumerate(Category)}
    trace = profile.trace
    events = trace.events[: len(profile.live_bytes)]
    category = np.array([numbers[trace.storages[event.storage].category] for event in events])
    changes = np.diff(profile.live_bytes, prepend=0)
    return np.cumsum(np.where(category == np.arange(len(numbers))[:, None], changes, 0), axis=1)


def _largest_at(profile: LiveProfile, positions: frozenset[int]) -> dict[int, tuple[HeldStorage, ...]]:
    """The largest blocks at some positions, of the categories whose blocks come and go."""
    trace, held = profile.trace, dict[int, int]()
    found: dict[int, tuple[HeldStorage, ...]] = {}
    changes = np.diff(profile.live_bytes, prepend=0).tolist()
    for position, change_bytes in enumerate(changes):
        event = trace.events[position]
        if event.kind is EventKind.FREE:
            held.pop(event.storage, None)
        elif trace.storages[event.storage].category not in _STAYS:
            held[event.storage] = change_bytes
        if position in positions:
            largest = heapq.nlargest(_LARGEST, held.items(), key=lambda item: item[1])
            found[position] = tuple(held_storage(trace, *item) for item in largest)
    return found
