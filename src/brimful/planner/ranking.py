"""The order in which candidates are looked at: by the least time of a step that each may be found to take."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from brimful.planner.candidate import Candidate, Expected


def by_least_time(candidates: list[Candidate], budget_bytes: int) -> Iterator[Expected]:
    """The best that is expected of each candidate, by the least time it may be found to take.

    A candidate's bound is known at once; what is expected of it takes work, which is done only once no other
    candidate's bound is lower.

    Args:
        candidates: Those to order.
        budget_bytes: That may be reserved.

    Yields:
        What is expected, the fastest at best first.
    """
    order = count()
    heap: list[tuple[float, int, Candidate | Expected]] = []
    for candidate in candidates:
        bound = candidate.seconds_at_best(budget_bytes)
        if bound is not None:
            heappush(heap, (bound * (1 - candidate.roughness), next(order), candidate))
    while heap:
        _seconds, _place, first = heappop(heap)
        if isinstance(first, Expected):
            yield first
        elif expected := first.expected_within(budget_bytes):
            heappush(heap, (expected.seconds_at_best, next(order), expected))
