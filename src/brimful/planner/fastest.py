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
from operator import attrgetter, itemgetter

from brimful.planner.candidate import Candidate, Expected
from brimful.prediction.estimate import Estimate


def fastest_within(candidates: Sequence[Candidate], budget_bytes: int) -> list[Estimate]:
    """The fastest choices of candidates, the best first; those not among them cannot be faster.

    Nested segments are tried last: they are captured, and slower than whatever else fits the same candidate.
    """
    found: list[Estimate] = []
    for expected in by_least_time(candidates, budget_bytes):
        if expected.seconds_at_best >= _least_seconds(found):
            break
        if captured := expected.candidate.captured_from(expected.level, budget_bytes):
            found.append(captured)
    best = _least_seconds(found)
    nested = [(each.solutions.nested_step_seconds(budget_bytes, best), each) for each in candidates]
    for seconds, each in sorted(nested, key=itemgetter(0)):
        least_seconds = _least_seconds(found)
        if each.solutions.seconds_at_best(seconds) < least_seconds:
            captured = each.nested_within(budget_bytes, least_seconds)
            found += [captured] if captured else []
    return by_time(found)


def expected_fastest(candidates: Sequence[Candidate], budget_bytes: int) -> Expected | None:
    """The fastest of all choices that are expected to fit, without nested segments; None if there is none."""
    best: Expected | None = None
    for expected in by_least_time(candidates, budget_bytes):
        if best is not None and expected.seconds_at_best >= best.seconds:
            break
        if best is None or expected.seconds < best.seconds:
            best = expected
    return best


def with_less_offloading(
    candidates: Sequence[Candidate], found: Sequence[Estimate], budget_bytes: int
) -> list[Estimate]:
    """The choices found and those that may be faster than all without their offloading, the best first.

    How much of a copy is hidden is predicted only approximately, so the solver may offload in vain.
    """
    offloading = [replace(each.settings, units=()) for each in found if each.settings.offloaded]
    least_seconds, faster = _least_seconds(found), []
    for each in candidates:
        # Whatever does not offload is among a candidate's choices.
        if each.settings in offloading and each.solutions.step_seconds(budget_bytes) < least_seconds:
            expected = each.without_offloading.expected_within(budget_bytes)
            if expected and expected.seconds_at_best < least_seconds:
                captured = expected.candidate.captured_from(expected.level, budget_bytes)
                faster += [captured] if captured else []
    return by_time([*found, *faster])


def by_least_time(candidates: Iterable[Candidate], budget_bytes: int) -> Iterator[Expected]:
    """The best that is expected of each candidate, by the least time that its capture may have.

    A candidate is first bounded by keeping everything, then by its fastest choice by allocated bytes.
    """
    order = count()
    heap: list[tuple[float, int, Candidate | Expected]] = []
    solved: set[Candidate] = set()
    for each in candidates:
        heappush(heap, (each.solutions.seconds_at_best(each.solutions.kept_seconds), next(order), each))
    while heap:
        _seconds, _place, first = heappop(heap)
        if isinstance(first, Expected):
            yield first
        elif first in solved:
            if expected := first.expected_within(budget_bytes):
                heappush(heap, (expected.seconds_at_best, next(order), expected))
        elif (seconds := first.solutions.step_seconds(budget_bytes)) < math.inf:
            solved.add(first)
            heappush(heap, (first.solutions.seconds_at_best(seconds), next(order), first))


def least_seconds_within(candidates: Iterable[Candidate], allocated_bytes: int) -> float:
    """The least time of any choice by allocated bytes, without nested segments; infinite if nothing fits."""
    least = math.inf
    for each in sorted((each.solutions for each in candidates), key=attrgetter("kept_seconds")):
        if each.kept_seconds >= least:
            break
        least = min(least, each.step_seconds(allocated_bytes))
    return least


def by_time(found: Iterable[Estimate]) -> list[Estimate]:
    """Estimates, the fastest first."""
    return sorted(found, key=attrgetter("predicted_step_seconds"))


def _least_seconds(found: Iterable[Estimate]) -> float:
    return min((estimate.predicted_step_seconds for estimate in found), default=math.inf)
