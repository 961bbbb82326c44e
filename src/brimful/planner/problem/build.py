"""Two captures → the solver's problem.

One capture keeps every unit, one recomputes every unit. What both hold when backward begins is there under any
plan; what only the first holds is the price of keeping. With

    u(i)        bytes made in unit i that only the kept capture holds when backward begins; U(i) = Σ_{j<i} u(j)
    V(i)        bytes made before unit i that only the recomputed capture holds: recomputations start from them
    s(i)        bytes that recomputing unit i itself puts by, such as a random state; S(i) = Σ_{j<i} s(j)
    K(t), R(t)  bytes live at a position t of the kept and of the recomputed capture
    k(t)        units begun and not yet through their backward, counted from the first

* Outside of all units a plan holds R(t) - S(k(t)), and for each unit j < k(t) u(j) if kept, s(j) if not.
* The same holds inside a recomputed unit i, with S(i). One exception: at the end of its backward, an earlier
  kept unit may hold memory that the recomputed capture has freed by then, so K(t) - U(i) there counts too.
* Within a kept unit i a plan holds K(t), less U(i), which is there only as far as the units before it are kept,
  and V(i), which is there only as far as they are not.

A unit of which some ops' results are saved is like a recomputed one, with those results held from where its
forward drops them to where its recomputation makes them again; see `savable.py`.

A unit that is offloaded is like a kept one, but what it alone holds is away from where the next unit's forward
ends to where that one's backward begins: it lingers, as `solver.py` calls it. What it is given and returns
stays, as do storages of which the recomputed capture holds the like when the unit's forward ends.

So two captures give every constraint, for a model of any shape. Where units follow one another, and what a
recomputation starts from is saved for backward anyway, the peaks are exact. Elsewhere they are too high: V is
charged even if nothing is recomputed, and a module that is called twice is charged from its first call to its
last. One thing may come out too low: what a unit returns, if it is saved, between the end of the next unit's
backward and the unit's own; splicing and the capture of what is chosen have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from brimful.cost import RecomputePrices
from brimful.devices import Device
from brimful.memory import chosen_to_leave, live_profile, pinned_bytes, rounding_bytes_of
from brimful.memory import pinned_host as host
from brimful.planner.problem.savable_ops import Stay, UnitOps, unit_ops
from brimful.planner.solvers.chain import Option, Problem
from brimful.quantities import round_up
from brimful.settings import Action, UnitAction
from brimful.trace import EventKind, Phase, Trace, unit_of_each_op

KEPT, RECOMPUTED = 0, 1
"""Indices of the first two options of every unit; those that save some ops' results follow."""

NESTED = -1
"""What stands in a choice for a nested unit. It is no option of the problem; see `nested.py`."""

_FORWARD_ENDS, _BACKWARD_BEGINS = 0, 1
"""The two moments at which captures are compared. Between them autocast drops its cast weights, which every
forward holds and only a kept unit holds on to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PosedProblem:
    """The problem of choosing an action for each unit, and what its options mean."""

    problem: Problem
    actions: tuple[tuple[UnitAction, ...], ...]
    """By unit and option."""

    def chosen(self, choice: tuple[int, ...]) -> tuple[UnitAction, ...]:
        """The actions that a choice of options means."""
        return tuple(
            UnitAction(fqn=actions[KEPT].fqn, action=Action.NEST) if option == NESTED else actions[option]
            for actions, option in zip(self.actions, choice, strict=True)
        )


def build_problem(
    kept: Trace,
    recomputed: Trace,
    units: tuple[str, ...],
    device: Device,
    *,
    micro_batches: int,
    host_bytes: int = 0,
    priced_by: Trace | None = None,
) -> PosedProblem:
    """The problem of choosing between keeping, recomputing, saving some, and offloading of each unit.

    Args:
        kept: A capture in which every unit is kept.
        recomputed: The same step with every unit recomputed.
        units: In the order in which their forwards begin.
        device: Prices the recomputation.
        micro_batches: How many of the captured micro-batches occur: 1 without accumulation.
        host_bytes: Pinned host memory permitted for what is offloaded. Where it is too little for all units,
            the first ones may be: theirs is away the longest.
        priced_by: A capture that recomputes other units of the same step, all of them, by which recomputation
            is priced; None takes `recomputed`.

    Returns:
        For each unit an option that keeps it, one that recomputes it, and others not worse than both.
    """
    k = Steady.of(kept, units, micro_batches)
    r = Steady.of(recomputed, units, micro_batches)
    kept_before, starts_before, put_by_before = _differences(k, r)

    alone_bytes = k.live_bytes - kept_before[k.moment, k.first] + starts_before[k.first]
    peaks_kept, gaps_kept = k.peaks(alone_bytes)
    peaks_kept_backward, _ = k.peaks(np.where(k.moment == _BACKWARD_BEGINS, alone_bytes, 0))
    levels_recomputed = r.live_bytes - put_by_before[r.first]
    _, gaps_recomputed = r.peaks(levels_recomputed)

    retained, put_by = np.diff(kept_before[_BACKWARD_BEGINS]), np.diff(put_by_before)
    prices = RecomputePrices(kept, priced_by or recomputed, device)
    all_ops = unit_ops(
        recomputed,
        unit_of_each_op(recomputed, units),
        len(units),
        micro_batches=micro_batches,
        rounding_bytes=rounding_bytes_of(recomputed.device_kind),
        seconds=prices.op_seconds,
    )
    offloads = _offloads(k, r, kept, prices, device, host_bytes)
    problem_units, actions = [], []
    for i, (fqn, ops) in enumerate(zip(units, all_ops, strict=True)):
        keep = Option(retained_bytes=int(retained[i]), peak_bytes=int(peaks_kept[i]), seconds=0.0)
        levels = r.inside(i, levels_recomputed)
        options = [keep, _recompute(ops, levels, int(put_by[i]), int(peaks_kept_backward[i]), prices)]
        meant = [UnitAction(fqn=fqn, action=Action.KEEP), UnitAction(fqn=fqn, action=Action.RECOMPUTE)]
        sets = list(_save_some(ops, levels, options[RECOMPUTED], int(peaks_kept_backward[i]), prices))
        if ops.choices:  # the first set is they alone: they are saved even where all else is recomputed
            options[RECOMPUTED], choices = sets.pop(0)
            meant[RECOMPUTED] = UnitAction(fqn=fqn, action=Action.SAVE, saved=choices)
        for option, saved in sets:
            if not any(_is_dominated(option, by) for by in options):
                options.append(option)
                meant.append(UnitAction(fqn=fqn, action=Action.SAVE, saved=saved))
        if offloads is not None:
            options = [offloads.beside_copies(i, option) for option in options]
            for option, limit in offloads.options(i, options[KEPT]):
                options.append(option)
                meant.append(UnitAction(fqn=fqn, action=Action.OFFLOAD, most_offloaded_bytes=limit))
        problem_units.append(tuple(options))
        actions.append(tuple(meant))
    gaps = np.maximum(gaps_kept, gaps_recomputed)
    problem = Problem(units=tuple(problem_units), gap_peaks_bytes=tuple(int(peak) for peak in gaps))
    return PosedProblem(problem=problem, actions=tuple(actions))


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a unit sends to the host in one micro-batch when it is offloaded."""

    sizes_bytes: tuple[int, ...]
    """Of the storages, as the device's allocator rounds."""

    @property
    def pinned_bytes(self) -> int:
        """What they take of the host."""
        return sum(map(pinned_bytes, self.sizes_bytes))

    def within(self, most_bytes: int) -> _Sent:
        """Those that leave where only so many bytes may."""
        return _Sent(tuple(self.sizes_bytes[i] for i in chosen_to_leave(self.sizes_bytes, most_bytes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offloads:
    """What offloading takes of each unit, and how long its forward and backward are, which hide copies."""

    sent: tuple[_Sent, ...]
    permitted: frozenset[int]
    """Units that may be offloaded."""
    copy_bytes_per_second: float
    forward_seconds: NDArray[np.float64]
    """With what runs between it and the unit before, (n,)."""
    backward_seconds: NDArray[np.float64]
    """With what runs between it and the unit before, (n,)."""
    prices: RecomputePrices

    def beside_copies(self, unit: int, option: Option) -> Option:
        """An option with the times beside which copies of the unit before go on."""
        return replace(
            option,
            forward_seconds=float(self.forward_seconds[unit]),
            backward_seconds=float(self.backward_seconds[unit]) + option.seconds,
        )

    def options(self, unit: int, keep: Option) -> Iterator[tuple[Option, int | None]]:
        """Offload a unit, and as much of it as the next one hides.

        Args:
            unit: One or none of those permitted.
            keep: What it would be if it were kept.

        Yields:
            Options, each with the most bytes that leave, None if all do.
        """
        if unit not in self.permitted:
            return
        whole = self.sent[unit]
        yield self._option(whole, keep), None
        hidden_seconds = min(self.forward_seconds[unit + 1], self.backward_seconds[unit + 1])
        part = whole.within(int(hidden_seconds * self.copy_bytes_per_second))
        if part.sizes_bytes and part != whole:
            yield self._option(part, keep), sum(part.sizes_bytes)

    def _option(self, sent: _Sent, keep: Option) -> Option:
        size_bytes = sum(sent.sizes_bytes)
        return replace(
            keep,
            retained_bytes=keep.retained_bytes - size_bytes,
            lingering_bytes=size_bytes,
            seconds=self.prices.copying_seconds(len(sent.sizes_bytes), size_bytes),
            copy_seconds=size_bytes / self.copy_bytes_per_second,
        )


def _offloads(
    k: Steady, r: Steady, kept: Trace, prices: RecomputePrices, device: Device, host_bytes: int
) -> _Offloads | None:
    """What could be offloaded; None if nothing may be."""
    if not host_bytes or device.host_link_bytes_per_second is None:
        return None
    sent = _sent(k, r)
    permitted, left_bytes = [], host_bytes
    for unit in range(k.unit_count - 1):  # beside the last one's copies nothing would run
        if sent[unit].sizes_bytes and unit in k.called_once and sent[unit].pinned_bytes <= left_bytes:
            permitted.append(unit)
            left_bytes -= sent[unit].pinned_bytes
    forward_seconds, backward_seconds = (
        k.seconds_by_unit(kept, phase, prices) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    return _Offloads(
        sent=sent,
        permitted=frozenset(permitted),
        copy_bytes_per_second=device.host_link_bytes_per_second,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        prices=prices,
    )


def _sent(k: Steady, r: Steady) -> tuple[_Sent, ...]:
    """What units would send: what only the kept capture holds, at both moments, and no unit hands on."""
    only_kept = [k.held[moment] - r.held[moment] for moment in (_FORWARD_ENDS, _BACKWARD_BEGINS)]
    sizes_bytes: list[list[int]] = [[] for _ in range(k.unit_count)]
    for made, count in ((only_kept[0] & only_kept[1]) - r.handed_on).items():
        if made.owner >= 0 and made.is_by_op and made.size_bytes > host.LEAST_OFFLOADED_BYTES:
            sizes_bytes[made.owner] += [made.size_bytes] * count
    return tuple(_Sent(tuple(of_unit)) for of_unit in sizes_bytes)


@dataclass(slots=True)
class _Levels:
    """Bytes at the positions inside one recomputed unit, with nothing retained before it."""

    events: NDArray[np.int64]
    """Of the trace, in order."""
    level_bytes: NDArray[np.int64]

    def add(self, stay: Stay) -> None:
        """Hold a result more, or one less, from one event to another."""
        first, stop = np.searchsorted(self.events, (stay.first_event, stay.stop_event))
        self.level_bytes[first:stop] += stay.size_bytes

    def peak_bytes(self) -> int:
        """The highest level."""
        return int(self.level_bytes.max(initial=0))


def _recompute(
    ops: UnitOps, levels: _Levels, put_by_bytes: int, least_bytes: int, prices: RecomputePrices
) -> Option:
    """Recompute a whole unit; at the end of its backward there is at least what an earlier kept unit holds."""
    return Option(
        retained_bytes=put_by_bytes,
        peak_bytes=max(levels.peak_bytes(), least_bytes),
        seconds=ops.recompute_seconds + prices.region_seconds(),
    )


def _save_some(
    ops: UnitOps, levels: _Levels, recompute: Option, least_bytes: int, prices: RecomputePrices
) -> Iterator[tuple[Option, tuple[str, ...]]]:
    """Recompute a unit but for growing sets of ops."""
    added = 0
    for chosen in ops.sets():
        for op in chosen[added:]:
            for stay in op.stays:
                levels.add(stay)
        added = len(chosen)
        seconds = (
            recompute.seconds - sum(op.seconds for op in chosen) + prices.saving_seconds(ops.forward_count)
        )
        option = Option(
            retained_bytes=recompute.retained_bytes + sum(op.size_bytes for op in chosen),
            peak_bytes=max(least_bytes, levels.peak_bytes()),
            seconds=seconds,
        )
        yield option, tuple(op.name for op in chosen)


def _is_dominated(option: Option, by: Option) -> bool:
    """Whether another option takes no more of anything."""
    return (
        by.retained_bytes <= option.retained_bytes
        and by.peak_bytes <= option.peak_bytes
        and by.seconds <= option.seconds
    )


class _Made(NamedTuple):
    """By what a storage of one capture is known in the other."""

    owner: int
    """The unit it was made in, or -1."""
    begun: int
    """Units begun when it was made."""
    label: str
    size_bytes: int
    is_by_op: bool
    """Else it was put by for what follows."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The last step of a capture by position (P): an event of a micro-batch that occurs or of the optimizer."""

    unit_count: int
    events: NDArray[np.int64]
    """The position of each event in the trace, (P,)."""
    live_bytes: NDArray[np.int64]
    """After each event, (P,)."""
    owner: NDArray[np.int64]
    """The unit that runs, or -1, (P,)."""
    begun: NDArray[np.int64]
    """Units begun and not yet through their backward, counted from the first, (P,)."""
    moment: NDArray[np.int64]
    """Which of the two moments speaks for the position, (P,)."""
    held: tuple[Counter[_Made], Counter[_Made]]
    """What the first forward leaves at each moment."""
    handed_on: Counter[_Made]
    """What units of the first forward make that is there when they end, and gone when the forward ends."""
    called_once: frozenset[int]
    """Units whose ops follow one another in the first forward."""
    op_owner: NDArray[np.int64]
    """The unit that runs each op of the trace, or -1, (ops,)."""
    op_begun: NDArray[np.int64]
    """(ops,)"""

    @classmethod
    def of(cls, trace: Trace, units: tuple[str, ...], micro_batches: int) -> Steady:
        """The last step of a trace, with those of its micro-batches that occur."""
        step = trace.captured_steps - 1
        owner = np.array(unit_of_each_op(trace, units), dtype=np.int64)
        begun = np.zeros(len(trace.ops), dtype=np.int64)
        occurs = np.zeros(len(trace.ops), dtype=bool)
        is_forward = np.zeros(len(trace.ops), dtype=bool)
        occurs[_ops(trace, step, Phase.OPTIMIZER)] = True
        embedding = _ops(trace, step, Phase.EMBEDDING)  # no unit holds anything without gradients
        occurs[embedding], owner[embedding] = True, -1
        for micro_batch in range(micro_batches):
            forward, backward = (
                _ops(trace, step, phase, micro_batch) for phase in (Phase.FORWARD, Phase.BACKWARD)
            )
            begun[forward] = np.maximum.accumulate(owner[forward] + 1)
            begun[backward] = np.maximum.accumulate(owner[backward[::-1]] + 1)[::-1]
            occurs[forward] = occurs[backward] = is_forward[forward] = True
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
            moment=np.where(is_forward[ops], _FORWARD_ENDS, _BACKWARD_BEGINS),
            held=_held(trace, step, owner, begun),
            handed_on=_handed_on(trace, step, owner, begun),
            called_once=_called_once(owner[_ops(trace, step, Phase.FORWARD, 0)]),
            op_owner=owner,
            op_begun=begun,
        )

    @property
    def is_forward(self) -> NDArray[np.bool_]:
        """Whether a position is in the forward pass, (P,)."""
        is_forward: NDArray[np.bool_] = self.moment == _FORWARD_ENDS
        return is_forward

    @property
    def is_inside(self) -> NDArray[np.bool_]:
        """Whether a unit runs and no later one is held, (P,); positions where units overlap are none's own."""
        inside: NDArray[np.bool_] = (self.owner >= 0) & (self.owner + 1 == self.begun)
        return inside

    @property
    def first(self) -> NDArray[np.int64]:
        """The first unit that does not count among those that may be held otherwise, (P,)."""
        return np.where(self.is_inside, self.owner, self.begun)

    def seconds_by_unit(self, trace: Trace, phase: Phase, prices: RecomputePrices) -> NDArray[np.float64]:
        """Seconds of each unit in the last micro-batch, with what runs between it and the unit before, (n,)."""
        ops = _ops(trace, trace.captured_steps - 1, phase, trace.captured_micro_batches - 1)
        unit = np.where(self.op_owner[ops] >= 0, self.op_owner[ops], self.op_begun[ops])
        seconds = [prices.op_seconds(trace.ops[op]) for op in ops.tolist()]
        by_unit = np.bincount(unit, weights=seconds, minlength=self.unit_count).astype(np.float64)
        return by_unit[: self.unit_count]

    def inside(self, unit: int, level_bytes: NDArray[np.int64]) -> _Levels:
        """A copy of the levels within one unit."""
        positions = np.flatnonzero(self.is_inside & (self.owner == unit))
        return _Levels(self.events[positions], level_bytes[positions])

    def peaks(self, levels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The highest level within each unit, and outside of all by the number of units begun."""
        units = np.zeros(self.unit_count, dtype=np.int64)
        gaps = np.zeros(self.unit_count + 1, dtype=np.int64)
        inside = self.is_inside
        np.maximum.at(units, self.owner[inside], levels[inside])
        np.maximum.at(gaps, self.begun[~inside], levels[~inside])
        return units, gaps


def _ops(trace: Trace, step: int, phase: Phase, micro_batch: int | None = None) -> NDArray[np.int64]:
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


def _handed_on(trace: Trace, step: int, owner: NDArray[np.int64], begun: NDArray[np.int64]) -> Counter[_Made]:
    """What units of the first forward make that is there when they end, and gone when the forward ends."""
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    forward = _ops(trace, step, Phase.FORWARD, 0)
    last_op = {int(owner[op]): int(op) for op in forward}
    freed_at = {event.storage: event.op for event in trace.events if event.kind is EventKind.FREE}
    handed_on: Counter[_Made] = Counter()
    for event in trace.events:
        if event.kind is EventKind.ALLOCATE and forward[0] <= event.op <= forward[-1]:
            storage, unit = trace.storages[event.storage], int(owner[event.op])
            if unit >= 0 and last_op[unit] < freed_at.get(event.storage, len(trace.ops)) < forward[-1]:
                size_bytes = round_up(storage.size_bytes, rounding_bytes)
                handed_on[_Made(unit, int(begun[event.op]), storage.label, size_bytes, True)] += 1
    return handed_on


def _held(
    trace: Trace, step: int, owner: NDArray[np.int64], begun: NDArray[np.int64]
) -> tuple[Counter[_Made], Counter[_Made]]:
    """What the first forward of a step makes and leaves when it ends and when its backward begins."""
    rounding_bytes = rounding_bytes_of(trace.device_kind)
    forward = _ops(trace, step, Phase.FORWARD, 0)
    moments = (int(forward[-1]), int(_ops(trace, step, Phase.BACKWARD, 0)[0]))
    freed_at = {event.storage: event.op for event in trace.events if event.kind is EventKind.FREE}
    held: tuple[Counter[_Made], Counter[_Made]] = (Counter(), Counter())
    for event in trace.events:
        storage = trace.storages[event.storage]
        is_by_op = storage.op is not None
        op = event.op if is_by_op else event.op + 1  # what no op made is put by for the next one
        if event.kind is EventKind.ALLOCATE and forward[0] <= op <= forward[-1]:
            size_bytes = round_up(storage.size_bytes, rounding_bytes)
            made = _Made(int(owner[op]), int(begun[op]), storage.label, size_bytes, is_by_op)
            for moment, at_moment in zip(moments, held, strict=True):
                at_moment[made] += freed_at.get(event.storage, len(trace.ops)) >= moment
    return held


def _differences(
    kept: Steady, recomputed: Steady
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """What only one of the captures holds.

    Args:
        kept: Every unit kept.
        recomputed: Every unit recomputed.

    Returns:
        U(i) at each moment, (2, n + 1), V(i), (n + 1,), and S(i), (n + 1,).
    """
    kept_only = np.zeros((2, kept.unit_count + 1), dtype=np.int64)
    put_by = np.zeros(kept.unit_count + 1, dtype=np.int64)
    starts_before = np.zeros(kept.unit_count + 1, dtype=np.int64)
    for moment in (_FORWARD_ENDS, _BACKWARD_BEGINS):
        for made, count in (kept.held[moment] - recomputed.held[moment]).items():
            if made.owner >= 0:  # else it counts as there under any plan
                kept_only[moment, made.owner + 1] += made.size_bytes * count
    for made, count in (recomputed.held[_BACKWARD_BEGINS] - kept.held[_BACKWARD_BEGINS]).items():
        if made.is_by_op or made.owner < 0:
            starts_before[made.begun :] += made.size_bytes * count
        else:
            put_by[made.owner + 1] += made.size_bytes * count
    return np.cumsum(kept_only, axis=1), starts_before, np.cumsum(put_by)
