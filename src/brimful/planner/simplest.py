"""The fastest choices → the simplest of those that are as fast, as far as predictions can distinguish them.

A choice is as fast as the fastest if the interval of the difference of their times contains 0, and it costs at
most `SIMPLICITY_FRACTION` of the step as predicted. Of these the simplest is taken, by `complexity_of`, and of
equally simple ones that with most headroom. Start reading at `simplest_first`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from operator import itemgetter

from brimful.cost import difference_interval
from brimful.planner.candidate import Candidate, Expected
from brimful.planner.fastest import by_time
from brimful.planner.request import Request
from brimful.prediction.estimate import NO_LIMIT_BYTES, Estimate
from brimful.settings import Settings

SIMPLICITY_FRACTION = 0.03
"""Most of the step time that simplicity may cost, as predicted. A choice: the median error of predicted steps
(`benchmarks/results/times_vision.json`, 3.1 %)."""


class Complexity(IntEnum):
    """What a step does beyond one forward and backward, each with what comes before it as well."""

    NOTHING = 0
    ACCUMULATION = 1
    CHUNKED_LOSS = 2
    RECOMPUTE = 3
    OFFLOAD = 4
    OPTIMIZER_ON_HOST = 5


def complexity_of(settings: Settings) -> Complexity:
    """The most complex of what settings do."""
    if settings.offload_optimizer:
        return Complexity.OPTIMIZER_ON_HOST
    if settings.offloaded:
        return Complexity.OFFLOAD
    if settings.changed:
        return Complexity.RECOMPUTE
    if settings.chunked_loss is not None:
        return Complexity.CHUNKED_LOSS
    return Complexity.ACCUMULATION if settings.gradient_accumulation_steps > 1 else Complexity.NOTHING


def simplest_first(
    candidates: Sequence[Candidate], found: Sequence[Estimate], request: Request, budget_bytes: int
) -> list[Estimate]:
    """The choices found, by time, but the simplest of those that are as fast as the fastest comes first.

    `found` are captures of the candidates' fastest choices within `budget_bytes` of reserved memory, the
    fastest first; at least one. What is captured besides is among the result.
    """
    fastest = found[0]
    most_seconds = fastest.predicted_step_seconds * (1 + SIMPLICITY_FRACTION)
    others = {each.settings: each for each in found[1:]}
    own_order = order_of(fastest.settings, fastest.predicted_peak_reserved_bytes, request)
    simpler = [
        (order_of(each.settings, each.reserved_bytes, request), each)
        for each in _maybe_as_fast(candidates, fastest, budget_bytes, most_seconds)
    ]
    for order, expected in sorted(simpler, key=itemgetter(0)):
        if order >= own_order:
            break
        captured = expected.candidate.captured_from(expected.level, budget_bytes)
        if captured is None:
            continue
        is_simpler = order_of(captured.settings, captured.predicted_peak_reserved_bytes, request) < own_order
        is_fast = captured.predicted_step_seconds <= most_seconds and are_as_fast(captured, fastest, request)
        if is_simpler and is_fast:
            others.pop(captured.settings, None)
            return [captured, fastest, *by_time(others.values())]
        others.setdefault(captured.settings, captured)
    return [fastest, *by_time(others.values())]


def are_as_fast(one: Estimate, other: Estimate, request: Request) -> bool:
    """Whether the interval of the difference between two steps of a model contains 0."""
    low, high = difference_interval(one.step_time, other.step_time, request.device)
    return low <= 0 <= high


def order_of(settings: Settings, reserved_bytes: int, request: Request) -> tuple[int, ...]:
    """How simple settings are among those that a request permits: the least comes first.

    The order is that of the optimizer, the precision, the parallelism and the memory format among those that
    are permitted; then complexity, whether expandable segments are needed, units changed, and bytes reserved.
    """
    return (
        _place(settings.optimizer, request.optimizers),  # the job's own is the first of these
        _place(settings.precision, request.precisions),
        _place(settings.parallelism, request.parallelisms),
        _place(settings.memory_format, request.memory_formats),
        complexity_of(settings),
        settings.expandable_segments,
        len(settings.changed),
        reserved_bytes,
    )


def _place(chosen: object, permitted: Sequence[object]) -> int:
    """The place of a choice among those that are permitted; the end if it is another."""
    return permitted.index(chosen) if chosen in permitted else len(permitted)


def _maybe_as_fast(
    candidates: Sequence[Candidate], fastest: Estimate, budget_bytes: int, most_seconds: float
) -> Iterator[Expected]:
    """Choices of candidates that may be as fast: everything kept, or else recomputation without offloading."""
    moves_to_host = complexity_of(fastest.settings) > Complexity.RECOMPUTE
    for each in candidates:
        if not each.solutions.may_take(most_seconds, NO_LIMIT_BYTES):
            continue
        expected = each.kept()
        if expected is None or expected.reserved_bytes > budget_bytes:
            expected = _without_offloading(each, budget_bytes, most_seconds) if moves_to_host else None
        if expected is not None and expected.seconds_at_best <= most_seconds:
            yield expected


def _without_offloading(candidate: Candidate, budget_bytes: int, most_seconds: float) -> Expected | None:
    """The fastest choice that is expected to fit without offloading units, if it may be fast."""
    if not candidate.solutions.may_take(most_seconds, budget_bytes):
        return None
    without = candidate.without_offloading
    may_be = without.solutions.may_take(most_seconds, budget_bytes)
    return without.expected_within(budget_bytes) if may_be else None
