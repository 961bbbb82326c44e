"""Steps with a change of what is computed: the fastest that is within the budget.

Start reading at `fastest_with`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from brimful.errors import BatchError, CaptureError, UsageError
from brimful.memory import AllocatorSettings, replay_allocations
from brimful.planner.candidate import Candidate
from brimful.planner.explain.changes import Change
from brimful.planner.family import CandidateFamily
from brimful.planner.fastest import by_least_time
from brimful.planner.floor import Floor
from brimful.planner.headroom import exceedance_of, lowered_limit
from brimful.planner.request import Request
from brimful.planner.solutions import uniform_actions
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture, RoughlyScaledTraces
from brimful.settings import Action, Parallelism, Settings, UnitAction
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace
from brimful.trace.units import find_units

HIGHEST_EXCEEDANCE = 0.5
"""Probability of exceeding the budget from which a step counts as one that does not fit."""


@dataclass(frozen=True, slots=True)
class Context:
    """What suggestions are for."""

    capture: Capture
    request: Request
    baseline: Trace
    """Training without a plan."""
    chosen: Estimate
    """The choice of the plan, or what takes least."""
    most_seconds: float = math.inf
    """Slower steps are not of interest."""
    searches: bool = True
    """Whether actions for units are searched, and micro-batches other than that of the choice tried."""
    most_samples: int | None = None
    """Larger micro-batches are not tried, as they gain nothing; None if they may."""
    notes: list[str] = field(default_factory=list)
    """Changes whose steps cannot be captured are noted here."""

    def note_skipped(self, change: Change, error: CaptureError | BatchError) -> None:
        """Note why a change is not suggested, once for the same reason."""
        if not change.may_be_refused and not any(str(error) in note for note in self.notes):
            self.notes.append(f"{change.name}: not suggested, as its step cannot be predicted: {error}")

    def is_safe(self, estimate: Estimate) -> bool:
        """Whether a step exceeds the budget as rarely as is asked for, or as the choice does."""
        return self.lowered_limit(estimate) is None

    def lowered_limit(self, estimate: Estimate) -> int | None:
        """Reserved bytes below which a step would be safe; None if it is."""
        permitted = self.request.asked.max_exceedance
        own = exceedance_of(self.chosen, self.request)
        if own < HIGHEST_EXCEEDANCE:
            permitted = max(permitted, own)
        return lowered_limit(estimate.device_peak, self.request, permitted)


def fastest_with(change: Change, context: Context) -> Estimate | None:
    """The fastest step found with a change that is within the budget; None if there is none."""
    return _found(change, context, lambda changed: changed.fastest())


def accumulated_with(change: Change, context: Context) -> Estimate | None:
    """The largest micro-batch below that of the choice that fits with a change; None if there is none."""
    return _found(change, context, lambda changed: changed.accumulated())


def _found(
    change: Change, context: Context, find: Callable[[ChangedSteps], Estimate | None]
) -> Estimate | None:
    if _floor_bytes(change, context) > context.request.reserved_budget_bytes:
        return None
    try:
        return find(ChangedSteps(change, context))
    except (CaptureError, BatchError) as error:
        context.note_skipped(change, error)
    except UsageError:  # what is pinned may not go with it
        pass
    return None


def _floor_bytes(change: Change, context: Context) -> int:
    """Bytes that every step with a change holds at once, as far as training without a plan shows them."""
    if change.floor_bytes is not None:
        return change.floor_bytes
    has_state = "optimizer" not in change.settings
    held_bytes = Floor.of(context.baseline, context.request, has_state=has_state).held_bytes
    ranks = change.settings.get("world_size", 1)
    return held_bytes // int(ranks) if change.settings.get("parallelism") is Parallelism.FSDP2 else held_bytes


class ChangedSteps:
    """Steps with a change: what is kept, what a search of a few micro-batch sizes finds."""

    def __init__(self, change: Change, context: Context) -> None:
        request, chosen = context.request, context.chosen.settings
        self._change, self._context, self._request, self._chosen = change, context, request, chosen
        world_size = int(change.settings.get("world_size", request.world_size))
        self._rank_batch = request.global_batch_size // world_size
        keeps_units = not context.searches and change.capture is None
        plain: dict[str, Any] = {
            "units": chosen.units if keeps_units else (),
            "micro_batch_size": self._rank_batch,
            "gradient_accumulation_steps": 1,
        }
        if change.capture is not None:  # another model: other names, other bytes
            plain |= {"chunked_loss": None, "offload_optimizer": False}
        self._base = replace(chosen, **{**plain, **change.settings})
        capture = context.capture if change.capture is None else change.capture
        self._is_replicated = world_size > request.world_size and self._base.parallelism is Parallelism.DDP
        self._capture = _on_one_rank(capture, chosen) if self._is_replicated else capture
        self._scaled = RoughlyScaledTraces(self._capture)

    def fastest(self) -> Estimate | None:
        """The first that fits of what is kept, searched, and done to units by the choice.

        Where the choice nests units and the change leaves the state as it is, only the choice is tried: keeping
        everything hardly fits then, and a search takes as many captures as a plan.
        """
        if not self._context.searches:
            return self.recomputed() or self.kept()
        if self.is_divided or (self.nests and self._change.keeps_state):
            return self.as_chosen()
        if self._is_replicated and self._chosen.changed:  # each rank does what the plan does, with fewer parts
            return self.as_chosen() or self.kept() or self.searched()
        return self.kept() or self.searched() or (self.as_chosen() if self.nests else None)

    def kept(self) -> Estimate | None:
        """Everything kept at the largest micro-batch that fits, if it is as large as that of the choice."""
        if not self._change.takes_less or self._request.recompute is Action.RECOMPUTE:
            return None
        sizes = [size for size in self.sizes if size >= self._least_size]
        return self._largest_kept(sizes if self._context.searches else sizes[:1])

    def accumulated(self) -> Estimate | None:
        """The largest micro-batch below that of the choice that fits with the change."""
        sizes = [each for each in self.sizes if each < self._chosen.micro_batch_size]
        if sizes and self._recomputes:
            self._base = replace(self._base, units=self._all_recomputed(sizes[-1]))
        return self._largest_kept(sizes)

    def recomputed(self) -> Estimate | None:
        """Every unit recomputed at the micro-batch of the choice, if that is the change."""
        if not self._recomputes:
            return None
        found = self._estimate(self._captured(self._least_size, self._all_recomputed(self._least_size)))
        return found if self._context.is_safe(found) else None

    @property
    def _recomputes(self) -> bool:
        """Whether every unit is recomputed: by the change, or by the choice in a changed model."""
        recomputed_already = not self._context.searches and bool(self._chosen.units)
        return self._change.recomputes_all or (recomputed_already and self._change.capture is not None)

    def _all_recomputed(self, size: int) -> tuple[UnitAction, ...]:
        like = self._context.baseline if self._change.capture is None else self._captured(size, ())
        return uniform_actions(find_units(like), Action.RECOMPUTE)

    def searched(self) -> Estimate | None:
        """The fastest choice of actions for units, at the micro-batch of the choice and the next larger one.

        Units are offloaded only if the choice offloads some: steps that offload take the longest to capture.
        """
        sizes = [size for size in self.sizes if size >= self._least_size][: 2 if self._change.takes_less else 1]
        notes: list[str] = []
        family = CandidateFamily(self._capture, self._request, self._base, sizes, notes, divides_units=False)
        candidates = [
            Candidate(each, self._capture, notes, expandable_segments=self._base.expandable_segments)
            for each in family.of_all_sizes()
        ]
        if not self._chosen.offloaded:
            candidates = [each.without_offloading for each in candidates]
        limit_bytes: int | None = self._request.reserved_budget_bytes
        for _ in range(2):  # the second finds what has the headroom that the first lacks
            assert limit_bytes is not None
            expected = next(by_least_time(candidates, limit_bytes), None)
            if expected is None or expected.seconds > self._context.most_seconds:
                return None
            found = expected.candidate.captured_from(expected.level, limit_bytes)
            if found is None or self._context.is_safe(found):
                return found
            limit_bytes = self._context.lowered_limit(found)
        return None

    def as_chosen(self) -> Estimate | None:
        """The actions of the choice, with the change, at the micro-batch of the choice.

        Nested units are recomputed by themselves, if that fits with the change.
        """
        if self._chosen.micro_batch_size not in self.sizes:
            return None
        chosen = self._chosen.units
        by_themselves = tuple(
            replace(unit, action=Action.RECOMPUTE) if unit.action is Action.NEST else unit for unit in chosen
        )
        for units in dict.fromkeys((by_themselves, chosen)):
            found = self._estimate(self._captured(self._least_size, units))
            if self._context.is_safe(found):
                return found
        return None

    @property
    def is_divided(self) -> bool:
        """Whether ranks divide the model."""
        return self._base.divides_model

    @property
    def _is_scaled_already(self) -> bool:
        """Whether the plan captured the sizes from which the others are scaled: forward and backward stay."""
        return self._change.capture is None and self._base.precision is self._chosen.precision

    @property
    def nests(self) -> bool:
        """Whether the choice nests units, which no search here does."""
        return bool(self._chosen.nested)

    @cached_property
    def sizes(self) -> list[int]:
        """The micro-batch sizes that may be taken, rising."""
        request, pinned = self._request, self._request.asked.micro_batch_size
        is_whole = request.job.why_not_split is not None or request.asked.optimizer_in_backward
        is_whole |= request.keeps_batch_whole(self._context.baseline) and not self._change.splits_batch
        if is_whole:
            return [self._rank_batch]
        most = self._rank_batch
        if self._context.most_samples is not None and not self._is_scaled_already:
            most = min(most, self._context.most_samples)
        divisors = [size for size in range(1, most + 1) if self._rank_batch % size == 0]
        return [size for size in divisors if pinned in (None, size)]

    @cached_property
    def _least_size(self) -> int:
        """The micro-batch of the choice, or the largest that may be taken below it."""
        below = [size for size in self.sizes if size <= self._chosen.micro_batch_size]
        return max(below, default=self._rank_batch)

    def _largest_kept(self, sizes: Sequence[int]) -> Estimate | None:
        """Everything kept at the largest of some sizes, rising, that fits; None if none does."""
        trace_at = self._scaled_to if len(sizes) > 1 or self._is_scaled_already else self._captured
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._may_fit(trace_at(sizes[middle])) else (low, middle)
        found = (self._estimate(trace_at(size)) for size in reversed(sizes[:low]))
        return next(filter(self._context.is_safe, found), None)

    def _sized(self, size: int) -> Settings:
        steps = self._rank_batch // size
        return replace(self._base, micro_batch_size=size, gradient_accumulation_steps=steps)

    def _captured(self, size: int, units: tuple[UnitAction, ...] | None = None) -> Trace:
        settings = self._sized(size)
        settings = settings if units is None else replace(settings, units=units)
        return per_rank_trace(self._capture(settings))

    def _scaled_to(self, size: int) -> Trace:
        return per_rank_trace(self._scaled.at(self._sized(size)))

    def _may_fit(self, trace: Trace) -> bool:
        replayed = replay_allocations(trace, allocator=AllocatorSettings.of(trace.settings))
        return replayed.peak_reserved_bytes <= self._request.reserved_budget_bytes

    def _estimate(self, trace: Trace) -> Estimate:
        return estimate_unlimited(trace.with_last_step_again(), self._request.device)


def _on_one_rank(capture: Capture, chosen: Settings) -> Capture:
    """Captures of steps on several ranks under DDP, each of which runs what a single one does.

    Micro-batches after the second repeat it, so what was captured of as large ones, several of which are a step
    of the choice, serves for fewer.
    """
    size, of_choice = chosen.micro_batch_size, chosen.gradient_accumulation_steps

    def captured(settings: Settings, steps: int = 1) -> Trace:
        alone = replace(settings, world_size=1, num_nodes=1)
        if alone.micro_batch_size == size and min(alone.gradient_accumulation_steps, of_choice) > 1:
            alone = replace(alone, gradient_accumulation_steps=of_choice)
        return capture(alone, steps).with_settings(settings)

    return captured
