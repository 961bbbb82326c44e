"""The exact prefix solver: which option for each unit costs least within a budget.

Autograd runs backward in reverse order of forward. So wherever the step is, of all that the choices leave in
memory only what *earlier* units retain is there: a prefix. With

    n           units, in the order in which their forwards end
    r(i, o)     bytes that unit i retains under option o, beyond what the cheapest option retains
    p(i, o)     peak inside unit i's own forward and backward under option o, with nothing retained before it
    g(k)        peak outside of all units while the first k of them are retained
    c(i, o)     seconds that option o of unit i costs
    B           budget

the problem is: choose o(i) to minimise Σ c(i, o(i)), such that for R(k) = Σ_{i<k} r(i, o(i))

    R(i) + p(i, o(i)) ≤ B      for every unit
    R(k) + g(k)       ≤ B      for k = 0 … n

Several units may also be treated as one, as when their parent is recomputed as a whole: a span (a, b, o) takes
the place of the options of units a … b-1 and of the gaps between them, with its own r and p. It may retain less
than the cheapest options of its units do together, so its r may be negative.

States (R, cost) of which another is no larger and no dearer are dropped; what remains is exact. The state of
least R is never dropped, and every way on from another state is open to it. So a choice is found whenever there
is one, even where there are too many states and some more are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MOST_STATES = 4096
"""Beyond so many undominated states, of those whose retained bytes agree to 1/4096 of the budget only the
cheapest is kept. The answer is then not proved to be the best, but costs no more than the best within a budget
that is lower by n/4096."""


Choice = tuple[int, ...]
"""By unit: the index of its option, or -1 - k if the k-th span has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a unit, or several as one."""

    retained_bytes: int
    """Bytes it holds between its forward and its backward, beyond the smallest options of its units."""
    peak_bytes: int
    """Peak inside, with nothing retained before it."""
    seconds: float
    """Time it costs over the fastest options of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One way to treat several units in a row as one."""

    start: int
    """The first of its units."""
    stop: int
    """The unit behind its last."""
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Units with their options, and the peaks between them."""

    units: tuple[tuple[Option, ...], ...]
    gap_peaks_bytes: tuple[int, ...]
    """n + 1 peaks outside of all units: while none, the first, the first two … units are retained."""
    spans: tuple[Span, ...] = ()

    def parts(self, choice: Choice) -> Iterator[tuple[int, Option]]:
        """What a choice consists of: units and spans in order, each with the unit that it ends before."""
        unit = 0
        while unit < len(self.units):
            if choice[unit] >= 0:
                unit, option = unit + 1, self.units[unit][choice[unit]]
            else:
                span = self.spans[-1 - choice[unit]]
                unit, option = span.stop, span.option
            yield unit, option

    def peak_bytes(self, choice: Choice) -> int:
        """Peak under a choice: the largest left side of all constraints."""
        retained, peak = 0, self.gap_peaks_bytes[0]
        for stop, option in self.parts(choice):
            peak = max(peak, retained + option.peak_bytes)
            retained += option.retained_bytes
            peak = max(peak, retained + self.gap_peaks_bytes[stop])
        return peak

    def seconds(self, choice: Choice) -> float:
        """Cost of a choice."""
        return sum(option.seconds for _stop, option in self.parts(choice))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The cheapest choice within a budget."""

    choice: Choice
    seconds: float
    peak_bytes: int
    is_optimal: bool
    """Whether the choice is proved to be the cheapest of this problem."""


def solve(problem: Problem, budget_bytes: int) -> Solution | None:
    """The cheapest choice whose peak is within the budget; None if there is none.

    Among equally cheap choices, the one that retains least.
    """
    if problem.gap_peaks_bytes[0] > budget_bytes:
        return None
    arrived: list[list[_States]] = [[] for _ in range(len(problem.units) + 1)]
    arrived[0].append(_States.at_the_start())
    states: list[_States] = []
    is_optimal = True
    for unit, parts in enumerate(arrived):
        here = _States.joined(parts).undominated()
        if here.retained.size > MOST_STATES:
            here, is_optimal = here.thinned(max(1, budget_bytes // MOST_STATES)), False
        states.append(here)
        for code, stop, option in _ways_on(problem, unit):
            arrived[stop].append(here.extended(unit, code, option, budget_bytes, problem.gap_peaks_bytes[stop]))
    if not states[-1].retained.size:
        return None
    choice = _trace_back(states)
    peak_bytes = problem.peak_bytes(choice)
    assert peak_bytes <= budget_bytes, "the solver broke its own constraint"
    return Solution(
        choice=choice, seconds=problem.seconds(choice), peak_bytes=peak_bytes, is_optimal=is_optimal
    )


def smallest_peak_bytes(problem: Problem) -> int:
    """The least budget that has a solution, by bisection."""
    # Without costs one state, that of the least bytes, dominates all others: each try is quick.
    free = replace(
        problem,
        units=tuple(tuple(replace(option, seconds=0.0) for option in unit) for unit in problem.units),
        spans=tuple(replace(span, option=replace(span.option, seconds=0.0)) for span in problem.spans),
    )
    low, high = problem.gap_peaks_bytes[0], problem.peak_bytes((0,) * len(problem.units))
    while low < high:
        middle = (low + high) // 2
        if solve(free, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


def _ways_on(problem: Problem, unit: int) -> Iterator[tuple[int, int, Option]]:
    """What a choice can go on with before a unit: its code, the unit behind it, and the option."""
    if unit < len(problem.units):
        for index, option in enumerate(problem.units[unit]):
            yield index, unit + 1, option
    for index, span in enumerate(problem.spans):
        if span.start == unit:
            yield -1 - index, span.stop, span.option


@dataclass(frozen=True, slots=True)
class _States:
    """States before one unit (S), each with how it was reached."""

    retained: NDArray[np.int64]
    seconds: NDArray[np.float64]
    came_from: NDArray[np.int64]
    """The unit before which its parent is."""
    parent: NDArray[np.int64]
    """Index of its parent there."""
    code: NDArray[np.int64]
    """What was chosen."""

    @classmethod
    def at_the_start(cls) -> _States:
        """The one state with nothing retained."""
        nothing = np.zeros(1, dtype=np.int64)
        return cls(nothing, np.zeros(1), nothing, nothing, nothing)

    @classmethod
    def joined(cls, parts: list[_States]) -> _States:
        """All states of several ways; none of no way."""
        if not parts:
            empty = np.zeros(0, dtype=np.int64)
            return cls(empty, np.zeros(0), empty, empty, empty)
        columns = zip(*((p.retained, p.seconds, p.came_from, p.parent, p.code) for p in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def extended(self, unit: int, code: int, option: Option, budget_bytes: int, gap_bytes: int) -> _States:
        """These states after one choice more, those that keep its constraint and that of the gap behind it."""
        most = min(budget_bytes - option.peak_bytes, budget_bytes - gap_bytes - option.retained_bytes)
        parent = np.flatnonzero(self.retained <= most)
        return _States(
            self.retained[parent] + option.retained_bytes,
            self.seconds[parent] + option.seconds,
            np.full(parent.size, unit, dtype=np.int64),
            parent.astype(np.int64),
            np.full(parent.size, code, dtype=np.int64),
        )

    def undominated(self) -> _States:
        """Without states of which another retains no more and costs no more."""
        order = np.lexsort((self.seconds, self.retained))
        cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], self.seconds[order][:-1])))
        return self._at(order[self.seconds[order] < cheapest_before[: order.size]])

    def thinned(self, quantum_bytes: int) -> _States:
        """The first, and the last and so cheapest of each quantum; the states are undominated."""
        quanta = self.retained // quantum_bytes
        is_last = np.append(quanta[1:] != quanta[:-1], True)
        is_last[0] = True
        return self._at(np.flatnonzero(is_last))

    def _at(self, index: NDArray[np.int64]) -> _States:
        return _States(
            self.retained[index],
            self.seconds[index],
            self.came_from[index],
            self.parent[index],
            self.code[index],
        )


def _trace_back(states: list[_States]) -> Choice:
    """The choice that the cheapest of the last states came by."""
    unit, state = len(states) - 1, int(np.argmin(states[-1].seconds))
    choice = [0] * unit
    while unit > 0:
        here = states[unit]
        before, code, state = int(here.came_from[state]), int(here.code[state]), int(here.parent[state])
        choice[before:unit] = [code] * (unit - before)
        unit = before
    return tuple(choice)
