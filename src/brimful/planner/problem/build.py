"""Two captures → the solver's problem.

One capture keeps every unit, one recomputes every unit. What both hold when backward begins is there under any
plan; what only the first holds is the price of keeping. With

    u(i)        bytes made in unit i that only the kept capture holds when backward begins; U(i) = Σ_{j<i} u(j)
    V(i)        bytes made before unit i that only the recomputed capture holds: recomputations start from them
    s(i)        bytes that recomputing unit i stores by itself, such as a random state; S(i) = Σ_{j<i} s(j)
    K(t), R(t)  bytes live at a position t of the kept and of the recomputed capture
    k(t)        units begun and not yet through their backward, counted from the first

* Outside of all units a plan holds R(t) - S(k(t)), and for each unit j < k(t) u(j) if kept, s(j) if not.
* The same holds inside a recomputed unit i, with S(i). One exception: at the end of its backward, an earlier
  kept unit may hold memory that the recomputed capture has freed by then, so K(t) - U(i) there counts too.
* Within a kept unit i a plan holds K(t), less U(i), which is there only as far as the units before it are kept,
  and V(i), which is there only as far as they are not.

A unit of which some ops' results are saved is like a recomputed one, with those results held from where its
forward drops them to where its recomputation makes them again; see `savable_ops`.

A unit that is offloaded is like a kept one, but what it alone holds is away from where the next unit's forward
ends to where that one's backward begins: it lingers, as `solvers.chain` calls it. What it is given and returns
stays, as do storages of which the recomputed capture holds the like when the unit's forward ends.

So two captures give every constraint, for a model of any shape. Where units follow one another, and what a
recomputation starts from is saved for backward anyway, the peaks are exact. Elsewhere they are too high: V is
charged even if nothing is recomputed, and a module that is called twice is charged from its first call to its
last. One thing may come out too low: what a unit returns, if it is saved, between the end of the next unit's
backward and the unit's own; splicing and the capture of what is chosen have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from brimful.cost import RecomputePrices, step_seconds
from brimful.devices import Device
from brimful.planner.problem.offloading import offload_options
from brimful.planner.problem.savable_ops import UnitOps, unit_ops
from brimful.planner.problem.steady_step import BACKWARD_BEGINS, FORWARD_ENDS, SteadyStep
from brimful.planner.solvers.chain import Option, Problem
from brimful.settings import Action, UnitAction, has_input_ops
from brimful.trace import Trace

KEPT, RECOMPUTED = 0, 1
"""Indices of the first two options of every unit; those that save some ops' results follow."""

NESTED = -1
"""The entry of a nested unit in a choice. The chain solver has no such option; see `nested`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """The problem of choosing an action for each unit: the solver's options and the actions they mean."""

    chain: Problem
    actions: tuple[tuple[UnitAction, ...], ...]
    """Actions by unit and option."""

    def chosen(self, choice: tuple[int, ...]) -> tuple[UnitAction, ...]:
        """The actions that a choice of options means."""
        return tuple(
            UnitAction(fqn=actions[KEPT].fqn, action=Action.NEST) if option == NESTED else actions[option]
            for actions, option in zip(self.actions, choice, strict=True)
        )

    @property
    def offloads(self) -> bool:
        """Whether some unit may be offloaded."""
        return any(action.action is Action.OFFLOAD for actions in self.actions for action in actions)

    def without_offloading(self) -> PlanningProblem:
        """The problem without options that offload, which are the last ones of each unit."""
        actions = tuple(
            tuple(action for action in of_unit if action.action is not Action.OFFLOAD)
            for of_unit in self.actions
        )
        pairs = zip(self.chain.units, actions, strict=True)
        units = tuple(options[: len(of_unit)] for options, of_unit in pairs)
        return PlanningProblem(chain=replace(self.chain, units=units), actions=actions)


_Choices = list[tuple[Option, UnitAction]]
"""The options of one unit, each with the action that it means."""


def build_problem(
    kept: Trace,
    recomputed: Trace,
    units: tuple[str, ...],
    device: Device,
    *,
    micro_batches: int,
    host_bytes: int = 0,
    eager: Trace | None = None,
    priced_by: Trace | None = None,
) -> PlanningProblem:
    """The problem of choosing between keeping, recomputing, saving some, and offloading of each unit.

    Args:
        kept: A capture in which every unit is kept.
        recomputed: The same step with every unit recomputed.
        units: In the order in which their forwards begin.
        device: Prices the recomputation.
        micro_batches: How many of the captured micro-batches occur: 1 without accumulation.
        host_bytes: Pinned host memory permitted for what is offloaded. Where it is too little for all units,
            the first ones may be: theirs is away the longest.
        eager: Where `kept` is compiled, the same step as it runs eagerly, which is how recomputed units run;
            None takes `kept`.
        priced_by: A capture that recomputes other units of the same step, all of them, by which recomputation
            is priced; None takes `recomputed`.

    Returns:
        For each unit an option that keeps it, one that recomputes it, and others not worse than both.
    """
    k = SteadyStep.of(kept, units, micro_batches)
    r = SteadyStep.of(recomputed, units, micro_batches)
    bytes_ = _Bytes.of(k, r)
    eager = eager or kept
    prices = RecomputePrices(eager, priced_by or recomputed, device)
    eager_seconds = _seconds_of_running_eagerly(eager, kept, device) / max(len(units), 1)
    offloads = offload_options(k, r, kept, prices, device, host_bytes)
    all_ops = unit_ops(recomputed, units, micro_batches=micro_batches, seconds=prices.op_seconds)
    by_unit = []
    for i, (fqn, ops) in enumerate(zip(units, all_ops, strict=True)):
        choices = _without_offload(i, fqn, ops, bytes_, prices, eager_seconds)
        if offloads is not None:
            choices = [(offloads.beside_copies(i, option), action) for option, action in choices]
            if not has_input_ops(fqn):  # what it is given does not leave
                choices += offloads.options(i, fqn, keep=choices[KEPT][0])
        by_unit.append(choices)
    return PlanningProblem(
        chain=Problem(
            units=tuple(tuple(option for option, _ in choices) for choices in by_unit),
            gap_peaks_bytes=bytes_.gap_peaks,
        ),
        actions=tuple(tuple(action for _, action in choices) for choices in by_unit),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """What units retain and take, by the formulas above; n units, P positions of the recomputed step."""

    retained: NDArray[np.int64]
    """u, (n,)."""
    stored: NDArray[np.int64]
    """s, (n,)."""
    kept_peaks: NDArray[np.int64]
    """Peaks inside a kept unit, with nothing retained before it, (n,)."""
    kept_backward_peaks: NDArray[np.int64]
    """Peaks in a kept unit's backward alone, with nothing retained before it, (n,)."""
    gap_peaks: tuple[int, ...]
    """Peaks outside of all units, n + 1 of them."""
    recomputed: SteadyStep
    recomputed_levels: NDArray[np.int64]
    """Levels with nothing retained before the unit that runs, (P,)."""

    @classmethod
    def of(cls, k: SteadyStep, r: SteadyStep) -> _Bytes:
        """Compute the bytes from the kept step `k` and the recomputed step `r`."""
        kept_before, starts_before, stored_before = _differences(k, r)
        alone = k.live_bytes - kept_before[k.moment, k.first] + starts_before[k.first]
        kept_peaks, kept_gaps = k.peaks(alone)
        kept_backward_peaks, _ = k.peaks(np.where(k.moment == BACKWARD_BEGINS, alone, 0))
        recomputed_levels = r.live_bytes - stored_before[r.first]
        _, recomputed_gaps = r.peaks(recomputed_levels)
        return cls(
            retained=np.diff(kept_before[BACKWARD_BEGINS]),
            stored=np.diff(stored_before),
            kept_peaks=kept_peaks,
            kept_backward_peaks=kept_backward_peaks,
            gap_peaks=tuple(np.maximum(kept_gaps, recomputed_gaps).tolist()),
            recomputed=r,
            recomputed_levels=recomputed_levels,
        )

    def inside(self, unit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Events within one recomputed unit, and a copy of the levels at them."""
        positions = np.flatnonzero(self.recomputed.is_inside & (self.recomputed.owner == unit))
        return self.recomputed.events[positions], self.recomputed_levels[positions]


def _seconds_of_running_eagerly(eager: Trace, kept: Trace, device: Device) -> float:
    """Seconds by which a micro-batch takes longer if no unit is compiled; 0 where none is."""
    if eager is kept:
        return 0.0
    more = step_seconds(eager, device).total_seconds - step_seconds(kept, device).total_seconds
    return max(more, 0.0) / kept.settings.gradient_accumulation_steps


def _without_offload(
    i: int, fqn: str, ops: UnitOps, bytes_: _Bytes, prices: RecomputePrices, eager_seconds: float
) -> _Choices:
    """Keep unit i, recompute it, or recompute it but for some ops, where no other option is better.

    What is not kept is not compiled either, which takes `eager_seconds`. At the end of a recomputed unit's
    backward there is at least what an earlier kept unit holds.
    """
    (events, levels), least_bytes = bytes_.inside(i), int(bytes_.kept_backward_peaks[i])
    keep = Option(retained_bytes=int(bytes_.retained[i]), peak_bytes=int(bytes_.kept_peaks[i]), seconds=0.0)
    recompute = Option(
        retained_bytes=int(bytes_.stored[i]),
        peak_bytes=max(int(levels.max(initial=0)), least_bytes),
        seconds=ops.recompute_seconds + prices.region_seconds() + eager_seconds,
    )
    choices = [
        (keep, UnitAction(fqn=fqn, action=Action.KEEP)),
        (recompute, UnitAction(fqn=fqn, action=Action.RECOMPUTE)),
    ]
    sets = [
        (option, UnitAction(fqn=fqn, action=Action.SAVE, saved=saved))
        for option, saved in _save_some(ops, events, levels, recompute, least_bytes, prices)
    ]
    if ops.choices:  # the first set has only these: they are saved even where all else is recomputed
        choices[RECOMPUTED] = sets.pop(0)
    for option, action in sets:
        if not any(_is_dominated(option, by) for by, _ in choices):
            choices.append((option, action))
    return choices


def _save_some(
    ops: UnitOps,
    events: NDArray[np.int64],
    levels: NDArray[np.int64],
    recompute: Option,
    least_bytes: int,
    prices: RecomputePrices,
) -> Iterator[tuple[Option, tuple[str, ...]]]:
    """Recompute a unit but for growing sets of ops, whose results are added to the levels at events."""
    added = 0
    for chosen in ops.sets():
        for op in chosen[added:]:
            for extension in op.extensions:
                first, stop = np.searchsorted(events, (extension.first_event, extension.stop_event))
                levels[first:stop] += extension.size_bytes
        added = len(chosen)
        saved_seconds = sum(op.seconds for op in chosen)
        option = Option(
            retained_bytes=recompute.retained_bytes + sum(op.size_bytes for op in chosen),
            peak_bytes=max(least_bytes, int(levels.max(initial=0))),
            seconds=recompute.seconds - saved_seconds + prices.saving_seconds(ops.forward_count),
        )
        yield option, tuple(op.name for op in chosen)


def _is_dominated(option: Option, by: Option) -> bool:
    """Whether another option takes no more of anything."""
    return (
        by.retained_bytes <= option.retained_bytes
        and by.peak_bytes <= option.peak_bytes
        and by.seconds <= option.seconds
    )


def _differences(
    kept: SteadyStep, recomputed: SteadyStep
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """U(i) at each moment, (2, n + 1), V(i), (n + 1,), and S(i), (n + 1,): what one capture alone holds."""
    kept_only = np.zeros((2, kept.unit_count + 1), dtype=np.int64)
    stored = np.zeros(kept.unit_count + 1, dtype=np.int64)
    starts_before = np.zeros(kept.unit_count + 1, dtype=np.int64)
    for moment in (FORWARD_ENDS, BACKWARD_BEGINS):
        for made, count in (kept.held[moment] - recomputed.held[moment]).items():
            if made.owner >= 0:  # else it counts as there under any plan
                kept_only[moment, made.owner + 1] += made.size_bytes * count
    for made, count in (recomputed.held[BACKWARD_BEGINS] - kept.held[BACKWARD_BEGINS]).items():
        if made.is_by_op or made.owner < 0:
            starts_before[made.begun :] += made.size_bytes * count
        else:
            stored[made.owner + 1] += made.size_bytes * count
    return np.cumsum(kept_only, axis=1), starts_before, np.cumsum(stored)
