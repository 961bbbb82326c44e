"""Alternatives to a plan: other searched settings, common manual choices, and other budgets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from brimful.cost import StepTime, bare_difference_interval, difference_interval, step_seconds
from brimful.memory import replay_allocations
from brimful.planner.candidate import Candidate, Expected
from brimful.planner.fastest import by_least_time, least_seconds_within
from brimful.planner.plan import Alternative, BudgetPoint
from brimful.planner.request import Request
from brimful.planner.solutions import uniform_actions
from brimful.prediction.estimate import Estimate
from brimful.settings import Action, Settings
from brimful.utils.quantities import GIB

CURVE_POINTS = 12
"""Budgets, besides its own, whose step time a plan shows."""

MOST_ALTERNATIVES = 6
"""Number of alternatives that a plan lists, at most."""

_SAME_FRACTION = 0.001
"""Memory and times that differ by less are equal. A choice."""


def baseline_alternative(request: Request, baseline: Estimate, best: Estimate) -> Alternative:
    """The record that a plan has of training without one."""
    settings = request.baseline_settings()
    return _captured(
        "baseline", settings, baseline.predicted_peak_reserved_bytes, baseline.step_time, best, request
    )


def alternatives(
    request: Request, candidates: Sequence[Candidate], found: Sequence[Estimate]
) -> tuple[Alternative, ...]:
    """Other searched settings, faster but less simple ones among them, and one action for all units."""
    best = found[0]
    by_label = _searched(request, candidates, found)
    by_hand: list[Alternative] = []
    own = [each for each in candidates if _is_baseline_otherwise(each.settings, request)]
    for how, action in (("keep everything", Action.KEEP), ("recompute everything", Action.RECOMPUTE)):
        largest = _largest_by_hand(own, action, f"{how}, largest micro-batch", best, request)
        if largest is not None and largest.settings != best.settings:
            by_label.pop(largest.settings.describe(), None)
            by_hand.append(largest)
    others = list(
        _different(sorted(by_label.values(), key=_seconds), [_of_estimate(best, best, request), *by_hand])
    )
    return tuple(sorted([*others[:MOST_ALTERNATIVES], *by_hand], key=_seconds))


def _different(alternatives: Sequence[Alternative], listed: Sequence[Alternative]) -> Iterator[Alternative]:
    """The alternatives of another memory or time than all listed and all before; of equal ones, the first."""
    seen = list(listed)
    for each in alternatives:
        if not any(_is_equal(each, other) for other in seen):
            seen.append(each)
            yield each


def _is_equal(one: Alternative, other: Alternative) -> bool:
    """Whether two take the same memory and time, as a reader of three digits sees them."""
    return math.isclose(
        one.predicted_peak_reserved_bytes, other.predicted_peak_reserved_bytes, rel_tol=_SAME_FRACTION
    ) and math.isclose(one.predicted_step_seconds, other.predicted_step_seconds, rel_tol=_SAME_FRACTION)


def _searched(
    request: Request, candidates: Sequence[Candidate], found: Sequence[Estimate]
) -> dict[str, Alternative]:
    """Captured or expected settings other than the best, the fastest of each label."""
    best, budget_bytes = found[0], request.reserved_budget_bytes
    if best.settings.optimizer != request.asked.optimizer:  # the best with the job's own is listed too
        own_optimizer = [each for each in candidates if each.settings.optimizer == request.asked.optimizer]
        next(by_least_time(own_optimizer, budget_bytes), None)
    known = {each.settings for each in found}
    looked_at = (each.expected.get(budget_bytes) for each in candidates)
    searched = [
        *(_of_estimate(each, best, request) for each in found[1:]),
        *(
            _expected(each, best)
            for each in looked_at
            if each is not None and each.reserved_bytes <= budget_bytes and each.settings not in known
        ),
    ]
    by_label = {each.label: each for each in sorted(searched, key=_seconds, reverse=True)}
    by_label.pop(best.settings.describe(), None)  # keeping everything is the same however units are divided
    for other in list(by_label.values()):  # expandable segments are worth a line where they are faster
        without = by_label.get(replace(other.settings, expandable_segments=False).describe())
        if without not in (None, other) and without.predicted_step_seconds <= other.predicted_step_seconds:
            del by_label[other.label]
    return by_label


def _of_estimate(captured: Estimate, best: Estimate, request: Request) -> Alternative:
    settings, reserved_bytes = captured.settings, captured.predicted_peak_reserved_bytes
    return _captured(settings.describe(), settings, reserved_bytes, captured.step_time, best, request)


def _captured(
    label: str, settings: Settings, reserved_bytes: int, time: StepTime, best: Estimate, request: Request
) -> Alternative:
    """The record of a captured step; whether its prediction fits, and how far it is from the best."""
    return Alternative(
        label=label,
        settings=settings,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=time.total_seconds,
        fits=reserved_bytes <= request.reserved_budget_bytes,
        predicted_difference_interval_seconds=difference_interval(time, best.step_time, request.device),
    )


def _expected(expected: Expected, best: Estimate) -> Alternative:
    """The record of a choice that was not captured."""
    best_seconds = best.predicted_step_seconds
    interval = bare_difference_interval(expected.seconds - best_seconds, best_seconds)
    return Alternative(
        label=expected.settings.describe(),
        settings=expected.settings,
        predicted_peak_reserved_bytes=expected.reserved_bytes,
        predicted_step_seconds=expected.seconds,
        fits=True,
        predicted_difference_interval_seconds=interval,
    )


def _seconds(alternative: Alternative) -> float:
    return alternative.predicted_step_seconds


def _is_baseline_otherwise(settings: Settings, request: Request) -> bool:
    """Whether only the micro-batch and the units differ from training without a plan."""
    baseline = request.baseline_settings()
    is_same = settings.precision is baseline.precision and settings.optimizer == baseline.optimizer
    return is_same and settings.chunked_loss is None and not settings.expandable_segments


def budget_curve(
    request: Request, candidates: Sequence[Candidate], best: Estimate, baseline: Estimate
) -> Iterator[BudgetPoint]:
    """Times at budgets from the smallest that fits anything to that of the baseline, and with one GiB more.

    Reserved bytes are taken to exceed allocated bytes by the same factor as in the plan; the smallest budget is
    at least what its choice is expected to reserve. As that is approximate, no smaller budget is shown as
    faster than the plan, and no larger one as slower.
    """
    allocated_fraction = best.predicted_peak_allocated_bytes / best.predicted_peak_reserved_bytes
    first = least_device_bytes(request, candidates, best)
    last = max(baseline.predicted_peak_device_bytes, first)
    budgets = {first + (last - first) * i // (CURVE_POINTS - 1) for i in range(CURVE_POINTS)}
    one_more = request.budget_bytes + GIB
    for budget_bytes in sorted(budgets | ({one_more} if one_more < last else set())):
        allocated_bytes = int((budget_bytes - request.device.context_bytes) * allocated_fraction)
        seconds = least_seconds_within(candidates, allocated_bytes)
        if best.settings.nested:
            nested = (each.solutions.nested_step_seconds(allocated_bytes) for each in candidates)
            seconds = min(seconds, *nested)
        if seconds < math.inf:
            bound = max if budget_bytes <= request.budget_bytes else min
            shown_seconds = bound(seconds, best.predicted_step_seconds)
            yield BudgetPoint(budget_bytes=budget_bytes, predicted_step_seconds=shown_seconds)


def least_device_bytes(request: Request, candidates: Sequence[Candidate], best: Estimate) -> int:
    """What the smallest choice without nested segments takes, as far as is known without capturing it."""
    allocated_fraction = best.predicted_peak_allocated_bytes / best.predicted_peak_reserved_bytes
    smallest = min(candidates, key=lambda each: each.solutions.smallest_peak_bytes)
    held_bytes = int(smallest.solutions.smallest_peak_bytes / allocated_fraction) + 1
    reserved_bytes = min(smallest.reserved_at_smallest_peak(), request.reserved_budget_bytes)
    return max(held_bytes, reserved_bytes) + request.device.context_bytes


def _largest_by_hand(
    candidates: Sequence[Candidate], action: Action, label: str, best: Estimate, request: Request
) -> Alternative | None:
    """One action for all units at the largest micro-batch that fits; None if none does."""
    for each in sorted(candidates, key=lambda each: -each.settings.micro_batch_size):
        if action is Action.RECOMPUTE and not each.solutions.units:
            return None
        trace = each.solutions.uniform_trace(action)
        reserved_bytes = replay_allocations(trace).peak_reserved_bytes
        if reserved_bytes <= request.reserved_budget_bytes:
            settings = replace(each.settings, units=uniform_actions(each.solutions.units, action))
            time = step_seconds(trace, request.device)
            return _captured(label, settings, reserved_bytes, time, best, request)
    return None
