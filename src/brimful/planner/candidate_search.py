"""A candidate and a budget of reserved bytes → its fastest choice within the budget, expected and captured.

The solver's budgets are allocated bytes; what counts is reserved ones, those of the allocator's segments. So
the highest level of the budget grid is sought whose choice reserves no more than the true budget: first by
splicing, then from there downwards by captures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from brimful.errors import BatchError, CaptureError
from brimful.planner.budget_grid import BudgetGrid
from brimful.planner.candidate import Candidate, time_uncertainty
from brimful.planner.replays import Replays
from brimful.prediction.estimate import Estimate
from brimful.prediction.estimator import Capture
from brimful.settings import Action, Settings

MOST_RESERVED_FRACTION = 0.3
"""A choice whose allocated peak leaves this fraction of itself free is assumed to fit; the plan's choice is
captured in any case."""

MOST_SOLVER_EXCESS_FRACTION = 0.05
"""Fraction of the solver's peak by which the reserved bytes of a choice may be lower: twice the most seen in
plans of five models, 0.024 (BERT-large). A choice that is over the budget even so is not replayed."""


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    """The fastest choice of a candidate that is expected to fit; only its capture decides."""

    search: CandidateSearch
    level: int
    """Index of the choice in the budget grid."""
    settings: Settings
    seconds: float
    reserved_bytes: int

    @property
    def seconds_at_best(self) -> float:
        """The least time that its capture may have."""
        return self.seconds * (1 - time_uncertainty(self.settings, offloads=bool(self.settings.offloaded)))


class CandidateSearch:
    """The choices of one candidate; why a choice could not be captured is added to `notes`."""

    def __init__(
        self, candidate: Candidate, capture: Capture, notes: list[str], *, grid: BudgetGrid | None = None
    ) -> None:
        self.candidate = candidate
        self.grid = BudgetGrid(candidate) if grid is None else grid
        """The budget grid, which candidates that differ only in what is reserved may share."""
        self._replays = Replays(candidate, capture)
        self._notes = notes
        self._expected: dict[int, ExpectedChoice | None] = {}
        self._with_fixed_segments: CandidateSearch | None = None
        """The search without expandable segments, if this one has them."""
        self._without_offloading: CandidateSearch | None = None

    def with_expandable_segments(self) -> CandidateSearch:
        """The search with expandable segments of the allocator, which shares the solutions of the grid."""
        candidate = self.candidate.with_expandable_segments()
        found = CandidateSearch(candidate, self._replays.capture, self._notes, grid=self.grid)
        found._with_fixed_segments = self
        return found

    def without_offloading(self) -> CandidateSearch:
        """The search without choices that offload units, one for all callers; itself if it has none."""
        if not self.candidate.problem.offloads:
            return self
        if self._without_offloading is None:
            fixed = self._with_fixed_segments
            self._without_offloading = (
                CandidateSearch(self.candidate.without_offloading(), self._replays.capture, self._notes)
                if fixed is None
                else fixed.without_offloading().with_expandable_segments()
            )
        return self._without_offloading

    @property
    def settings(self) -> Settings:
        """The settings of the candidate, with no actions of units."""
        return self.candidate.settings

    def expected_within(self, budget_bytes: int) -> ExpectedChoice | None:
        """The fastest choice expected to reserve at most the budget; None if there is none.

        The search descends the same binary tree for every budget, then looks at what is above: a choice that
        allocates more may be less fragmented. A choice that fits one budget fits a larger one. So a larger
        budget never leads to a lower level, and higher levels have choices that are at least as fast.
        """
        if budget_bytes not in self._expected:
            count = self._count_expected(self.grid.levels, budget_bytes)
            allocating = bisect_right(self.grid.levels, budget_bytes)
            above = range(allocating - 1, count - 1, -1)
            fitting = (i + 1 for i in above if self._is_expected_to_fit(self.grid.levels[i], budget_bytes))
            count = next(fitting, count)
            self._expected[budget_bytes] = None if count == 0 else self._expected_at(count - 1)
        return self._expected[budget_bytes]

    def known_expected(self, budget_bytes: int) -> ExpectedChoice | None:
        """The choice that `expected_within` has found for a budget before, else None."""
        return self._expected.get(budget_bytes)

    def captured_from(self, level: int, budget_bytes: int) -> Estimate | None:
        """A capture of the highest level's choice, from `level` downwards, that truly is within the budget.

        The result is None if no choice is within it, or if one cannot be captured, of which a note is added.
        """
        lower = (each for each in self.grid.levels[level - 1 :: -1] if level)
        expected = (each for each in lower if self._is_expected_to_fit(each, budget_bytes))
        return self._highest_captured(chain([self.grid.levels[level]], expected), budget_bytes)

    def kept(self) -> ExpectedChoice | None:
        """The choice that keeps every unit, as expected; None if another action is pinned."""
        if self.candidate.pinned not in (None, Action.KEEP):
            return None
        return ExpectedChoice(
            search=self,
            level=len(self.grid.levels) - 1,
            settings=self.settings,
            seconds=self.candidate.kept_seconds,
            reserved_bytes=self._replays.reserved_bytes(self.candidate.uniform_choice(Action.KEEP)),
        )

    def nested_within(self, budget_bytes: int) -> Estimate | None:
        """The fastest nested segments within the budget, all captured; None as for `captured_from`."""
        levels = self.grid.nested_levels
        try:
            count = self._count_expected(levels, budget_bytes)
        except (CaptureError, BatchError) as error:
            self._add_note(error)
            return None
        return self._highest_captured(reversed(levels[:count]), budget_bytes)

    def smallest(self) -> tuple[Estimate, ...]:
        """Captures of the choices with the smallest peaks: without nested segments, and with them.

        Where one cannot be captured, or nested segments take no less, it is missing; the reason is noted.
        """
        found = []
        for levels in (self.grid.levels, self.grid.nested_levels):
            try:
                found += [
                    self._replays.captured(self.grid.solution_at(level_bytes).choice)
                    for level_bytes in levels[:1]
                ]
            except (CaptureError, BatchError) as error:
                self._add_note(error)
        return tuple(found)

    def reserved_at_smallest_peak(self) -> int:
        """Bytes expected to be reserved at the smallest peak; the peak itself if it cannot be captured."""
        least = self.grid.smallest_peak_bytes
        try:
            return self._replays.reserved_bytes(self.grid.solution_at(least).choice)
        except (CaptureError, BatchError) as error:
            self._add_note(error)
            return least

    def _expected_at(self, level: int) -> ExpectedChoice:
        solution = self.grid.solution_at(self.grid.levels[level])
        return ExpectedChoice(
            search=self,
            level=level,
            settings=self.candidate.settings_of(solution.choice),
            seconds=self.candidate.step_seconds(solution.seconds),
            reserved_bytes=self._replays.reserved_bytes(solution.choice),
        )

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
        solution = self.grid.solution_at(level_bytes)
        if solution.peak_bytes * (1 + MOST_RESERVED_FRACTION) <= budget_bytes:
            return True
        if solution.peak_bytes * (1 - MOST_SOLVER_EXCESS_FRACTION) > budget_bytes:
            return False
        return self._replays.reserved_bytes(solution.choice) <= budget_bytes

    def _highest_captured(self, levels: Iterable[int], budget_bytes: int) -> Estimate | None:
        """A capture of the first of some levels that truly is within the budget; None if none can be."""
        try:
            captured = (
                self._replays.captured(self.grid.solution_at(level_bytes).choice) for level_bytes in levels
            )
            return next((each for each in captured if each.predicted_peak_reserved_bytes <= budget_bytes), None)
        except (CaptureError, BatchError) as error:
            self._add_note(error)
            return None

    def _add_note(self, error: CaptureError | BatchError) -> None:
        note = f"{self.settings.describe()} is not considered at small budgets: {error}"
        if note not in self._notes:
            self._notes.append(note)
