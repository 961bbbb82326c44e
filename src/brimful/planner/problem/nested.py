"""A capture that recomputes everything → the problem of nesting units; its formulas are in `solvers.segments`.

The input of a unit that nesting frees is what the unit before it makes in its forward and what is freed when
its own backward ends. Everything else in the problem is a level of the capture: with nothing nested, these are
what the step takes.

The capture does not show whether code between two units changes what one passes to the next, or something else
holds it too, as a skip connection does; then it is held after all. So what is chosen is captured before it
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from brimful.cost import RecomputePrices
from brimful.devices import Device
from brimful.memory import rounding_bytes_of
from brimful.planner.problem.savable_ops import unit_calls
from brimful.planner.problem.steady_step import SteadyStep
from brimful.planner.solvers.segments import SegmentProblem
from brimful.settings import Action, UnitAction, has_input_ops
from brimful.trace import EventKind, Phase, Trace, unit_of_each_op
from brimful.utils.quantities import round_up


def build_segment_problem(
    kept: Trace,
    recomputed: Trace,
    actions: Sequence[UnitAction],
    device: Device,
    *,
    micro_batches: int,
) -> SegmentProblem | None:
    """The problem of nesting some units while all others are recomputed; None if no unit could be nested.

    `kept` and `recomputed` are captures with every unit kept and every unit recomputed, of whose micro-batches
    `micro_batches` occur. `actions` say how each unit is recomputed, in the order in which their forwards
    begin: where some ops are saved even so, the unit is neither nested nor the one before a nested one.
    """
    units = tuple(action.fqn for action in actions)
    owner = unit_of_each_op(recomputed, units)
    input_bytes = _input_bytes(recomputed, owner, len(units), micro_batches - 1)
    for unit, action in enumerate(actions):
        if has_input_ops(action.fqn):
            input_bytes[unit] = 0  # it is not held anyway
        if action.action is not Action.RECOMPUTE:
            input_bytes[unit : unit + 2] = [0] * len(input_bytes[unit : unit + 2])
    if not any(input_bytes):
        return None
    steady = SteadyStep.of(recomputed, units, micro_batches)
    forward_peaks, backward_peaks = _peaks(steady)
    begins, transients = _begins(steady), _transients(steady, _lasting_bytes(recomputed))
    deriving = [0 if not j else begins[j] - size + transients[j - 1] for j, size in enumerate(input_bytes)]
    return SegmentProblem(
        input_bytes=tuple(input_bytes),
        seconds=tuple(_seconds(kept, recomputed, units, device, micro_batches - 1)),
        forward_peaks_bytes=tuple(forward_peaks),
        backward_peaks_bytes=tuple(backward_peaks),
        deriving_peaks_bytes=tuple(deriving),
    )


def _input_bytes(trace: Trace, owner: list[int], unit_count: int, micro_batch: int) -> list[int]:
    """I: for each unit what the one before it makes and its own backward frees, in one micro-batch."""
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    found = [0] * unit_count
    for event in trace.events:
        maker = trace.storages[event.storage].op
        if event.kind is not EventKind.FREE or maker is None or event.op < 0:
            continue
        made, freed = trace.ops[maker], trace.ops[event.op]
        unit = owner[event.op]
        is_passed_on = unit > 0 and owner[maker] == unit - 1 and made.phase is Phase.FORWARD
        is_last_step = made.step == trace.captured_steps - 1 and made.micro_batch == micro_batch
        if is_passed_on and is_last_step and freed.phase is Phase.BACKWARD:
            found[unit] += round_up(trace.storages[event.storage].size_bytes, rounding_bytes)
    return found


def _peaks(steady: SteadyStep) -> tuple[list[int], list[int]]:
    """W and V of `solvers.segments`, in bytes."""
    count = steady.unit_count
    outside = np.zeros(count + 1, dtype=np.int64)
    backward = np.zeros(count, dtype=np.int64)
    inside, forward = steady.is_inside, steady.is_forward
    # The loss begins its backward with all inputs still freed; before the first forward there are none.
    is_outside = forward | (~inside & ((steady.begun == count) | (steady.begun == 0)))
    np.maximum.at(
        outside, np.where(inside, steady.owner, steady.begun)[is_outside], steady.live_bytes[is_outside]
    )
    behind = np.where(inside, steady.owner, steady.begun - 1)
    np.maximum.at(backward, behind[~is_outside], steady.live_bytes[~is_outside])
    return outside.tolist(), backward.tolist()


def _begins(steady: SteadyStep) -> list[int]:
    """Bytes as each unit's backward begins; the most of any micro-batch."""
    return [
        max((int(steady.live_bytes[max(first - 1, 0)]) for first, _ in runs), default=0)
        for runs in _runs(steady, steady.is_inside & ~steady.is_forward)
    ]


def _transients(steady: SteadyStep, lasting_bytes: NDArray[np.int64]) -> list[int]:
    """What the forward of each unit takes, result included, beside what was there and what stays for good."""
    levels = steady.live_bytes - lasting_bytes[steady.events]
    return [
        max((int(levels[first:stop].max() - levels[max(first - 1, 0)]) for first, stop in runs), default=0)
        for runs in _runs(steady, steady.is_inside & steady.is_forward)
    ]


def _lasting_bytes(trace: Trace) -> NDArray[np.int64]:
    """After each event, bytes of blocks that no op makes and that are never freed, such as workspaces."""
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    freed = {event.storage for event in trace.events if event.kind is EventKind.FREE}
    added = np.zeros(len(trace.events), dtype=np.int64)
    for position, event in enumerate(trace.events):
        storage = trace.storages[event.storage]
        if event.kind is EventKind.ALLOCATE and storage.op is None and event.storage not in freed:
            added[position] = round_up(storage.size_bytes, rounding_bytes)
    return np.cumsum(added)


def _runs(steady: SteadyStep, where: NDArray[np.bool_]) -> list[list[tuple[int, int]]]:
    """By unit: first position and the one behind the last of each stretch of positions of its own."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(steady.unit_count)]
    owner = np.where(where, steady.owner, -1)
    borders = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    for first, stop in pairwise(borders):
        if stop > first and owner[first] >= 0:
            found[int(owner[first])].append((first, stop))
    return found


def _seconds(
    kept: Trace, recomputed: Trace, units: Sequence[str], device: Device, micro_batch: int
) -> list[float]:
    """c: of running the forward of the unit before each once more."""
    prices = RecomputePrices(kept, recomputed, device)
    forwards = [
        sum(prices.op_seconds(recomputed.ops[index]) for call in runs[micro_batch] for index in call.forward)
        for runs in unit_calls(recomputed, units)
    ]
    return [0.0, *(seconds + prices.nested_forward_seconds() for seconds in forwards[:-1])]
