"""Candidates and a budget of reserved bytes → captures of the fastest choices within it: `fastest_within`.

A candidate's lower bound of the step time is known at once, what is expected of it takes work, and its capture
takes most. So each is done only once no other candidate could be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from brimful.planner.candidate_search import CandidateSearch, ExpectedChoice
from brimful.prediction.estimate import Estimate


def fastest_within(candidates: Sequence[CandidateSearch], budget_bytes: int) -> list[Estimate]:
    """The fastest choices of candidates, the best first; those not among them cannot be faster.

    Nested segments are tried last: they are captured, and slower than whatever else fits the same candidate.
    """
    found: list[Estimate] = []
    for expected in by_least_time(candidates, budget_bytes):
        if expected.seconds_at_best >= _least_seconds(found):
            break
        if captured := expected.search.captured_from(expected.level, budget_bytes):
            found.append(captured)
    best = _least_seconds(found)
    nested = [(each.grid.nested_step_seconds(budget_bytes, best), each) for each in candidates]
    for seconds, each in sorted(((s, c) for s, c in nested if s is not None), key=itemgetter(0)):
        if seconds * (1 - each.candidate.time_uncertainty) < _least_seconds(found):
            captured = each.nested_within(budget_bytes)
            found += [captured] if captured else []
    return _by_time(found)


def with_less_offloading(
    candidates: Sequence[CandidateSearch], found: Sequence[Estimate], budget_bytes: int
) -> list[Estimate]:
    """The choices found and those that may be faster than all without their offloading, the best first.

    How much of a copy is hidden is predicted only approximately, so the solver may offload in vain.
    """
    offloading = [replace(each.settings, units=()) for each in found if each.settings.offloaded]
    faster: list[Estimate] = []
    for each in candidates:
        bound = each.grid.step_seconds(budget_bytes)  # whatever does not offload is among its choices
        if each.settings not in offloading or bound is None or bound >= _least_seconds(found):
            continue
        without = each.without_offloading()
        expected = without.expected_within(budget_bytes)
        if expected and expected.seconds_at_best < _least_seconds(found):
            captured = without.captured_from(expected.level, budget_bytes)
            faster += [captured] if captured else []
    return _by_time([*found, *faster])


def by_least_time(candidates: Iterable[CandidateSearch], budget_bytes: int) -> Iterator[ExpectedChoice]:
    """The best that is expected of each candidate, by the least time that its capture may have.

    A candidate is first bounded by keeping everything, then by its fastest choice by allocated bytes.
    """
    order = count()
    heap: list[tuple[float, int, CandidateSearch | ExpectedChoice]] = []
    solved: set[CandidateSearch] = set()

    def push(seconds: float, uncertainty: float, entry: CandidateSearch | ExpectedChoice) -> None:
        heappush(heap, (seconds * (1 - uncertainty), next(order), entry))

    for each in candidates:
        push(each.candidate.kept_seconds, each.candidate.time_uncertainty, each)
    while heap:
        _seconds, _place, first = heappop(heap)
        if isinstance(first, ExpectedChoice):
            yield first
        elif first in solved:
            if expected := first.expected_within(budget_bytes):
                push(expected.seconds_at_best, 0.0, expected)
        elif (bound := first.grid.step_seconds(budget_bytes)) is not None:
            solved.add(first)
            push(bound, first.candidate.time_uncertainty, first)


def least_seconds_within(candidates: Iterable[CandidateSearch], allocated_bytes: int) -> float | None:
    """The least time of any choice by allocated bytes, without nested segments; None if nothing fits."""
    least = math.inf
    for each in sorted(candidates, key=lambda each: each.candidate.kept_seconds):
        if each.candidate.kept_seconds >= least:
            break
        seconds = each.grid.step_seconds(allocated_bytes)
        least = least if seconds is None else min(least, seconds)
    return None if least == math.inf else least


def _by_time(found: Iterable[Estimate]) -> list[Estimate]:
    return sorted(found, key=lambda estimate: estimate.predicted_step_seconds)


def _least_seconds(found: Iterable[Estimate]) -> float:
    return min((estimate.predicted_step_seconds for estimate in found), default=math.inf)
