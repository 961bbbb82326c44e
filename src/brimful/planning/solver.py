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

States (R, cost) of which another is no larger and no dearer are dropped; what remains is exact. The state of
least R is never dropped, and every way on from another state is open to it. So a choice is found whenever there
is one, even where there are too many states and some more are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

MOST_STATES = 4096
"""Beyond so many undominated states, of those whose retained bytes agree to 1/4096 of the budget only the
cheapest is kept. The answer is then not proved to be the best, but costs no more than the best within a budget
that is lower by n/4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a unit. No number is negative."""

    retained_bytes: int
    """Bytes it holds between its forward and its backward, beyond its smallest option."""
    peak_bytes: int
    """Peak inside the unit, with nothing retained before it."""
    seconds: float
    """Time it costs over its fastest option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Units with their options, and the peaks between them."""

    units: tuple[tuple[Option, ...], ...]
    gap_peaks_bytes: tuple[int, ...]
    """n + 1 peaks outside of all units: while none, the first, the first two … units are retained."""

    def peak_bytes(self, choice: tuple[int, ...]) -> int:
        """Peak under a choice of options: the largest left side of all constraints."""
        retained, peak = 0, self.gap_peaks_bytes[0]
        for unit, chosen, gap in zip(self.units, choice, self.gap_peaks_bytes[1:], strict=True):
            option = unit[chosen]
            peak = max(peak, retained + option.peak_bytes)
            retained += option.retained_bytes
            peak = max(peak, retained + gap)
        return peak

    def seconds(self, choice: tuple[int, ...]) -> float:
        """Cost of a choice of options."""
        return sum(unit[chosen].seconds for unit, chosen in zip(self.units, choice, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The cheapest choice within a budget."""

    choice: tuple[int, ...]
    """Index of the option of each unit."""
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
    retained = np.zeros(1, dtype=np.int64)
    seconds = np.zeros(1)
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    is_optimal = True
    for unit, gap_bytes in zip(problem.units, problem.gap_peaks_bytes[1:], strict=True):
        new = _extend(unit, retained, seconds, budget_bytes, gap_bytes)
        if not new.retained.size:
            return None
        if new.retained.size > MOST_STATES:
            new, is_optimal = new.thinned(max(1, budget_bytes // MOST_STATES)), False
        retained, seconds = new.retained, new.seconds
        steps.append((new.parent, new.option))
    choice = _trace_back(steps, int(np.argmin(seconds)))
    peak_bytes = problem.peak_bytes(choice)
    assert peak_bytes <= budget_bytes, "the solver broke its own constraint"
    return Solution(
        choice=choice, seconds=problem.seconds(choice), peak_bytes=peak_bytes, is_optimal=is_optimal
    )


def smallest_peak_bytes(problem: Problem) -> int:
    """The least budget that has a solution, by bisection."""
    # Without costs one state, that of the least bytes, dominates all others: each try is quick.
    free = replace(
        problem, units=tuple(tuple(replace(option, seconds=0.0) for option in unit) for unit in problem.units)
    )
    low, high = max(problem.gap_peaks_bytes), problem.peak_bytes((0,) * len(problem.units))
    while low < high:
        middle = (low + high) // 2
        if solve(free, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high


@dataclass(frozen=True, slots=True)
class _States:
    retained: NDArray[np.int64]
    seconds: NDArray[np.float64]
    parent: NDArray[np.int64]
    option: NDArray[np.int64]

    def undominated(self) -> _States:
        """Without states of which another retains no more and costs no more."""
        order = np.lexsort((self.seconds, self.retained))
        cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], self.seconds[order][:-1])))
        return self._at(order[self.seconds[order] < cheapest_before])

    def thinned(self, quantum_bytes: int) -> _States:
        """The first, and the last and so cheapest of each quantum; the states are undominated."""
        quanta = self.retained // quantum_bytes
        is_last = np.append(quanta[1:] != quanta[:-1], True)
        is_last[0] = True
        return self._at(np.flatnonzero(is_last))

    def _at(self, index: NDArray[np.int64]) -> _States:
        return _States(self.retained[index], self.seconds[index], self.parent[index], self.option[index])


def _extend(
    unit: tuple[Option, ...],
    retained: NDArray[np.int64],
    seconds: NDArray[np.float64],
    budget_bytes: int,
    gap_bytes: int,
) -> _States:
    """All states after one more unit that keep its own constraint and that of the gap behind it."""
    parts = []
    for index, option in enumerate(unit):
        most = min(budget_bytes - option.peak_bytes, budget_bytes - gap_bytes - option.retained_bytes)
        parent = np.flatnonzero(retained <= most)
        parts.append(
            _States(
                retained[parent] + option.retained_bytes,
                seconds[parent] + option.seconds,
                parent.astype(np.int64),
                np.full(parent.size, index, dtype=np.int64),
            )
        )
    joined = _States(
        np.concatenate([part.retained for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.parent for part in parts]),
        np.concatenate([part.option for part in parts]),
    )
    return joined.undominated()


def _trace_back(steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]], state: int) -> tuple[int, ...]:
    choice = []
    for parent, option in reversed(steps):
        choice.append(int(option[state]))
        state = int(parent[state])
    return tuple(reversed(choice))
