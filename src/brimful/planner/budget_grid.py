"""A candidate → the cheapest choice of actions at any budget of allocated bytes, each budget solved once.

The budgets tried form a grid of levels, from the smallest peak to that of keeping everything. Below it a second
grid has nested segments. What the allocator reserves for a choice is not known here; see `candidate_search`.
"""

from __future__ import annotations

import math
from functools import cached_property

from brimful.memory import live_profile, rounding_bytes_of
from brimful.planner.candidate import Candidate
from brimful.planner.problem.build import NESTED, RECOMPUTED
from brimful.planner.problem.nested import build_segment_problem
from brimful.planner.solvers.chain import Solution, smallest_peak_bytes, solve
from brimful.planner.solvers.segments import SegmentProblem, smallest_segment_peak_bytes, solve_segments
from brimful.settings import Action
from brimful.trace import Trace

LEVELS = 64
"""Steps between the smallest peak and that of keeping everything: a plan can be worse than the best by what one
step is worth."""

NESTED_LEVELS = 8
"""Levels from the smallest peak of nested segments up to that of anything else; few, because each that is
tried is captured."""


class BudgetGrid:
    """The solutions of one candidate; budgets are allocated bytes."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate = candidate
        self._solutions: dict[int, Solution | None] = {}
        self._nested_solutions: dict[int, Solution | None] = {}

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Budgets without nested segments, rising."""
        if self._pinned is not None:
            return (self._pinned.peak_bytes,)
        chain = self._candidate.problem.chain
        least = smallest_peak_bytes(chain)
        most = max(least, chain.peak_bytes(self._candidate.uniform_choice(Action.KEEP)))
        steps = LEVELS if most > least else 1
        return tuple(least + (most - least) * step // steps for step in range(steps + 1))

    @cached_property
    def nested_levels(self) -> tuple[int, ...]:
        """Budgets below `levels`, at which segments are nested, rising; none where that takes no less."""
        most = self.smallest_peak_bytes
        least = most if self._segments is None else smallest_segment_peak_bytes(self._segments)
        steps = NESTED_LEVELS if most > least else 0
        return tuple(least + (most - least) * step // steps for step in range(steps))

    @property
    def smallest_peak_bytes(self) -> int:
        """Least allocated bytes of any permitted choice without nested segments."""
        return self.levels[0]

    @property
    def smallest_nested_peak_bytes(self) -> int:
        """Least allocated bytes of any permitted choice, with nested segments where they take less."""
        return (*self.nested_levels, *self.levels)[0]

    def solution_at(self, level_bytes: int) -> Solution:
        """The cheapest choice at one of the levels of either grid."""
        is_nested = level_bytes < self.smallest_peak_bytes
        solution = self._solve_nested(level_bytes) if is_nested else self._solve(level_bytes)
        assert solution is not None  # every level is at least the smallest peak
        return solution

    def step_seconds(self, budget_bytes: int) -> float | None:
        """The least time of a step within a budget, without nested segments; None if nothing fits it."""
        solution = self._solve(budget_bytes)
        return None if solution is None else self._candidate.step_seconds(solution.seconds)

    def nested_step_seconds(self, budget_bytes: int, below_seconds: float = math.inf) -> float | None:
        """The least time of a step within a budget where each unit is recomputed or nested.

        The result is None if nothing fits the budget, or if recomputing every unit takes `below_seconds` or
        more.
        """
        if self._candidate.step_seconds(self._recompute_seconds) >= below_seconds:
            return None
        solution = self._solve_nested(budget_bytes)
        return None if solution is None else self._candidate.step_seconds(solution.seconds)

    def _solve(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice without nested segments."""
        if budget_bytes not in self._solutions:
            self._solutions[budget_bytes] = self._solution(budget_bytes)
        return self._solutions[budget_bytes]

    def _solution(self, budget_bytes: int) -> Solution | None:
        if self._pinned is not None:
            return self._pinned if self._pinned.peak_bytes <= budget_bytes else None
        if self._keep_all.peak_bytes <= budget_bytes:  # the solver's peak of it is a little higher
            return self._keep_all
        return solve(self._candidate.problem.chain, budget_bytes)

    def _solve_nested(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice of nested segments."""
        if budget_bytes not in self._nested_solutions:
            self._nested_solutions[budget_bytes] = (
                None if self._segments is None else self._nested_solution(self._segments, budget_bytes)
            )
        return self._nested_solutions[budget_bytes]

    def _nested_solution(self, segments: SegmentProblem, budget_bytes: int) -> Solution | None:
        nested = solve_segments(segments, budget_bytes)
        if nested is None:
            return None
        return Solution(
            choice=tuple(NESTED if is_nested else RECOMPUTED for is_nested in nested),
            seconds=self._recompute_seconds + segments.cost_seconds(nested),
            peak_bytes=segments.peak_bytes(nested),
            is_optimal=True,
        )

    @cached_property
    def _segments(self) -> SegmentProblem | None:
        """The problem of nesting units; None where no unit can be nested, or an action is pinned."""
        candidate = self._candidate
        if candidate.pinned is not None or not candidate.units:
            return None
        return build_segment_problem(
            candidate.kept,
            candidate.recomputed,
            candidate.problem.chosen(candidate.uniform_choice(Action.RECOMPUTE)),
            candidate.device,
            micro_batches=candidate.recomputed.captured_micro_batches,
        )

    @cached_property
    def _keep_all(self) -> Solution:
        return self._uniform(Action.KEEP)

    @cached_property
    def _pinned(self) -> Solution | None:
        """The one solution where an action is pinned."""
        return None if self._candidate.pinned is None else self._uniform(self._candidate.pinned)

    @property
    def _recompute_seconds(self) -> float:
        """Cost of recomputing every unit in each micro-batch."""
        return self._candidate.problem.chain.seconds(self._candidate.uniform_choice(Action.RECOMPUTE))

    def _uniform(self, action: Action) -> Solution:
        peak_bytes = peak_allocated_bytes(self._candidate.uniform_trace(action))
        return self._candidate.uniform_solution(action, peak_bytes)


def peak_allocated_bytes(trace: Trace) -> int:
    """The peak of the last captured step."""
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)
