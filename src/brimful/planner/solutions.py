"""Two captures → the cheapest choice of actions at any budget of allocated bytes, each budget solved once.

One capture keeps every unit, one recomputes every unit. The budgets tried form a grid of levels, from the
smallest peak to that of keeping everything. Below it a second grid has nested segments. What the allocator
reserves for a choice is not known here; see `candidate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from brimful.cost import step_seconds
from brimful.devices import Device
from brimful.memory import live_profile, rounding_bytes_of
from brimful.planner.cached_method import cached_method
from brimful.planner.problem.build import KEPT, NESTED, RECOMPUTED, PlanningProblem
from brimful.planner.problem.nested import build_segment_problem
from brimful.planner.problem.splice import Splicer
from brimful.planner.solvers.chain import Solution, smallest_peak_bytes, solve
from brimful.planner.solvers.segments import SegmentProblem, smallest_segment_peak_bytes, solve_segments
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace

LEVELS = 64
"""Steps between the smallest peak and that of keeping everything: a plan can be worse than the best by what one
step is worth."""

NESTED_LEVELS = 8
"""Levels from the smallest peak of nested segments up to that of anything else; few, because each that is
tried is captured."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Solutions:
    """The choices of actions under settings that are otherwise the same; budgets are allocated bytes."""

    settings: Settings
    """The settings, with no actions."""
    device: Device
    units: tuple[str, ...]
    problem: PlanningProblem
    kept: Trace
    """A capture with every unit kept."""
    recomputed: Trace
    """A capture with every unit recomputed."""
    pinned: Action | None
    """The one action for all units that was asked for; None leaves the choice."""

    @cached_property
    def kept_seconds(self) -> float:
        """Time of a step that keeps every unit."""
        return step_seconds(self.kept, self.device).total_seconds

    @cached_property
    def without_offloading(self) -> Solutions:
        """The solutions without choices that offload units, from the same captures; itself if it has none."""
        return replace(self, problem=self.problem.without_offloading()) if self.problem.offloads else self

    @cached_property
    def splicer(self) -> Splicer:
        """Makes the trace of any choice from the two captures."""
        return Splicer(self.recomputed, self.kept, self.units)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Budgets without nested segments, rising."""
        if self.pinned is not None:
            return (self._uniform.peak_bytes,)
        chain = self.problem.chain
        least = smallest_peak_bytes(chain)
        most = max(least, chain.peak_bytes(self.uniform_choice(Action.KEEP)))
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

    def step_seconds(self, budget_bytes: int) -> float:
        """The least time of a step within a budget, without nested segments; infinite if nothing fits it."""
        return self._seconds_of(self._solve(budget_bytes))

    def nested_step_seconds(self, budget_bytes: int, below_seconds: float = math.inf) -> float:
        """The least time of a step within a budget where each unit is recomputed or nested.

        It is infinite if nothing fits the budget, or if recomputing every unit takes `below_seconds` or more.
        """
        if self.seconds_at_cost(self._recompute_seconds) >= below_seconds:
            return math.inf
        return self._seconds_of(self._solve_nested(budget_bytes))

    def may_take(self, seconds: float, budget_bytes: int) -> bool:
        """Whether a capture within a budget may take as little time as this."""
        return self.seconds_at_best(self.step_seconds(budget_bytes)) <= seconds

    def seconds_at_best(self, seconds: float) -> float:
        """The least time that a capture may have whose time is predicted from the two captures."""
        return seconds * (1 - time_uncertainty(self.settings, offloads=self.problem.offloads))

    def at_best(self, solution: Solution) -> float:
        """The least time that a capture of a choice may have."""
        return self.seconds_at_best(self.seconds_at_cost(solution.seconds))

    def seconds_at_cost(self, cost_seconds: float) -> float:
        """Predicted seconds of a step, given what a choice costs in each micro-batch."""
        return self.kept_seconds + cost_seconds * self.settings.gradient_accumulation_steps

    def uniform_choice(self, action: Action) -> tuple[int, ...]:
        """The choice of one action for all units."""
        return (KEPT if action is Action.KEEP else RECOMPUTED,) * len(self.units)

    def uniform_trace(self, action: Action) -> Trace:
        """The capture with one action for all units."""
        return self.kept if action is Action.KEEP else self.recomputed

    def _seconds_of(self, solution: Solution | None) -> float:
        return math.inf if solution is None else self.seconds_at_cost(solution.seconds)

    @cached_method
    def _solve(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice without nested segments."""
        if self._uniform.peak_bytes <= budget_bytes:  # the solver's peak of it is a little higher
            return self._uniform
        return None if self.pinned is not None else solve(self.problem.chain, budget_bytes)

    @cached_method
    def _solve_nested(self, budget_bytes: int) -> Solution | None:
        """The cheapest choice of nested segments."""
        nested = None if self._segments is None else solve_segments(self._segments, budget_bytes)
        if self._segments is None or nested is None:
            return None
        return Solution(
            choice=tuple(NESTED if is_nested else RECOMPUTED for is_nested in nested),
            seconds=self._recompute_seconds + self._segments.cost_seconds(nested),
            peak_bytes=self._segments.peak_bytes(nested),
            is_optimal=True,
        )

    @cached_property
    def _segments(self) -> SegmentProblem | None:
        """The problem of nesting units; None where no unit can be nested, or an action is pinned."""
        if self.pinned is not None or not self.units:
            return None
        return build_segment_problem(
            self.kept,
            self.recomputed,
            self.problem.chosen(self.uniform_choice(Action.RECOMPUTE)),
            self.device,
            micro_batches=self.recomputed.captured_micro_batches,
        )

    @cached_property
    def _uniform(self) -> Solution:
        """The action that is pinned for all units; without one, keeping all, which takes the least time."""
        action = self.pinned or Action.KEEP
        choice = self.uniform_choice(action)
        return Solution(
            choice=choice,
            seconds=self.problem.chain.seconds(choice),
            peak_bytes=peak_allocated_bytes(self.uniform_trace(action)),
            is_optimal=True,
        )

    @property
    def _recompute_seconds(self) -> float:
        """Cost of recomputing every unit in each micro-batch."""
        return self.problem.chain.seconds(self.uniform_choice(Action.RECOMPUTE))


def time_uncertainty(settings: Settings, *, offloads: bool) -> float:
    """Fraction by which a capture may be faster than predicted.

    Ops may differ where a dimension is 1, and how much of a copy is hidden is predicted only approximately.
    """
    if offloads:
        return 0.02
    return 0.01 if settings.micro_batch_size == 1 else 0.001


def uniform_actions(units: tuple[str, ...], action: Action) -> tuple[UnitAction, ...]:
    """One action for every unit."""
    return tuple(UnitAction(fqn=unit, action=action) for unit in units)


def offloaded_units(units: tuple[str, ...]) -> tuple[UnitAction, ...]:
    """Every unit offloaded but the last, whose saved tensors are needed before a copy could go and return."""
    return (*uniform_actions(units[:-1], Action.OFFLOAD), *uniform_actions(units[-1:], Action.KEEP))


def peak_allocated_bytes(trace: Trace) -> int:
    """The peak of the last captured step."""
    profile = live_profile(trace, rounding_bytes_of(trace.device_kind))
    return profile.peak_bytes_in_step(profile.last_step)
