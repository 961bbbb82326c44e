"""One way to train: a micro-batch size, a precision and so on, with the units whose actions are to be chosen.

Two captures, one that keeps everything and one that recomputes everything, give the solver's problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from brimful.devices import Device
from brimful.planner.problem.build import KEPT, RECOMPUTED, PlanningProblem
from brimful.planner.solvers.chain import Solution
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train but for the actions of its units, and what is known of it from two captures."""

    settings: Settings
    """The settings, with no actions."""
    device: Device
    units: tuple[str, ...]
    problem: PlanningProblem
    kept: Trace
    """A capture with every unit kept."""
    recomputed: Trace
    """A capture with every unit recomputed."""
    kept_seconds: float
    """Time of a step that keeps every unit."""
    pinned: Action | None
    """The one action for all units that was asked for; None leaves the choice."""

    def with_expandable_segments(self) -> Candidate:
        """The candidate with expandable segments of the allocator: only reserved bytes differ."""
        return replace(
            self,
            settings=replace(self.settings, expandable_segments=True),
            kept=_with_expandable_segments(self.kept),
            recomputed=_with_expandable_segments(self.recomputed),
        )

    def without_offloading(self) -> Candidate:
        """The candidate without choices that offload units, from the same captures."""
        return replace(self, problem=self.problem.without_offloading())

    @property
    def time_uncertainty(self) -> float:
        """Fraction by which a capture may be faster than predicted from the two captures."""
        return time_uncertainty(self.settings, offloads=self.problem.offloads)

    def uniform_choice(self, action: Action) -> tuple[int, ...]:
        """The choice of one action for all units."""
        return (KEPT if action is Action.KEEP else RECOMPUTED,) * len(self.units)

    def uniform_trace(self, action: Action) -> Trace:
        """The capture with one action for all units."""
        return self.kept if action is Action.KEEP else self.recomputed

    def uniform_settings(self, action: Action) -> Settings:
        """The settings with one action for all units."""
        return replace(self.settings, units=uniform_actions(self.units, action))

    def settings_of(self, choice: tuple[int, ...]) -> Settings:
        """The settings with the actions that a choice means."""
        return replace(self.settings, units=self.problem.chosen(choice))

    def step_seconds(self, cost_seconds: float) -> float:
        """Predicted seconds of a step, given what a choice costs in each micro-batch."""
        return self.kept_seconds + cost_seconds * self.settings.gradient_accumulation_steps

    def uniform_solution(self, action: Action, peak_bytes: int) -> Solution:
        """One action for all units as a solution, given its peak."""
        choice = self.uniform_choice(action)
        seconds = self.problem.chain.seconds(choice)
        return Solution(choice=choice, seconds=seconds, peak_bytes=peak_bytes, is_optimal=True)


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


def _with_expandable_segments(trace: Trace) -> Trace:
    return replace(trace, settings=replace(trace.settings, expandable_segments=True))
