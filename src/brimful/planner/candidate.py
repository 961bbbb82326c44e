"""The ways to train that are compared: one for each micro-batch and precision, each with its units' options.

Two captures (everything kept, everything recomputed) pose the solver's problem for one micro-batch. Sizes are
affine in the micro-batch, so captures at two sizes pose it for every divisor of the global batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from brimful.cost import step_seconds
from brimful.errors import BatchError, CaptureError
from brimful.memory import live_profile, pinned_host_bytes, replay_allocations, rounding_bytes_of
from brimful.planner.plan import Alternative
from brimful.planner.problem.build import KEPT, NESTED, RECOMPUTED, PlanningProblem, build_problem
from brimful.planner.problem.nested import build_segment_problem
from brimful.planner.problem.splice import Splicer
from brimful.planner.request import Request
from brimful.planner.solvers.chain import Solution, smallest_peak_bytes, solve
from brimful.planner.solvers.segments import SegmentProblem, smallest_segment_peak_bytes, solve_segments
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import ROUGH_SIZES, Capture, RoughlyScaledTraces
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace, own_checkpointed_units, unit_of_each_op
from brimful.trace.ddp import per_rank_trace
from brimful.trace.units import divide_unit, find_units

RUNGS = 64
"""Budgets between the smallest peak and that of keeping everything at which a candidate is solved: a plan can
be worse than the best by what one step of the ladder is worth."""

NESTED_RUNGS = 8
"""Budgets from the smallest peak of nested segments up to that of anything else; few, because each that is
tried is captured."""

LEAST_SPARED = 0.02
"""Part of the peak of recomputing everything that dividing a unit must spare: each division takes a capture."""

MOST_RESERVED_FRACTION = 0.3
"""A choice whose allocated peak leaves this much of itself free is taken to fit; only what is taken in the end
is captured in any case."""


MOST_POSED_FRACTION = 0.05
"""Part of the solver's peak that a choice may not come to when reserved: twice the most seen in plans of five
models, 0.024 (BERT-large). What is over the budget without it is not replayed."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The fastest choice of a candidate that is expected to fit; only its capture tells for sure."""

    candidate: Candidate
    rung: int
    """Its place on the candidate's ladder."""
    settings: Settings
    seconds: float
    reserved_bytes: int

    @property
    def seconds_at_best(self) -> float:
        """The least time that its capture may be found to take."""
        return self.seconds * (1 - _roughness(self.settings, offloads=bool(self.settings.offloaded)))


@dataclass(slots=True)
class Candidate:
    """One micro-batch and precision, with the choices of actions that are worth making."""

    settings: Settings
    units: tuple[str, ...]
    posed: PlanningProblem
    kept: Trace
    recomputed: Trace
    kept_seconds: float
    pinned: Action | None
    _pose: Callable[[int], PlanningProblem]
    """The problem for so many bytes of the host."""
    _capture: Capture
    _request: Request
    _notes: list[str]
    _solved: dict[int, Solution | None] = field(default_factory=dict)
    _solved_nested: dict[int, Solution | None] = field(default_factory=dict)
    _replayed: dict[tuple[int, ...], Estimate] = field(default_factory=dict)
    _reserved: dict[tuple[int, ...], int] = field(default_factory=dict)
    _expected: dict[int, Expected | None] = field(default_factory=dict)
    _uniform_peaks: dict[Action, int] = field(default_factory=dict)
    _ladder: tuple[int, ...] | None = None
    _nested_ladder: tuple[int, ...] | None = None
    _segments: list[SegmentProblem | None] = field(default_factory=list)
    """The problem of nesting units, once it is posed; None where none can be."""
    _splicer: Splicer | None = None

    def with_expandable_segments(self) -> Candidate:
        """The same ways to train with the allocator's segments growing: only what is reserved differs."""
        kept, recomputed, settings = (
            replace(each, expandable_segments=True)
            for each in (self.kept.settings, self.recomputed.settings, self.settings)
        )
        return replace(
            self,
            settings=settings,
            kept=replace(self.kept, settings=kept),
            recomputed=replace(self.recomputed, settings=recomputed),
            _replayed={},
            _reserved={},
            _expected={},
            _splicer=None,
        )

    def without_offloading(self) -> Candidate:
        """The same ways to train but for those that offload, told from the same captures."""
        return replace(
            self,
            posed=self._pose(0),
            _solved={},
            _solved_nested={},
            _replayed={},
            _reserved={},
            _expected={},
            _uniform_peaks={},
            _ladder=None,
            _nested_ladder=None,
            _segments=[],
            _splicer=None,
        )

    @property
    def roughness(self) -> float:
        """Part by which a capture may be faster than what is derived."""
        offloads = any(action.action is Action.OFFLOAD for unit in self.posed.actions for action in unit)
        return _roughness(self.settings, offloads=offloads)

    def seconds_at_best(self, budget_bytes: int) -> float | None:
        """The least time of a step that so many allocated bytes permit; None if nothing fits them."""
        return self._step_seconds(self.solve(budget_bytes))

    def nested_seconds_at_best(self, budget_bytes: int, below_seconds: float = math.inf) -> float | None:
        """The same where all units are recomputed or nested; None too if that takes as long as another plan."""
        all_recomputed = self.posed.chain.seconds(self.uniform(Action.RECOMPUTE))
        if self.kept_seconds + all_recomputed * self.settings.gradient_accumulation_steps >= below_seconds:
            return None
        return self._step_seconds(self._solve_nested(budget_bytes))

    def expected_within(self, budget_bytes: int) -> Expected | None:
        """The fastest choice that is expected to reserve no more than the budget; None if there is none.

        The solver sees allocated bytes; what counts is reserved ones. So the solver's budgets form a ladder,
        and the highest rung is sought whose choice is within the true budget, told by splicing. The search
        descends the same binary tree for every budget, and a choice that fits one budget fits a larger one: so
        a larger budget leads to no lower rung, and the choices of higher rungs are no slower.
        """
        if budget_bytes not in self._expected:
            rung = self._highest_expected(self.ladder(), budget_bytes)
            self._expected[budget_bytes] = self._expected_at(rung) if rung >= 0 else None
        return self._expected[budget_bytes]

    def known_expected(self, budget_bytes: int) -> Expected | None:
        """The same if it was asked before, else None."""
        return self._expected.get(budget_bytes)

    def captured_from(self, rung: int, budget_bytes: int) -> Estimate | None:
        """A capture of the choice of the highest rung, from one downwards, that is truly within the budget.

        Args:
            rung: Of the ladder; the highest to try.
            budget_bytes: That may be reserved.

        Returns:
            The capture; None if none is within the budget, or it cannot be made, of which a note is left.
        """
        return self._highest_captured(self.ladder()[: rung + 1], budget_bytes)

    def fastest_nested_within(self, budget_bytes: int) -> Estimate | None:
        """The fastest nested segments within the budget, for where nothing else fits; all tried are captured.

        Args:
            budget_bytes: That may be reserved.

        Returns:
            A capture; None if none is within the budget, or can be captured.
        """
        ladder = self.nested_ladder()
        try:
            rung = self._highest_expected(ladder, budget_bytes)
        except (CaptureError, BatchError) as error:
            self._leave_out(error)
            return None
        return self._highest_captured(ladder[: rung + 1], budget_bytes)

    def ladder(self) -> tuple[int, ...]:
        """Budgets at which the candidate is solved without nested segments, rising."""
        if self._ladder is None:
            if self.pinned is not None:
                self._ladder = (self._uniform_peak_bytes(self.pinned),)
            else:
                least = smallest_peak_bytes(self.posed.chain)
                most = max(least, self.posed.chain.peak_bytes(self.uniform(Action.KEEP)))
                rungs = RUNGS if most > least else 1
                self._ladder = tuple(least + (most - least) * rung // rungs for rung in range(rungs + 1))
        return self._ladder

    def nested_ladder(self) -> tuple[int, ...]:
        """Budgets below those, at which segments are nested, rising; none where that spares nothing."""
        if self._nested_ladder is None:
            segments, most = self._segment_problem(), self.ladder()[0]
            least = most if segments is None else smallest_segment_peak_bytes(segments)
            rungs = NESTED_RUNGS if most > least else 0
            self._nested_ladder = tuple(least + (most - least) * rung // rungs for rung in range(rungs))
        return self._nested_ladder

    def solve(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice within a budget of allocated bytes, without nested segments."""
        if budget_bytes not in self._solved:
            if self.pinned is not None:
                self._solved[budget_bytes] = self._uniform_solution(self.pinned, budget_bytes)
            else:
                # The problem takes keeping everything for a little more than it is.
                keeping = self._uniform_solution(Action.KEEP, budget_bytes)
                self._solved[budget_bytes] = keeping or solve(self.posed.chain, budget_bytes)
        return self._solved[budget_bytes]

    def replay(self, rung_bytes: int) -> Estimate:
        """What a capture of a rung's choice takes."""
        choice = self._choice(rung_bytes)
        if choice not in self._replayed:
            settings = replace(self.settings, units=self.posed.chosen(choice))
            # A second step finds memory as the allocator was left by the first.
            captured = self._capture(replace(settings, expandable_segments=False))
            trace = per_rank_trace(replace(captured, settings=settings)).with_last_step_again()
            self._replayed[choice] = estimate_unlimited(trace, self._request.device)
        return self._replayed[choice]

    def uniform(self, action: Action) -> tuple[int, ...]:
        """The choice of one action for all units."""
        return (KEPT if action is Action.KEEP else RECOMPUTED,) * len(self.units)

    def uniform_alternative(self, action: Action, label: str) -> Alternative:
        """One action for all units, told by the captures that posed the problem."""
        trace = self.kept if action is Action.KEEP else self.recomputed
        settings = replace(self.settings, units=all_units(self.units, action))
        return alternative(label, trace, settings, self._request)

    def smallest_peak_bytes(self) -> int:
        """Least allocated bytes that any permitted choice takes without nested segments."""
        return self.ladder()[0]

    def reserved_at_smallest_peak(self) -> int:
        """What the allocator is expected to reserve there; where that cannot be told, what is allocated."""
        least = self.ladder()[0]
        try:
            return self._expected_reserved_bytes(self._solution(least), least)
        except (CaptureError, BatchError) as error:
            self._leave_out(error)
            return least

    def smallest_nested_peak_bytes(self) -> int:
        """The same with them."""
        return (*self.nested_ladder(), *self.ladder())[0]

    def leanest(self) -> tuple[Estimate, ...]:
        """Captures of what takes least: without nested segments, and with them where they take less still.

        Returns:
            Those of the two that can be captured; the reason why another cannot is noted.
        """
        found = []
        for ladder in (self.ladder(), self.nested_ladder()):
            try:
                found += [self.replay(rung_bytes) for rung_bytes in ladder[:1]]
            except (CaptureError, BatchError) as error:
                self._leave_out(error)
        return tuple(found)

    def _highest_captured(self, rungs: Sequence[int], budget_bytes: int) -> Estimate | None:
        """A capture of the highest of some rungs that is truly within the budget; None if none can be."""
        try:
            captured = (self.replay(rung_bytes) for rung_bytes in reversed(rungs))
            return next((each for each in captured if each.predicted_peak_reserved_bytes <= budget_bytes), None)
        except (CaptureError, BatchError) as error:
            self._leave_out(error)
            return None

    def _leave_out(self, error: CaptureError | BatchError) -> None:
        note = f"{self.settings.describe()} is not considered at small budgets: {error}"
        if note not in self._notes:
            self._notes.append(note)

    def _expected_at(self, rung: int) -> Expected:
        rung_bytes = self.ladder()[rung]
        solution = self._solution(rung_bytes)
        seconds = self._step_seconds(solution)
        assert seconds is not None
        return Expected(
            candidate=self,
            rung=rung,
            settings=replace(self.settings, units=self.posed.chosen(solution.choice)),
            seconds=seconds,
            reserved_bytes=self._expected_reserved_bytes(solution, rung_bytes),
        )

    def _highest_expected(self, ladder: tuple[int, ...], budget_bytes: int) -> int:
        """The highest rung expected to fit; -1 if none is."""
        low, high = -1, len(ladder)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(ladder[middle], budget_bytes):
                low = middle
            else:
                high = middle
        return low

    def _segment_problem(self) -> SegmentProblem | None:
        if not self._segments:
            is_posed = self.pinned is None and bool(self.units)
            self._segments.append(self._pose_segments() if is_posed else None)
        return self._segments[0]

    def _pose_segments(self) -> SegmentProblem | None:
        return build_segment_problem(
            self.kept,
            self.recomputed,
            self.posed.chosen(self.uniform(Action.RECOMPUTE)),
            self._request.device,
            micro_batches=self.recomputed.captured_micro_batches,
        )

    def _solve_nested(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice of nested segments within a budget of allocated bytes."""
        if budget_bytes not in self._solved_nested:
            segments = self._segment_problem()
            solution = None if segments is None else self._nested_solution(segments, budget_bytes)
            self._solved_nested[budget_bytes] = solution
        return self._solved_nested[budget_bytes]

    def _nested_solution(self, segments: SegmentProblem, budget_bytes: int) -> Solution | None:
        nested = solve_segments(segments, budget_bytes)
        if nested is None:
            return None
        return Solution(
            choice=tuple(NESTED if is_nested else RECOMPUTED for is_nested in nested),
            seconds=self.posed.chain.seconds(self.uniform(Action.RECOMPUTE)) + segments.cost_seconds(nested),
            peak_bytes=segments.peak_bytes(nested),
            is_optimal=True,
        )

    def _step_seconds(self, solution: Solution | None) -> float | None:
        if solution is None:
            return None
        return self.kept_seconds + solution.seconds * self.settings.gradient_accumulation_steps

    def _choice(self, rung_bytes: int) -> tuple[int, ...]:
        return self._solution(rung_bytes).choice

    def _solution(self, rung_bytes: int) -> Solution:
        is_nested = rung_bytes < self.ladder()[0]
        solution = self._solve_nested(rung_bytes) if is_nested else self.solve(rung_bytes)
        assert solution is not None  # every rung is at least the smallest peak
        return solution

    def _fits(self, rung_bytes: int, budget_bytes: int) -> bool:
        """Whether the allocator is expected to reserve no more than the budget for a rung's choice."""
        solution = self._solution(rung_bytes)
        if solution.peak_bytes * (1 + MOST_RESERVED_FRACTION) <= budget_bytes:
            return True
        if solution.peak_bytes * (1 - MOST_POSED_FRACTION) > budget_bytes:
            return False
        return self._expected_reserved_bytes(solution, rung_bytes) <= budget_bytes

    def _expected_reserved_bytes(self, solution: Solution, rung_bytes: int) -> int:
        if solution.choice not in self._reserved:
            self._reserved[solution.choice] = self._reserved_bytes(solution.choice, rung_bytes)
        return self._reserved[solution.choice]

    def _reserved_bytes(self, choice: tuple[int, ...], rung_bytes: int) -> int:
        if NESTED in choice:
            return self.replay(rung_bytes).predicted_peak_reserved_bytes
        if not any(choice):
            return replay_allocations(self.kept).peak_reserved_bytes
        if self._splicer is None:
            self._splicer = Splicer(
                self.recomputed,
                unit_of_each_op(self.recomputed, self.units),
                len(self.units),
                own_checkpointed_units(self.kept, self.units),
            )
        if not self._splicer.can_splice():
            return self.replay(rung_bytes).predicted_peak_reserved_bytes
        return replay_allocations(self._splicer.spliced(self.posed.chosen(choice))).peak_reserved_bytes

    def _uniform_peak_bytes(self, action: Action) -> int:
        if action not in self._uniform_peaks:
            trace = self.kept if action is Action.KEEP else self.recomputed
            self._uniform_peaks[action] = _peak_allocated_bytes(trace)
        return self._uniform_peaks[action]

    def _uniform_solution(self, action: Action, budget_bytes: int) -> Solution | None:
        choice = self.uniform(action)
        peak_bytes = self._uniform_peak_bytes(action)
        if peak_bytes > budget_bytes:
            return None
        seconds = self.posed.chain.seconds(choice)
        return Solution(choice=choice, seconds=seconds, peak_bytes=peak_bytes, is_optimal=True)


def _roughness(settings: Settings, *, offloads: bool) -> float:
    """Part by which a capture may be faster than what is derived: ops may differ where a dimension is 1, and
    what hides a copy is told roughly."""
    if offloads:
        return 0.02
    return 0.01 if settings.micro_batch_size == 1 else 0.001


def _peak_allocated_bytes(trace: Trace) -> int:
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)


def _outstanding(recomputed: Trace, units: tuple[str, ...]) -> str | None:
    """The unit that alone makes the peak of a step that recomputes all units; None if others come near it."""
    profile = live_profile(recomputed, rounding_bytes_of(recomputed.device_kind))
    owner = np.array([*unit_of_each_op(recomputed, units), -1], dtype=np.int64)[profile.ops]
    highest = owner[profile.peak_position]
    elsewhere_bytes = int(profile.live_bytes[owner != highest].max(initial=0))
    stands_out = elsewhere_bytes <= profile.peak_bytes * (1 - LEAST_SPARED)
    return units[highest] if highest >= 0 and stands_out else None


def _of_sizes_that_failed(failures: Mapping[int, Exception]) -> Iterator[str]:
    """A note for each reason for which micro-batches cannot be captured."""
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    for size, error in failures.items():
        sizes[str(error).replace(f" (micro_batch_size={size})", "")].append(size)
    for reason, failed in sizes.items():
        yield f"Micro-batches of {', '.join(map(str, failed))} are not considered: {reason}"


class CandidateFamily:
    """All micro-batches under settings that are otherwise the same.

    Args:
        capture: Runs a step on fake tensors.
        request: What is asked and what is pinned.
        base: What all of them share, with the whole batch at once and everything kept.
        micro_batch_sizes: Those to try.
        notes: What cannot be tried is added here.
    """

    def __init__(
        self,
        capture: Capture,
        request: Request,
        base: Settings,
        micro_batch_sizes: Sequence[int],
        notes: list[str],
    ) -> None:
        self._capture = capture
        self._request = request
        self._sizes = micro_batch_sizes
        self._notes = notes
        self._base = base
        self._divisions: tuple[tuple[str, ...], ...] = ()
        self._scaled = RoughlyScaledTraces(capture)

    def candidates(self) -> list[Candidate]:
        """Those micro-batches that the job can be trained with; what cannot be captured is noted.

        Returns:
            A candidate for each that can be captured, and another where a unit is divided.

        Raises:
            CaptureError: None can.
            BatchError: None can.
        """
        found: list[Candidate] = []
        failures: dict[int, CaptureError | BatchError] = {}
        for size in self._sizes:
            try:
                found += self._of_size(size)
            except (CaptureError, BatchError) as error:
                failures[size] = error
        if failures and not found:
            raise next(iter(failures.values()))
        self._notes += _of_sizes_that_failed(failures)
        return found

    def _of_size(self, micro_batch_size: int) -> list[Candidate]:
        settings = self._base.with_micro_batch_size(micro_batch_size)
        kept = self._trace(settings)
        if not self._divisions:
            self._divisions = self._ways_to_divide(kept, settings)
        traces = [self._all_recomputed(settings, units) if units else kept for units in self._divisions]
        return [
            self._candidate(settings, units, kept, recomputed, priced_by=traces[0])
            for units, recomputed in zip(self._divisions, traces, strict=True)
        ]

    def _candidate(
        self, settings: Settings, units: tuple[str, ...], kept: Trace, recomputed: Trace, priced_by: Trace
    ) -> Candidate:
        def pose(host_bytes: int) -> PlanningProblem:
            return build_problem(
                kept,
                recomputed,
                units,
                self._request.device,
                micro_batches=kept.captured_micro_batches,
                host_bytes=host_bytes,
                priced_by=priced_by,  # else ways to divide would seem to differ in what their host takes
            )

        return Candidate(
            settings=settings,
            units=units,
            posed=pose(self._host_bytes(settings, kept)),
            kept=kept,
            recomputed=recomputed,
            kept_seconds=step_seconds(kept, self._request.device).total_seconds,
            pinned=self._request.recompute,
            _pose=pose,
            _capture=self._capture,
            _request=self._request,
            _notes=self._notes,
        )

    def _host_bytes(self, settings: Settings, kept: Trace) -> int:
        """What offloaded units may take of the host; where ranks divide the model, offloading is not tried."""
        if settings.divides_state:
            return 0
        of_optimizer = pinned_host_bytes(kept) + kept.host_state_bytes
        return max(self._request.offload_host_bytes - of_optimizer, 0)

    def _ways_to_divide(self, kept: Trace, settings: Settings) -> tuple[tuple[str, ...], ...]:
        """The model's units, and where dividing one of them lowers the peak, those after that."""
        units = self._find_units(kept)
        finer = self._divided(units, kept, settings)
        return (units,) if finer == units else (units, finer)

    def _divided(self, units: tuple[str, ...], kept: Trace, settings: Settings) -> tuple[str, ...]:
        """The units, of which one that alone makes the peak is divided as long as that lowers it."""
        if not units or self._request.recompute is not None:
            return units
        while (finer := self._finer(units, kept, settings)) is not None:
            units = finer
        return units

    def _finer(self, units: tuple[str, ...], kept: Trace, settings: Settings) -> tuple[str, ...] | None:
        """The units with one of them divided; None if that does not lower the peak, or cannot be captured."""
        recomputed = self._all_recomputed(settings, units)
        outstanding = _outstanding(recomputed, units)
        if outstanding is None:
            return None
        place = units.index(outstanding)
        finer = (*units[:place], *divide_unit(kept, outstanding), *units[place + 1 :])
        if finer == units:
            return None
        try:
            finer_bytes = _peak_allocated_bytes(self._all_recomputed(settings, finer))
        except CaptureError:
            return None
        most_bytes = _peak_allocated_bytes(recomputed) * (1 - LEAST_SPARED)
        return finer if finer_bytes <= most_bytes else None

    def _all_recomputed(self, settings: Settings, units: tuple[str, ...]) -> Trace:
        return self._trace(replace(settings, units=all_units(units, Action.RECOMPUTE)))

    def _trace(self, settings: Settings) -> Trace:
        return per_rank_trace(self._scaled.at(settings) if len(self._sizes) > 1 else self._capture(settings))

    def _find_units(self, kept: Trace) -> tuple[str, ...]:
        """Units that can really be recomputed; none, with a note, if recomputing fails."""
        units = find_units(kept)
        if not units:
            return ()
        recomputed = all_units(units, Action.RECOMPUTE)
        tried = [kept.settings]
        if len(self._sizes) > 1:
            # Of many sizes, this one is captured anyway; but a job may not make batches of just any size.
            small = replace(self._base, micro_batch_size=ROUGH_SIZES[0], gradient_accumulation_steps=2)
            tried.insert(0, small)
        for settings in tried:
            try:
                self._capture(replace(settings, units=recomputed))
            except BatchError:
                continue
            except CaptureError as error:
                self._notes.append(f"Nothing is recomputed: doing so fails in this model. {error}")
                return ()
            break
        return units


def alternative(label: str, trace: Trace, settings: Settings, request: Request) -> Alternative:
    """What a traced step comes to, beside the plan.

    Args:
        label: What it is, for a reader.
        trace: Of the step.
        settings: Of the step.
        request: Its device and budget.

    Returns:
        The record that a plan lists.
    """
    reserved_bytes = replay_allocations(trace).peak_reserved_bytes
    return Alternative(
        label=label,
        settings=settings,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=step_seconds(trace, request.device).total_seconds,
        fits=reserved_bytes <= request.reserved_budget_bytes,
    )


def all_units(units: tuple[str, ...], action: Action) -> tuple[UnitAction, ...]:
    """One action for every unit."""
    return tuple(UnitAction(fqn=unit, action=action) for unit in units)
