"""A candidate and a budget of reserved bytes → its fastest choice within the budget, expected and captured.

The solver's budgets are allocated bytes; what counts is reserved ones, those of the allocator's segments. So
the highest level of the grid is sought whose choice reserves no more than the true budget: first by splicing,
which predicts what is reserved in a tenth of a capture's time, then from there downwards by captures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from brimful.devices import Device
from brimful.errors import BatchError, CaptureError
from brimful.memory import AllocatorSettings, replay_allocations
from brimful.planner.cached_method import cached_method
from brimful.planner.problem.build import NESTED
from brimful.planner.solutions import Solutions, time_uncertainty
from brimful.prediction.estimate import DevicePeak, Estimate, device_peak, estimate_unlimited
from brimful.prediction.estimator import Capture
from brimful.settings import Action, Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace

MOST_RESERVED_FRACTION = 0.3
"""A choice whose allocated peak leaves this fraction of itself free is assumed to fit; the plan's choice is
captured in any case."""

MOST_SOLVER_EXCESS_FRACTION = 0.05
"""Fraction of the solver's peak by which the reserved bytes of a choice may be lower: twice the most seen in
plans of five models, 0.024 (BERT-large). A choice that is over the budget even so is not replayed."""


@dataclass(frozen=True)
class Expected:
    """The fastest choice of a candidate that is expected to fit; only its capture decides."""

    candidate: Candidate
    level: int
    """Index of the choice in the grid."""
    settings: Settings
    seconds: float
    reserved_bytes: int

    @cached_property
    def device_peak(self) -> DevicePeak:
        """What its capture is expected to take, CUDA context included."""
        return self.candidate.expected_device_peak(self.level)

    @property
    def seconds_at_best(self) -> float:
        """The least time that its capture may have."""
        return self.seconds * (1 - time_uncertainty(self.settings, offloads=bool(self.settings.offloaded)))


class Candidate:
    """One way to train but for the actions of its units: a micro-batch size, a precision and so on.

    Its answers are computed when they are asked for, and once. Why a choice could not be captured is added to
    `notes`.
    """

    def __init__(
        self, solutions: Solutions, capture: Capture, notes: list[str], *, expandable_segments: bool = False
    ) -> None:
        self.solutions = solutions
        """The choices by allocated bytes, which candidates that differ only in what is reserved share."""
        self.settings = replace(solutions.settings, expandable_segments=expandable_segments)
        """The settings, with no actions."""
        self.expected: dict[int, Expected | None] = {}
        """The answers of `expected_within` so far."""
        self._capture = capture
        self._notes = notes

    def with_expandable_segments(self) -> Candidate:
        """The candidate with expandable segments of the allocator, with which only reserved bytes differ."""
        return Candidate(self.solutions, self._capture, self._notes, expandable_segments=True)

    @cached_property
    def without_offloading(self) -> Candidate:
        """The candidate without choices that offload units; itself if it has none."""
        solutions, expandable = self.solutions.without_offloading, self.settings.expandable_segments
        if solutions is self.solutions:
            return self
        return Candidate(solutions, self._capture, self._notes, expandable_segments=expandable)

    def expected_within(self, budget_bytes: int) -> Expected | None:
        """The fastest choice expected to reserve at most the budget; None if there is none.

        The search descends the same binary tree for every budget, then looks at what is above: a choice that
        allocates more may be less fragmented. A choice that fits one budget fits a larger one. So a larger
        budget never leads to a lower level, and higher levels have choices that are at least as fast.
        """
        if budget_bytes not in self.expected:
            levels = self.solutions.levels
            count = self._count_expected(levels, budget_bytes)
            above = range(bisect_right(levels, budget_bytes) - 1, count - 1, -1)
            fitting = (i + 1 for i in above if self._is_expected_to_fit(levels[i], budget_bytes))
            count = next(fitting, count)
            self.expected[budget_bytes] = None if count == 0 else self._expected_at(count - 1)
        return self.expected[budget_bytes]

    def kept(self) -> Expected | None:
        """The choice that keeps every unit, as expected; None if another action is pinned."""
        if self.solutions.pinned not in (None, Action.KEEP):
            return None
        return self._expected_at(len(self.solutions.levels) - 1)

    def expected_device_peak(self, level: int) -> DevicePeak:
        """What the choice at a level is expected to take; from a capture only if splicing cannot predict it."""
        choice = self.solutions.solution_at(self.solutions.levels[level]).choice
        trace = self._expected_trace(choice)
        if trace is None:
            return self._captured(choice).device_peak
        trace = replace(trace, settings=self._settings_of(choice))
        return device_peak(trace.with_last_step_again(), self.solutions.device)

    def captured_from(self, level: int, budget_bytes: int) -> Estimate | None:
        """A capture of the highest level's choice, from `level` downwards, that truly is within the budget.

        The result is None if no choice is within it, or if one cannot be captured, of which a note is added.
        """
        levels = self.solutions.levels
        lower = (each for each in reversed(levels[:level]) if self._is_expected_to_fit(each, budget_bytes))
        return self._first_captured(chain([levels[level]], lower), budget_bytes)

    def nested_within(self, budget_bytes: int, below_seconds: float) -> Estimate | None:
        """A capture of the fastest nested segments within the budget; None as for `captured_from`.

        Only those are captured that may take less than `below_seconds`; if there are any, at least one is. The
        highest level is sought whose choice reserves no more than the budget. It is expected to reserve as much
        beyond its peak as the last one captured does, and at first as much as recomputing every unit does.
        Between a level that fits and one that does not, it is sought by bisection.
        """
        best: Estimate | None = None
        solutions, is_bisected = self.solutions, False
        with self._noting_failures():
            chosen = [solutions.solution_at(each) for each in solutions.nested_levels]
            chosen = [each for each in chosen if solutions.at_best(each) < below_seconds]
            beyond_bytes = self.reserved_at_smallest_peak() - solutions.smallest_peak_bytes
            while chosen:
                peaks = [each.peak_bytes for each in chosen]
                expected = max(bisect_right(peaks, budget_bytes - beyond_bytes) - 1, 0)
                place = len(chosen) // 2 if is_bisected else expected
                captured = self._captured(chosen[place].choice)
                reserved_bytes = captured.predicted_peak_reserved_bytes
                beyond_bytes = reserved_bytes - peaks[place]
                if reserved_bytes <= budget_bytes:
                    best, chosen = captured, chosen[place + 1 :]
                else:
                    is_bisected, chosen = best is not None, chosen[:place]
        return best

    def smallest(self) -> tuple[Estimate, ...]:
        """Captures of the choices with the smallest peaks: without nested segments, and with them.

        Where one cannot be captured, or nested segments take no less, it is missing; the reason is noted.
        """
        found = []
        for levels in (self.solutions.levels, self.solutions.nested_levels):
            with self._noting_failures():
                found += [self._captured(self.solutions.solution_at(least).choice) for least in levels[:1]]
        return tuple(found)

    def reserved_at_smallest_peak(self) -> int:
        """Bytes expected to be reserved at the smallest peak; the peak itself if it cannot be captured."""
        least = self.solutions.smallest_peak_bytes
        with self._noting_failures():
            return self._reserved_bytes(self.solutions.solution_at(least).choice)
        return least

    def _expected_at(self, level: int) -> Expected:
        solution = self.solutions.solution_at(self.solutions.levels[level])
        settings, seconds = self._settings_of(solution.choice), self.solutions.seconds_at_cost(solution.seconds)
        return Expected(self, level, settings, seconds, self._reserved_bytes(solution.choice))

    def _count_expected(self, levels: Sequence[int], budget_bytes: int) -> int:
        """How many levels, from the lowest, are expected to fit."""
        count, beyond = 0, len(levels)
        while count < beyond:
            middle = (count + beyond - 1) // 2
            if self._is_expected_to_fit(levels[middle], budget_bytes):
                count = middle + 1
            else:
                beyond = middle
        return count

    def _is_expected_to_fit(self, level_bytes: int, budget_bytes: int) -> bool:
        """Whether the allocator is expected to reserve no more than the budget for a level's choice."""
        solution = self.solutions.solution_at(level_bytes)
        if solution.peak_bytes * (1 + MOST_RESERVED_FRACTION) <= budget_bytes:
            return True
        if solution.peak_bytes * (1 - MOST_SOLVER_EXCESS_FRACTION) > budget_bytes:
            return False
        return self._reserved_bytes(solution.choice) <= budget_bytes

    def _first_captured(self, levels: Iterable[int], budget_bytes: int) -> Estimate | None:
        """A capture of the first of some levels that truly is within the budget; None if none can be."""
        with self._noting_failures():
            captured = (self._captured(self.solutions.solution_at(each).choice) for each in levels)
            return next((each for each in captured if each.predicted_peak_reserved_bytes <= budget_bytes), None)
        return None

    def _settings_of(self, choice: tuple[int, ...]) -> Settings:
        """The settings with the actions that a choice means."""
        return replace(self.settings, units=self.solutions.problem.chosen(choice))

    @cached_method
    def _captured(self, choice: tuple[int, ...]) -> Estimate:
        """The estimate of a capture with the choice applied; CaptureError or BatchError if there is none."""
        return estimate_of(self._settings_of(choice), self._capture, self.solutions.device)

    @cached_method
    def _reserved_bytes(self, choice: tuple[int, ...]) -> int:
        """Expected reserved bytes of a choice; from a capture only if splicing cannot predict them."""
        trace = self._expected_trace(choice)
        if trace is None:
            return self._captured(choice).predicted_peak_reserved_bytes
        return replay_allocations(trace, allocator=AllocatorSettings.of(self.settings)).peak_reserved_bytes

    def _expected_trace(self, choice: tuple[int, ...]) -> Trace | None:
        """The step of a choice without information about time; None if splicing cannot make it."""
        if not any(choice):
            return self.solutions.kept
        if NESTED in choice or not self.solutions.splicer.can_splice():
            return None
        return self.solutions.splicer.spliced(self.solutions.problem.chosen(choice))

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Go on after what cannot be captured, with a note of it."""
        try:
            yield
        except (CaptureError, BatchError) as error:
            note = f"{self.settings.describe()} is not considered at small budgets: {error}"
            if note not in self._notes:
                self._notes.append(note)


def estimate_of(settings: Settings, capture: Capture, device: Device) -> Estimate:
    """The estimate of settings as a plan has it: of the second of two steps, from a capture with them applied.

    A step that cannot be captured raises CaptureError; a batch that cannot be made or split raises BatchError.
    """
    return estimate_unlimited(planned_trace(settings, capture), device)


def planned_trace(settings: Settings, capture: Capture) -> Trace:
    """The two steps of which `estimate_of` predicts the second; it raises the same errors."""
    # A second step finds memory as the allocator was left by the first.
    return per_rank_trace(capture(settings)).with_last_step_again()
