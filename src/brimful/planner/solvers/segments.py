"""The exact solver for nested segments: which units to nest where recomputing all does not fit.

It is a problem of its own: nesting costs a forward to spare one input, so it pays only below what recomputing
every unit takes, and there every unit is recomputed or nested. With

    n           units, in the order in which their forwards begin
    I(j)        bytes of the input of unit j, which is freed if it is nested; 0 where it cannot be
    c(j)        seconds that nesting it costs: the forward of unit j - 1 once more
    W(k)        peak after the forwards of the first k units and before any backward: before and
                in the forward of unit k; for k = n in the loss
    V(j)        peak in the backward of unit j, and behind it before that of unit j - 1
    D(j)        peak in its backward while the forward of unit j - 1 runs again
    B           budget

all of them as if everything were recomputed, and with segments, each a recomputed unit a and the nested ones
behind it, the problem is: choose which units to nest to minimise Σ c(j) over them, such that for
N(k) = Σ I(j) over the nested ones of the first k units

    W(k) - N(k)    ≤ B      for k = 0 … n: inputs are freed when the forward of their unit ends
    V(j) - N(a(j)) ≤ B      for every unit: those of its own segment are there again
    D(j) - N(a(j)) ≤ B      for every nested unit

States (N, cost) between segments, of which another has freed no less and costs no more, are dropped; what
remains is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_STATES = 4096
"""Beyond this many undominated states, of those that agree to 1/4096 of the bytes of all inputs only the
cheapest is kept. The answer may then not be the best; one is found whenever there is one."""

FINEST = 4096
"""The smallest peak is found to this part of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentProblem:
    """Units that are recomputed or nested, by the symbols above."""

    input_bytes: tuple[int, ...]
    """I, n of them."""
    seconds: tuple[float, ...]
    """c, n of them."""
    forward_peaks_bytes: tuple[int, ...]
    """W, n + 1 of them."""
    backward_peaks_bytes: tuple[int, ...]
    """V, n of them."""
    deriving_peaks_bytes: tuple[int, ...]
    """D, n of them."""

    def peak_bytes(self, nested: tuple[bool, ...]) -> int:
        """Peak under a choice: the largest left side of all constraints."""
        freed = before_segment = 0
        peak = self.forward_peaks_bytes[0]
        for j, is_nested in enumerate(nested):
            if is_nested:
                peak = max(peak, self.deriving_peaks_bytes[j] - before_segment)
                freed += self.input_bytes[j]
            else:
                before_segment = freed
            peak = max(
                peak, self.backward_peaks_bytes[j] - before_segment, self.forward_peaks_bytes[j + 1] - freed
            )
        return peak

    def cost_seconds(self, nested: tuple[bool, ...]) -> float:
        """Cost of a choice relative to recomputing everything."""
        return sum(seconds for seconds, is_nested in zip(self.seconds, nested, strict=True) if is_nested)


class _States(NamedTuple):
    """Ways to divide the units so far into segments; all arrays (states,)."""

    freed: NDArray[np.int64]
    seconds: NDArray[np.float64]
    start: NDArray[np.int64]
    """Where the last segment begins."""
    parent: NDArray[np.int64]
    """Index of the state at `start` that it follows."""

    def at(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> _States:
        return _States(self.freed[index], self.seconds[index], self.start[index], self.parent[index])

    def undominated(self) -> _States:
        """The cheapest first, and of others only those that have freed more than all before."""
        ordered = self.at(np.lexsort((-self.freed, self.seconds)))
        most_before = np.maximum.accumulate(np.append(-1, ordered.freed[:-1]))
        return ordered.at(ordered.freed > most_before)

    def thinned(self, quantum_bytes: int) -> _States:
        """The first and so cheapest of each quantum, and the last; the states are undominated."""
        quanta = self.freed // quantum_bytes
        is_first = np.append(True, quanta[1:] != quanta[:-1])
        is_first[-1] = True
        return self.at(is_first)


def solve_segments(problem: SegmentProblem, budget_bytes: int) -> tuple[bool, ...] | None:
    """The cheapest choice whose peak is within the budget, as whether each unit is nested; None if none is."""
    count = len(problem.input_bytes)
    if problem.forward_peaks_bytes[0] > budget_bytes:
        return None
    none = np.zeros(1, dtype=np.int64)
    ending: list[list[_States]] = [[] for _ in range(count + 1)]
    ending[0].append(_States(none, np.zeros(1), none, none))
    states: list[_States] = []
    for start in range(count):
        if not ending[start]:
            states.append(_States(none[:0], np.zeros(0), none[:0], none[:0]))
            continue
        found = _joined(ending[start])
        states.append(found)
        for stop, longer in _segments(problem, start, found, budget_bytes):
            ending[stop].append(longer)
    if not ending[count]:
        return None
    states.append(_joined(ending[count]))
    choice = _trace_back(states)
    assert problem.peak_bytes(choice) <= budget_bytes, "the solver broke its own constraint"
    return choice


def smallest_segment_peak_bytes(problem: SegmentProblem) -> int:
    """The least budget that has a solution, or a little more: to one part in `FINEST`."""
    # Without costs the state that has freed most dominates all others: each try is quick.
    free = replace(problem, seconds=(0.0,) * len(problem.seconds))
    high = problem.peak_bytes((False,) * len(problem.seconds))
    low = min(problem.forward_peaks_bytes[0], high)
    while (high - low) * FINEST > high:
        middle = (low + high) // 2
        choice = solve_segments(free, middle)
        if choice is None:
            low = middle + 1
        else:
            high = problem.peak_bytes(choice)
    return high


def _joined(parts: list[_States]) -> _States:
    states = _States(*(np.concatenate(columns) for columns in zip(*parts, strict=True))).undominated()
    if states.freed.size > MOST_STATES:
        states = states.thinned(max(1, int(states.freed[-1]) // MOST_STATES))
    return states


def _segments(
    problem: SegmentProblem, start: int, states: _States, budget_bytes: int
) -> list[tuple[int, _States]]:
    """The states after each segment that begins at `start`, by where the next one begins."""
    found = []
    freed, seconds = 0, 0.0
    index = np.arange(states.freed.size, dtype=np.int64)
    for unit in range(start, len(problem.input_bytes)):
        peak_bytes = problem.backward_peaks_bytes[unit]
        if unit > start:
            if not problem.input_bytes[unit]:
                break
            freed += problem.input_bytes[unit]
            seconds += problem.seconds[unit]
            peak_bytes = max(peak_bytes, problem.deriving_peaks_bytes[unit])
        least = max(peak_bytes - budget_bytes, problem.forward_peaks_bytes[unit + 1] - budget_bytes - freed)
        index = index[states.freed[index] >= least]
        if not index.size:
            break
        longer = _States(
            states.freed[index] + freed,
            states.seconds[index] + seconds,
            np.full(index.size, start, dtype=np.int64),
            index,
        )
        found.append((unit + 1, longer))
    return found


def _trace_back(states: list[_States]) -> tuple[bool, ...]:
    """The choice that leads to the cheapest of the last states, which is the first."""
    nested = [True] * (len(states) - 1)
    stop, state = len(states) - 1, 0
    while stop:
        start = int(states[stop].start[state])
        state = int(states[stop].parent[state])
        nested[start] = False
        stop = start
    return tuple(nested)
