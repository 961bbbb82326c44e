"""Settings but for the micro-batch size → the problems of every size, from as few captures as can be.

Sizes are affine in the micro-batch, so captures at two sizes give those of every divisor of the global batch.
Start reading at `CandidateFamily.of_all_sizes`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from brimful.errors import BatchError, CaptureError, UsageError
from brimful.memory import live_profile, pinned_host_bytes, rounding_bytes_of
from brimful.planner.problem.build import build_problem
from brimful.planner.request import Request
from brimful.planner.solutions import Solutions, peak_allocated_bytes, uniform_actions
from brimful.prediction.estimator import ROUGH_SIZES, Capture, RoughlyScaledTraces
from brimful.settings import Action, Compile, Settings, has_input_ops
from brimful.trace import Trace, unit_of_each_op
from brimful.trace.ddp import per_rank_trace
from brimful.trace.units import (
    divide_unit,
    find_units,
    in_nested_runs,
    in_runs,
    join_input_ops,
    paired,
    undivided,
)

LEAST_SAVING_FRACTION = 0.02
"""Fraction of the peak of recomputing everything that dividing a unit must save; each division takes a
capture."""


class CandidateFamily:
    """All micro-batch sizes under settings that are otherwise the same; `notes` gets what cannot be tried.

    `base` has what all of them share, with the whole batch at once and everything kept. `divides_units` is
    whether units that alone make the peak may be divided, which takes captures.
    """

    def __init__(
        self,
        capture: Capture,
        request: Request,
        base: Settings,
        micro_batch_sizes: Sequence[int],
        notes: list[str],
        *,
        divides_units: bool = True,
    ) -> None:
        self._divides_units = divides_units
        self._capture, self._request, self._base = capture, request, base
        self._sizes, self._notes = micro_batch_sizes, notes
        self._divisions: tuple[tuple[str, ...], ...] | None = None
        """The ways to divide the model into units, which the first size decides for all."""
        self._scaled = RoughlyScaledTraces(capture)

    def of_all_sizes(self) -> list[Solutions]:
        """The problem of each size that can be captured, and others where a unit is divided.

        Sizes that cannot be captured are noted; if none can, the first CaptureError or BatchError is raised.
        """
        found: list[Solutions] = []
        failures: dict[int, CaptureError | BatchError] = {}
        for size in self._sizes:
            try:
                found += self._of_size(size)
            except (CaptureError, BatchError) as error:
                failures[size] = error
        if failures and not found:
            raise next(iter(failures.values()))
        self._notes += _notes_of(failures)
        return found

    def _of_size(self, micro_batch_size: int) -> list[Solutions]:
        settings = self._base.with_micro_batch_size(micro_batch_size)
        kept = eager = self._trace(replace(settings, compile=Compile.NONE))  # as what is recomputed runs
        if self._divisions is None:
            self._divisions = self._unit_divisions(eager, eager.settings)
        traces = [self._all_recomputed(eager.settings, units) if units else eager for units in self._divisions]
        if settings.compile is not Compile.NONE:
            kept = self._compiled(settings, self._divisions[0])
        return [
            Solutions(
                settings=settings,
                device=self._request.device,
                units=units,
                problem=build_problem(
                    kept,
                    recomputed,
                    units,
                    self._request.device,
                    micro_batches=kept.captured_micro_batches,
                    host_bytes=self._host_bytes(settings, kept),
                    eager=eager,
                    priced_by=traces[0],  # one for all divisions, or their host times would seem to differ
                ),
                kept=kept,
                recomputed=recomputed,
                pinned=self._request.recompute,
            )
            for units, recomputed in zip(self._divisions, traces, strict=True)
        ]

    def _compiled(self, settings: Settings, units: tuple[str, ...]) -> Trace:
        """The step with the model compiled, or all of its units, which are kept."""
        return self._trace(replace(settings, units=uniform_actions(units, Action.KEEP)))

    def _host_bytes(self, settings: Settings, kept: Trace) -> int:
        """Host memory for offloaded units; offloading is not tried if ranks shard the model, or compiled."""
        if settings.divides_state or settings.compile is not Compile.NONE:
            return 0
        of_optimizer = pinned_host_bytes(kept) + kept.host_state_bytes
        return max(self._request.offload_host_bytes - of_optimizer, 0)

    def _unit_divisions(self, kept: Trace, settings: Settings) -> tuple[tuple[str, ...], ...]:
        """The model's units, and others that take less where everything is recomputed.

        A unit that alone makes the peak is divided as long as that lowers it: by itself, and where ops that
        make the input of units belong to them. Blocks are paired where much is passed from one to the next,
        and the layers of a Sequential divided into runs that take least.
        What the allocator reserves for each, only replays show.
        """
        units = self._find_units(kept)
        is_whole = not self._divides_units or self._base.compile is not Compile.NONE
        if not units or self._request.recompute is not None or is_whole:
            return (units,)
        divided = self._finer(units, kept, settings)
        joined = self._joined(kept, units)
        if joined != units and not self._lowers_peak(joined, units, settings):
            joined = units
        joined = self._coarser(joined, kept, settings)
        freeing = self._finer(joined, kept, settings, freeing_inputs=True)
        least = self._coarser(freeing, kept, settings)
        pairs = paired(kept, least)
        pairs = least if self._peak_bytes(pairs, settings) is None else pairs
        found = tuple(dict.fromkeys((units, divided, joined, least, pairs)))
        return found + self._in_runs(kept, found, settings)

    def _in_runs(
        self, kept: Trace, divisions: tuple[tuple[str, ...], ...], settings: Settings
    ) -> tuple[tuple[str, ...], ...]:
        """Layers of a Sequential in runs, and in runs to be nested, if the runs take less than any division."""
        runs = in_runs(kept, divisions[-1])
        if not all(self._lowers_peak(runs, division, settings) for division in divisions):
            return ()
        return tuple(dict.fromkeys((runs, in_nested_runs(kept, runs))))

    def _coarser(self, units: tuple[str, ...], kept: Trace, settings: Settings) -> tuple[str, ...]:
        """The units; if input ops belong to some, with parts put together where that lowers the peak."""
        if any(map(has_input_ops, units)):
            for coarser in undivided(kept, units):
                units = coarser if self._lowers_peak(coarser, units, settings) else units
        return units

    def _finer(
        self, units: tuple[str, ...], kept: Trace, settings: Settings, *, freeing_inputs: bool = False
    ) -> tuple[str, ...]:
        """The units, of which one that alone makes the peak is divided, as long as that lowers it."""
        while (at_peak := _unit_at_peak(self._all_recomputed(settings, units), units)) is not None:
            parts = divide_unit(kept, at_peak, freeing_inputs=freeing_inputs)
            parts = self._joined(kept, parts) if freeing_inputs else parts
            place = units.index(at_peak)
            finer = (*units[:place], *parts, *units[place + 1 :])
            if finer == units or not self._lowers_peak(finer, units, settings):
                break
            units = finer
        return units

    def _joined(self, kept: Trace, units: tuple[str, ...]) -> tuple[str, ...]:
        """The units with the ops that make their input; code compiled whole has none that could be followed."""
        return units if kept.compiled_lines else join_input_ops(kept, units)

    def _lowers_peak(self, others: tuple[str, ...], units: tuple[str, ...], settings: Settings) -> bool:
        """Whether recomputing others takes less than recomputing these units, as captures show."""
        peak_bytes, less_bytes = (self._peak_bytes(each, settings) for each in (units, others))
        if peak_bytes is None or less_bytes is None:
            return False
        return less_bytes <= peak_bytes * (1 - LEAST_SAVING_FRACTION)

    def _peak_bytes(self, units: tuple[str, ...], settings: Settings) -> int | None:
        """The peak of recomputing some units; None if that fails, as in what only looks like a Sequential."""
        try:
            return peak_allocated_bytes(self._all_recomputed(settings, units))
        except (CaptureError, UsageError):
            return None

    def _all_recomputed(self, settings: Settings, units: tuple[str, ...]) -> Trace:
        return self._trace(replace(settings, units=uniform_actions(units, Action.RECOMPUTE)))

    def _trace(self, settings: Settings) -> Trace:
        return per_rank_trace(self._scaled.at(settings) if len(self._sizes) > 1 else self._capture(settings))

    def _find_units(self, kept: Trace) -> tuple[str, ...]:
        """Units that can really be recomputed; none, with a note, if recomputing fails."""
        units = () if self._base.compile is Compile.MODEL else find_units(kept)
        if not units:
            return ()
        tried = [kept.settings]
        if len(self._sizes) > 1:
            # Of many sizes, this one is captured anyway; but neither a job nor its model need accept it.
            tried.insert(0, replace(self._base, micro_batch_size=ROUGH_SIZES[0], gradient_accumulation_steps=2))
        for settings in tried:
            try:
                self._capture(replace(settings, units=uniform_actions(units, Action.RECOMPUTE)))
                break
            except BatchError:
                continue
            except CaptureError as error:
                if settings is kept.settings:
                    self._notes.append(f"Nothing is recomputed: doing so fails in this model. {error}")
                    return ()
        return units


def _unit_at_peak(recomputed: Trace, units: tuple[str, ...]) -> str | None:
    """The unit that alone makes the peak of a step that recomputes all units; None if others come near it."""
    profile = live_profile(recomputed, rounding_bytes_of(recomputed.device_kind))
    owner = np.array([*unit_of_each_op(recomputed, units), -1], dtype=np.int64)[profile.ops]
    highest = owner[profile.peak_position]
    elsewhere_bytes = int(profile.live_bytes[owner != highest].max(initial=0))
    stands_out = elsewhere_bytes <= profile.peak_bytes * (1 - LEAST_SAVING_FRACTION)
    return units[highest] if highest >= 0 and stands_out else None


def _notes_of(failures: Mapping[int, Exception]) -> Iterator[str]:
    """A note for each reason for which micro-batches cannot be captured."""
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for size, error in failures.items():
        sizes[str(error).replace(f" (micro_batch_size={size})", "")].append(size)
    for reason, failed in sizes.items():
        yield f"Micro-batches of {', '.join(map(str, failed))} are not considered: {reason}"
