"""Two captures → the solver's problem.

One capture keeps every unit, one recomputes every unit. Whatever the plan, a position of the step holds what
the recompute-everything capture holds there, plus what the kept units before it retain; only inside a kept unit
it holds what the keep-everything capture holds, less what the kept units before it retain *there*. So two
captures give every constraint, for a model of any shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brimful.cost import op_seconds, region_seconds
from brimful.hardware import Device
from brimful.planning.solver import Option, Problem
from brimful.planning.units import UnitIndex
from brimful.settings import Action
from brimful.timeline import live_profile, rounding_bytes_of
from brimful.trace import EventKind, Phase, Trace

ACTIONS = (Action.KEEP, Action.RECOMPUTE)
"""The option indices of a unit in the problem."""

_NO_UNIT = -1


def build_problem(
    kept: Trace, recomputed: Trace, units: tuple[str, ...], device: Device, *, micro_batches: int
) -> Problem:
    """The problem of choosing between keeping and recomputing each unit.

    Args:
        kept: A capture in which every unit is kept.
        recomputed: The same step with every unit recomputed.
        units: In the order in which their forwards end.
        device: Prices the recomputation.
        micro_batches: How many of the captured micro-batches occur: 1 without accumulation.

    Returns:
        One problem whose options are `ACTIONS`.
    """
    in_kept = _Occupancy.of(kept, units, micro_batches)
    in_recomputed = _Occupancy.of(recomputed, units, micro_batches)
    extra = np.maximum(in_kept.retained_bytes - in_recomputed.retained_bytes, 0)
    before = np.concatenate(([0], np.cumsum(extra)))
    seconds = _recompute_seconds(recomputed, units, device)
    peak_kept = in_kept.own_peaks(before)
    peak_recomputed = in_recomputed.own_peaks(np.zeros_like(before))
    options = tuple(
        (
            Option(retained_bytes=int(extra[i]), peak_bytes=int(peak_kept[i]), seconds=0.0),
            Option(retained_bytes=0, peak_bytes=int(peak_recomputed[i]), seconds=float(seconds[i])),
        )
        for i in range(len(units))
    )
    gaps = tuple(int(peak) for peak in in_recomputed.gap_peaks())
    return Problem(units=options, gap_peaks_bytes=gaps)


@dataclass(frozen=True, slots=True)
class _Occupancy:
    """Where in a trace which unit runs, how many units before it are retained, and what is live."""

    live_bytes: NDArray[np.int64]
    """By position: event of the micro-batches and the optimizer phase that occur."""
    owner: NDArray[np.int64]
    """By position: the unit that runs, or -1."""
    prefix: NDArray[np.int64]
    """By position: units whose forward has ended and whose backward has not begun."""
    retained_bytes: NDArray[np.int64]
    """By unit: what its forward leaves until backward begins."""

    @classmethod
    def of(cls, trace: Trace, units: tuple[str, ...], micro_batches: int) -> _Occupancy:
        index = UnitIndex(trace, units)
        owner_of = {module: index.of(module) for module in {op.module for op in trace.ops}}
        last_step = trace.captured_steps - 1
        profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
        op_owner = np.array([owner_of[op.module] for op in trace.ops], dtype=np.int64)
        op_prefix = _prefixes(trace, op_owner, len(units), last_step)
        occurs = np.array(
            [
                op.step == last_step and (op.phase is Phase.OPTIMIZER or op.micro_batch < micro_batches)
                for op in trace.ops
            ]
        )
        positions = np.flatnonzero(profile.ops >= 0)
        positions = positions[occurs[profile.ops[positions]]]
        ops = profile.ops[positions]
        return cls(
            live_bytes=profile.live_bytes[positions],
            owner=op_owner[ops],
            prefix=op_prefix[ops],
            retained_bytes=_retained(trace, op_owner, len(units), last_step),
        )

    def own_peaks(self, retained_before: NDArray[np.int64]) -> NDArray[np.int64]:
        """By unit: the peak inside it, less what the units before it retain in this trace."""
        count = self.retained_bytes.size
        peaks = np.zeros(count, dtype=np.int64)
        inside = self.owner >= 0
        owners = self.owner[inside]
        levels = self.live_bytes[inside] - retained_before[np.minimum(self.prefix[inside], owners)]
        np.maximum.at(peaks, owners, levels)
        return peaks

    def gap_peaks(self) -> NDArray[np.int64]:
        """By number of retained units: the peak outside of all units."""
        peaks = np.zeros(self.retained_bytes.size + 1, dtype=np.int64)
        outside = self.owner < 0
        np.maximum.at(peaks, self.prefix[outside], self.live_bytes[outside])
        return peaks


def _prefixes(trace: Trace, op_owner: NDArray[np.int64], unit_count: int, step: int) -> NDArray[np.int64]:
    """By op: how many units, counted from the first, may be retained while it runs.

    In a chain these are exactly the retained ones. Where units branch, it is the smallest prefix that holds all
    retained ones: never too small.
    """
    prefix = np.zeros(len(trace.ops), dtype=np.int64)
    for micro_batch in range(trace.captured_micro_batches):
        forward, backward = (
            np.array(
                [
                    i
                    for i, op in enumerate(trace.ops)
                    if op.phase is phase and op.step == step and op.micro_batch == micro_batch
                ],
                dtype=np.int64,
            )
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        )
        ended = _extreme(op_owner, forward, unit_count, last=True)
        begun = _extreme(op_owner, backward, unit_count, last=False)
        for ops in (forward, backward):
            for op in ops:
                retained = np.flatnonzero((ended < op) & (begun > op))
                prefix[op] = retained[-1] + 1 if retained.size else 0
    return prefix


def _extreme(
    op_owner: NDArray[np.int64], ops: NDArray[np.int64], unit_count: int, *, last: bool
) -> NDArray[np.int64]:
    """By unit: its first or last op among `ops`; a unit without any is never retained."""
    never = np.iinfo(np.int64).max if last else -1
    found = np.full(unit_count, never, dtype=np.int64)
    for op in ops if last else ops[::-1]:
        if op_owner[op] >= 0:
            found[op_owner[op]] = op
    return found


def _retained(trace: Trace, op_owner: NDArray[np.int64], unit_count: int, step: int) -> NDArray[np.int64]:
    """By unit: bytes made in its first forward of the step and live when backward begins."""
    rounding = rounding_bytes_of(trace.device_kind)
    backward_begins = next(
        i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD and op.step == step
    )
    freed_at = {event.storage: event.op for event in trace.events if event.kind is EventKind.FREE}
    retained = np.zeros(unit_count, dtype=np.int64)
    for index, storage in enumerate(trace.storages):
        if storage.op is None or op_owner[storage.op] < 0:
            continue
        op = trace.ops[storage.op]
        is_of_forward = op.step == step and op.phase is Phase.FORWARD and op.micro_batch == 0
        if is_of_forward and freed_at.get(index, len(trace.ops)) >= backward_begins:
            retained[op_owner[storage.op]] += -(-storage.size_bytes // rounding) * rounding
    return retained


def _recompute_seconds(trace: Trace, units: tuple[str, ...], device: Device) -> NDArray[np.float64]:
    """By unit: seconds that recomputing it once takes."""
    index = UnitIndex(trace, units)
    seconds = np.zeros(len(units))
    last_step, last_micro_batch = trace.captured_steps - 1, trace.captured_micro_batches - 1
    for op in trace.ops:
        if op.recomputed and (op.step, op.micro_batch) == (last_step, last_micro_batch):
            unit = index.of(op.module)
            if unit != _NO_UNIT:
                seconds[unit] += op_seconds(op, device, trace.settings.precision)
    return seconds + region_seconds(device)
