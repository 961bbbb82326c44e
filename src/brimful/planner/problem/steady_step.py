"""A capture → its last step by position: live bytes, the unit that runs, and the storages held at two moments.

`build` compares the steps of two captures, one with every unit kept and one with every unit recomputed. Nothing
identifies a storage across captures, so they are counted by `StorageKey`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brimful.cost import RecomputePrices
from brimful.memory import live_profile, rounding_bytes_of
from brimful.trace import EventKind, Phase, Trace, unit_of_each_op
from brimful.utils.quantities import round_up

FORWARD_ENDS, BACKWARD_BEGINS = 0, 1
"""The two moments at which captures are compared. Between them autocast drops its cast weights, which every
forward holds and only a kept unit keeps."""


class StorageKey(NamedTuple):
    """What a storage of one capture and its counterpart in the other have in common."""

    owner: int
    """The unit it was made in, or -1."""
    begun: int
    """Units begun when it was made."""
    label: str
    size_bytes: int
    is_by_op: bool
    """Whether an op made it; else it was stored for a recomputation, such as a random state."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """The last step of a capture by position (P): an event of a micro-batch that occurs or of the optimizer."""

    unit_count: int
    events: NDArray[np.int64]
    """The position of each event in the trace, (P,)."""
    live_bytes: NDArray[np.int64]
    """Live bytes after each event, (P,)."""
    owner: NDArray[np.int64]
    """The unit that runs, or -1, (P,)."""
    begun: NDArray[np.int64]
    """Units begun and not yet through their backward, counted from the first, (P,)."""
    moment: NDArray[np.int64]
    """The moment at which captures are compared for the position, (P,)."""
    held: tuple[Counter[StorageKey], Counter[StorageKey]]
    """What the first forward leaves at each moment."""
    passed_on: Counter[StorageKey]
    """What units of the first forward make that is there when they end, and gone when the forward ends."""
    called_once: frozenset[int]
    """Units whose ops follow one another in the first forward."""
    op_owner: NDArray[np.int64]
    """The unit that runs each op of the trace, or -1, (ops,)."""
    op_begun: NDArray[np.int64]
    """Units begun when each op of the trace runs, (ops,)."""

    @classmethod
    def of(cls, trace: Trace, units: tuple[str, ...], micro_batches: int) -> SteadyStep:
        """The last step of a trace, with those of its micro-batches that occur."""
        step = trace.captured_steps - 1
        owner = np.array(unit_of_each_op(trace, units), dtype=np.int64)
        begun = np.zeros(len(trace.ops), dtype=np.int64)
        occurs = np.zeros(len(trace.ops), dtype=bool)
        is_forward = np.zeros(len(trace.ops), dtype=bool)
        occurs[_ops_of(trace, step, Phase.OPTIMIZER)] = True
        embedding = _ops_of(trace, step, Phase.EMBEDDING)  # no unit holds anything without gradients
        occurs[embedding], owner[embedding] = True, -1
        for micro_batch in range(micro_batches):
            forward, backward = (
                _ops_of(trace, step, phase, micro_batch) for phase in (Phase.FORWARD, Phase.BACKWARD)
            )
            begun[forward] = np.maximum.accumulate(owner[forward] + 1)
            begun[backward] = np.maximum.accumulate(owner[backward[::-1]] + 1)[::-1]
            occurs[forward] = occurs[backward] = is_forward[forward] = True
        held, passed_on = _held(trace, step, owner, begun)
        profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
        positions = np.flatnonzero(profile.ops >= 0)
        positions = positions[occurs[profile.ops[positions]]]
        ops = profile.ops[positions]
        return cls(
            unit_count=len(units),
            events=positions,
            live_bytes=profile.live_bytes[positions],
            owner=owner[ops],
            begun=begun[ops],
            moment=np.where(is_forward[ops], FORWARD_ENDS, BACKWARD_BEGINS),
            held=held,
            passed_on=passed_on,
            called_once=_called_once(owner[_ops_of(trace, step, Phase.FORWARD, 0)]),
            op_owner=owner,
            op_begun=begun,
        )

    @property
    def is_forward(self) -> NDArray[np.bool_]:
        """Whether a position is in the forward pass, (P,)."""
        is_forward: NDArray[np.bool_] = self.moment == FORWARD_ENDS
        return is_forward

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        """Whether a unit runs and no later one is held, (P,): where units overlap, neither is alone."""
        inside: NDArray[np.bool_] = (self.owner >= 0) & (self.owner + 1 == self.begun)
        return inside

    @property
    def first(self) -> NDArray[np.int64]:
        """The first unit that does not count among those that may be held otherwise, (P,)."""
        return np.where(self.is_inside, self.owner, self.begun)

    def seconds_by_unit(self, trace: Trace, phase: Phase, prices: RecomputePrices) -> NDArray[np.float64]:
        """Seconds of each unit in the last micro-batch, with what runs between it and the unit before, (n,)."""
        ops = _ops_of(trace, trace.captured_steps - 1, phase, trace.captured_micro_batches - 1)
        unit = np.where(self.op_owner[ops] >= 0, self.op_owner[ops], self.op_begun[ops])
        seconds = [prices.op_seconds(trace.ops[op]) for op in ops.tolist()]
        by_unit = np.bincount(unit, weights=seconds, minlength=self.unit_count).astype(np.float64)
        return by_unit[: self.unit_count]

    def peaks(self, levels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The highest level within each unit, and outside of all by the number of units begun."""
        units = np.zeros(self.unit_count, dtype=np.int64)
        gaps = np.zeros(self.unit_count + 1, dtype=np.int64)
        inside = self.is_inside
        np.maximum.at(units, self.owner[inside], levels[inside])
        np.maximum.at(gaps, self.begun[~inside], levels[~inside])
        return units, gaps


def _ops_of(trace: Trace, step: int, phase: Phase, micro_batch: int | None = None) -> NDArray[np.int64]:
    """Indices of the ops of a part of a step, in order."""
    indices = [
        i
        for i, op in enumerate(trace.ops)
        if op.phase is phase and op.step == step and (micro_batch is None or op.micro_batch == micro_batch)
    ]
    return np.array(indices, dtype=np.int64)


def _called_once(owner: NDArray[np.int64]) -> frozenset[int]:
    """Units whose ops follow one another, given the owners of the ops of a forward."""
    first_ops = owner[np.flatnonzero(np.diff(owner, prepend=-1))]
    return frozenset(unit for unit, count in Counter(first_ops.tolist()).items() if count == 1 and unit >= 0)


def _held(
    trace: Trace, step: int, owner: NDArray[np.int64], begun: NDArray[np.int64]
) -> tuple[tuple[Counter[StorageKey], Counter[StorageKey]], Counter[StorageKey]]:
    """What the first forward of a step leaves when it ends and when backward begins, and what units pass on."""
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    forward = _ops_of(trace, step, Phase.FORWARD, 0)
    moments = (int(forward[-1]), int(_ops_of(trace, step, Phase.BACKWARD, 0)[0]))
    last_op = {int(owner[op]): int(op) for op in forward}
    freed_at = {event.storage: event.op for event in trace.events if event.kind is EventKind.FREE}
    held: tuple[Counter[StorageKey], Counter[StorageKey]] = (Counter(), Counter())
    passed_on: Counter[StorageKey] = Counter()
    for event in trace.events:
        storage = trace.storages[event.storage]
        is_by_op = storage.op is not None
        op = event.op if is_by_op else event.op + 1  # what no op made is stored for the next one
        if event.kind is EventKind.ALLOCATE and forward[0] <= op <= forward[-1]:
            unit, freed = int(owner[op]), freed_at.get(event.storage, len(trace.ops))
            size_bytes = round_up(storage.size_bytes, rounding_bytes)
            made = StorageKey(unit, int(begun[op]), storage.label, size_bytes, is_by_op)
            for moment, at_moment in zip(moments, held, strict=True):
                at_moment[made] += freed >= moment
            if is_by_op and unit >= 0 and last_op[unit] < freed < forward[-1]:
                passed_on[made] += 1
    return held, passed_on
