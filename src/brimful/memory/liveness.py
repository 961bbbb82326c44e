"""How many bytes are live after each event of a trace, and what they hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brimful.errors import UnknownNameError
from brimful.memory.pools import MIN_BLOCK_BYTES
from brimful.trace import Category, EventKind, Op, Phase, Trace
from brimful.utils.quantities import round_up

_ROUNDING_BYTES = {"cpu": 1, "cuda": MIN_BLOCK_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LiveProfile:
    """The bytes held by live storages after each event of a trace, or of its beginning.

    A position is the index of an event; the state at a position is the one after that event. E is the number of
    events.
    """

    trace: Trace
    live_bytes: NDArray[np.int64]
    """Bytes held after each event, (E,)."""
    ops: NDArray[np.int64]
    """Index of the latest op begun at each event, -1 in setup, (E,)."""

    @property
    def peak_position(self) -> int:
        """The first position where most bytes are live; `ValueError` if the profile has no events."""
        return int(np.argmax(self.live_bytes))

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at any position; 0 without events."""
        return int(self.live_bytes.max(initial=0))

    @property
    def last_step(self) -> int:
        """Index of the last optimizer step captured to its end."""
        return self.trace.captured_steps - 1

    def peak_bytes_in_step(self, step: int) -> int:
        """The most bytes live in an optimizer step, what it starts with included; setup belongs to step 0."""
        first, end = np.searchsorted(self._steps(), (step, step + 1))
        return int(self.live_bytes[max(first - 1, 0) : end].max(initial=0))

    def peak_bytes_in_evaluation(self) -> int | None:
        """The most bytes live in the evaluation after the last step; None if none was captured."""
        if self.trace.ops and self.trace.ops[-1].phase is Phase.EVALUATION:
            return self.peak_bytes_in_step(self.trace.ops[-1].step)
        return None

    def op_at(self, position: int) -> Op | None:
        """The latest op begun at a position; None in setup."""
        op = int(self.ops[position])
        return None if op < 0 else self.trace.ops[op]

    def held_bytes_at(self, position: int) -> dict[int, int]:
        """Bytes that each live storage holds, by its index in the trace, oldest first.

        They are what the storage's allocation added to `live_bytes`, so they sum to it.
        """
        changes = np.diff(self.live_bytes[: position + 1], prepend=0).tolist()
        held: dict[int, int] = {}
        for event, change_bytes in zip(self.trace.events[: position + 1], changes, strict=True):
            if event.kind is EventKind.ALLOCATE:
                held[event.storage] = change_bytes
            else:
                del held[event.storage]
        return held

    def breakdown_at(self, position: int) -> tuple[tuple[Category, int], ...]:
        """Live bytes by category, every category in its declared order; they sum to `live_bytes`."""
        totals = dict.fromkeys(Category, 0)
        for storage, held_bytes in self.held_bytes_at(position).items():
            totals[self.trace.storages[storage].category] += held_bytes
        return tuple(totals.items())

    def _steps(self) -> NDArray[np.int64]:
        """Optimizer step of each event, never falling, (E,)."""
        # One more entry at the end is what index -1, setup, picks.
        step_of_op = np.array([*(op.step for op in self.trace.ops), 0], dtype=np.int64)
        return step_of_op[self.ops]


def live_profile(trace: Trace, rounding_bytes: int) -> LiveProfile:
    """The live bytes of a trace after each event, if each storage holds a multiple of `rounding_bytes`.

    `rounding_bytes_of` has this number for a kind of device.
    """
    rounded = [round_up(storage.size_bytes, rounding_bytes) for storage in trace.storages]
    changes = [
        rounded[event.storage] if event.kind is EventKind.ALLOCATE else -rounded[event.storage]
        for event in trace.events
    ]
    return profile_of_levels(trace, np.cumsum(changes, dtype=np.int64))


def profile_of_levels(trace: Trace, live_bytes: Iterable[int] | NDArray[np.int64]) -> LiveProfile:
    """The profile of a trace whose first events lead to these bytes live."""
    levels = np.asarray(live_bytes, dtype=np.int64)
    ops = np.array([event.op for event in trace.events[: len(levels)]], dtype=np.int64)
    return LiveProfile(trace=trace, live_bytes=levels, ops=ops)


def rounding_bytes_of(device_kind: str) -> int:
    """The multiple that sizes are rounded up to on a kind of device, as in `Trace`, in bytes.

    It is 1 on "cpu", where tensors are allocated exactly as requested, and 512 on "cuda". There it is a lower
    bound: a block is larger if its remainder is too small to split off, which only `CachingAllocator`
    simulates. Raises `UnknownNameError` for another kind.
    """
    if device_kind not in _ROUNDING_BYTES:
        raise UnknownNameError("device kind", device_kind, _ROUNDING_BYTES)
    return _ROUNDING_BYTES[device_kind]
