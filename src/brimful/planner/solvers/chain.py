"""The exact prefix solver: which option for each unit costs least within a budget.

Autograd runs backward in reverse order of forward. So wherever the step is, of all that the choices leave in
memory only what *earlier* units retain is there: a prefix. With

    n           units, in the order in which their forwards end
    r(i, o)     bytes that unit i retains under option o, beyond its option that retains least
    l(i, o)     bytes that linger: they are there too while the next unit runs, in forward and in backward
    p(i, o)     peak inside unit i's own forward and backward under option o, with nothing retained before it
    g(k)        peak outside of all units while the first k of them are retained
    c(i, o)     seconds that option o of unit i costs
    t(i, o)     seconds that its copies to the host take, and that those back take
    f(i, o)     seconds of unit i's forward under option o, and b(i, o) of its backward, which hide the copies
                of the unit before it
    B           budget

the problem is: choose o(i) to minimise Σ c(i, o(i)) + w(i, o(i)), with waits for copies, t being the one of the
unit before,

    w(i, o) = max(0, t(i - 1, o(i - 1)) - f(i, o)) + max(0, t(i - 1, o(i - 1)) - b(i, o))

such that for R(k) = Σ_{i<k} r(i, o(i)) and L(k) = l(k - 1, o(k - 1)), L(0) = 0,

    R(i) + L(i) + p(i, o(i)) ≤ B      for every unit
    R(k) + L(k) + g(k)       ≤ B      for k = 0 … n

States (R, cost) are dropped if another state with equal l and t of the last unit is at most as large and as
costly; what remains is exact. The state of least R with its l and t is never dropped, and every way on from
others is open to it. So a choice is found whenever there is one, even where there are too many states and some
more are dropped.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

MOST_STATES = 4096
"""Beyond this many undominated states, of those whose retained bytes agree to 1/4096 of the budget only the
cheapest is kept. The answer is then not proved to be the best, but costs no more than the best within a budget
that is lower by n/4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a unit. No number is negative."""

    retained_bytes: int
    """Bytes it holds between its forward and its backward, beyond its option that retains least."""
    peak_bytes: int
    """Peak inside the unit, with nothing retained before it."""
    seconds: float
    """Time it costs over its fastest option."""
    lingering_bytes: int = 0
    """Bytes it holds besides while the next unit runs: they leave for the host meanwhile, and come back."""
    copy_seconds: float = 0.0
    """Time to copy the lingering bytes, one way."""
    forward_seconds: float = 0.0
    """Time of the unit's forward, which hides the copies of the unit before it."""
    backward_seconds: float = 0.0
    """Time of the unit's backward, which hides the copies back of the unit before it."""

    def waiting_seconds(self, copy_seconds: float) -> float:
        """Time for which this unit waits for copies of the unit before it."""
        return max(0.0, copy_seconds - self.forward_seconds) + max(0.0, copy_seconds - self.backward_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Units with their options, and the peaks between them."""

    units: tuple[tuple[Option, ...], ...]
    gap_peaks_bytes: tuple[int, ...]
    """n + 1 peaks outside of all units: while none, the first, the first two … units are retained."""

    def peak_bytes(self, choice: tuple[int, ...]) -> int:
        """Peak under a choice of options: the largest left side of all constraints."""
        retained, lingering, peak = 0, 0, self.gap_peaks_bytes[0]
        for unit, chosen, gap in zip(self.units, choice, self.gap_peaks_bytes[1:], strict=True):
            option = unit[chosen]
            peak = max(peak, retained + lingering + option.peak_bytes)
            retained, lingering = retained + option.retained_bytes, option.lingering_bytes
            peak = max(peak, retained + lingering + gap)
        return peak

    def seconds(self, choice: tuple[int, ...]) -> float:
        """Cost of a choice of options, waits for copies included."""
        total, copy_seconds = 0.0, 0.0
        for unit, chosen in zip(self.units, choice, strict=True):
            option = unit[chosen]
            total += option.seconds + option.waiting_seconds(copy_seconds)
            copy_seconds = option.copy_seconds
        return total


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

    Among equally cheap choices, it is the one that retains least.
    """
    if problem.gap_peaks_bytes[0] > budget_bytes:
        return None
    none = np.zeros(1, dtype=np.int64)
    states = _States(none, np.zeros(1), none, np.zeros(1), none, none)
    steps: list[_States] = []
    is_optimal = True
    for unit, gap_bytes in zip(problem.units, problem.gap_peaks_bytes[1:], strict=True):
        alike = [_extend(unit, options, states, budget_bytes, gap_bytes) for options in _by_what_lingers(unit)]
        for i, group in enumerate(alike):
            if group.retained.size > MOST_STATES:
                alike[i], is_optimal = group.thinned(max(1, budget_bytes // MOST_STATES)), False
        states = _joined(alike)
        if not states.retained.size:
            return None
        steps.append(states)
    choice = _trace_back(steps, int(np.lexsort((states.retained, states.seconds))[0]))
    peak_bytes = problem.peak_bytes(choice)
    assert peak_bytes <= budget_bytes, "the solver broke its own constraint"
    return Solution(
        choice=choice, seconds=problem.seconds(choice), peak_bytes=peak_bytes, is_optimal=is_optimal
    )


def smallest_peak_bytes(problem: Problem) -> int:
    """The least budget that has a solution, by bisection."""
    low, high = max(problem.gap_peaks_bytes), problem.peak_bytes((0,) * len(problem.units))
    while low < high:
        middle = (low + high) // 2
        if _has_solution(problem, middle):
            high = middle
        else:
            low = middle + 1
    return high


def _has_solution(problem: Problem, budget_bytes: int) -> bool:
    """Whether some choice is within the budget: of what lingers alike, the least retained is enough to know."""
    least_retained = {0: 0}
    for unit, gap_bytes in zip(problem.units, problem.gap_peaks_bytes[1:], strict=True):
        after: dict[int, int] = {}
        for option in unit:
            most_held = budget_bytes - option.peak_bytes
            most_before_gap = budget_bytes - gap_bytes - option.retained_bytes - option.lingering_bytes
            found = [
                retained
                for lingering, retained in least_retained.items()
                if retained + lingering <= most_held and retained <= most_before_gap
            ]
            if found:
                retained = min(found) + option.retained_bytes
                known = after.get(option.lingering_bytes, retained)
                after[option.lingering_bytes] = min(known, retained)
        least_retained = after
    return bool(least_retained)


@dataclass(frozen=True, slots=True)
class _States:
    """Undominated choices for the units so far; all arrays are (states,)."""

    retained: NDArray[np.int64]
    seconds: NDArray[np.float64]
    lingering: NDArray[np.int64]
    """Lingering bytes of the last unit."""
    copy_seconds: NDArray[np.float64]
    parent: NDArray[np.int64]
    option: NDArray[np.int64]

    def thinned(self, quantum_bytes: int) -> _States:
        """The first, and the last and so cheapest of each quantum; the states are undominated."""
        quanta = self.retained // quantum_bytes
        is_last = np.append(quanta[1:] != quanta[:-1], True)
        is_last[0] = True
        return self._at(np.flatnonzero(is_last))

    def _at(self, index: NDArray[np.int64]) -> _States:
        return _States(*(getattr(self, field.name)[index] for field in fields(self)))


def _joined(parts: list[_States]) -> _States:
    if len(parts) == 1:
        return parts[0]
    return _States(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(_States))
    )


def _by_what_lingers(unit: tuple[Option, ...]) -> list[list[int]]:
    """Indices of the options, grouped by what the next unit notices: the bytes and copies that linger."""
    alike: dict[tuple[int, float], list[int]] = defaultdict(list)
    for index, option in enumerate(unit):
        alike[option.lingering_bytes, option.copy_seconds].append(index)
    return list(alike.values())


def _extend(
    unit: tuple[Option, ...], options: list[int], states: _States, budget_bytes: int, gap_bytes: int
) -> _States:
    """All states after one more unit under some options alike, within its constraint and the next gap's.

    States that another matches or beats in memory and cost are dropped; bytes and copies that linger are equal.
    """
    parents, retained, seconds = [], [], []
    held = states.retained + states.lingering
    for index in options:
        option = unit[index]
        most_before_gap = budget_bytes - gap_bytes - option.retained_bytes - option.lingering_bytes
        is_within = (held <= budget_bytes - option.peak_bytes) & (states.retained <= most_before_gap)
        parent = np.flatnonzero(is_within)
        copies = states.copy_seconds[parent]
        waits = np.maximum(copies - option.forward_seconds, 0.0)
        waits += np.maximum(copies - option.backward_seconds, 0.0)
        parents.append(parent)
        retained.append(states.retained[parent] + option.retained_bytes)
        seconds.append(states.seconds[parent] + (option.seconds + waits))
    all_retained, all_seconds = np.concatenate(retained), np.concatenate(seconds)
    best = _undominated(all_retained, all_seconds)
    chosen = np.repeat(np.array(options, dtype=np.int64), [parent.size for parent in parents])
    alike = unit[options[0]]
    return _States(
        all_retained[best],
        all_seconds[best],
        np.full(best.size, alike.lingering_bytes, dtype=np.int64),
        np.full(best.size, alike.copy_seconds),
        np.concatenate(parents)[best],
        chosen[best],
    )


def _undominated(retained: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the states that no other matches or beats, by what they retain."""
    order = np.lexsort((seconds, retained))
    in_order = seconds[order]
    cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], in_order[:-1])))
    return order[in_order < cheapest_before]


def _trace_back(steps: list[_States], state: int) -> tuple[int, ...]:
    choice = []
    for states in reversed(steps):
        choice.append(int(states.option[state]))
        state = int(states.parent[state])
    return tuple(reversed(choice))
