"""What else was searched, what people do by hand, and what other budgets would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from brimful.planner.candidate import Candidate
from brimful.planner.plan import Alternative, BudgetPoint
from brimful.planner.ranking import by_least_time
from brimful.planner.request import Request
from brimful.prediction.estimate import Estimate
from brimful.quantities import GIB
from brimful.settings import Action, Settings

CURVE_POINTS = 12
"""Budgets, besides its own, whose step time a plan shows."""

MOST_ALTERNATIVES = 6
"""Those listed in a plan."""


def alternatives(
    request: Request, candidates: list[Candidate], found: list[Estimate]
) -> tuple[Alternative, ...]:
    """What was looked at and lost, and what people do by hand: one rule for all, the largest micro-batch."""
    best, *lost = found
    captured = [
        _fitting(each.settings, each.predicted_peak_reserved_bytes, each.predicted_step_seconds)
        for each in lost
    ]
    if best.settings.optimizer != request.optimizer:
        own_optimizer = [c for c in candidates if c.settings.optimizer == request.optimizer]
        next(by_least_time(own_optimizer, request.reserved_budget_bytes), None)
    known = {each.settings for each in found}
    looked_at = [candidate.known_expected(request.reserved_budget_bytes) for candidate in candidates]
    expected = [
        _fitting(each.settings, each.reserved_bytes, each.seconds)
        for each in looked_at
        if each is not None and each.settings not in known
    ]
    by_label = {each.label: each for each in sorted([*captured, *expected], key=_step_seconds, reverse=True)}
    by_label.pop(best.settings.describe(), None)  # keeping everything is the same however units are divided
    for other in list(by_label.values()):  # growing segments are worth a line where they are faster
        plainly = by_label.get(replace(other.settings, expandable_segments=False).describe())
        if plainly not in (None, other) and plainly.predicted_step_seconds <= other.predicted_step_seconds:
            del by_label[other.label]
    others_by_hand: list[Alternative] = []
    own = [candidate for candidate in candidates if _is_plain_otherwise(candidate.settings, request)]
    for how, action in (("keep everything", Action.KEEP), ("recompute everything", Action.RECOMPUTE)):
        by_hand = _largest_by_hand(own, action, f"{how}, largest micro-batch")
        if by_hand is not None and by_hand.settings != best.settings:
            by_label.pop(by_hand.settings.describe(), None)
            others_by_hand.append(by_hand)
    others = sorted(by_label.values(), key=_step_seconds)[:MOST_ALTERNATIVES]
    return tuple(sorted([*others, *others_by_hand], key=_step_seconds))


def _fitting(settings: Settings, reserved_bytes: int, step_seconds: float) -> Alternative:
    return Alternative(
        label=settings.describe(),
        settings=settings,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=step_seconds,
        fits=True,
    )


def _step_seconds(alternative: Alternative) -> float:
    return alternative.predicted_step_seconds


def _is_plain_otherwise(settings: Settings, request: Request) -> bool:
    """Whether only the micro-batch and the units differ from plain training."""
    plain = request.plain_settings()
    is_plain = settings.precision is plain.precision and settings.optimizer == plain.optimizer
    return is_plain and settings.chunked_loss is None and not settings.expandable_segments


def budget_curve(
    request: Request, candidates: list[Candidate], best: Estimate, plain: Alternative
) -> Iterator[BudgetPoint]:
    """Times at budgets from the smallest that holds anything to that of plain training, and with one GiB more.

    Segments are taken to hold as much more than is allocated as they do in the plan, and at the least as they
    do there. As that is rough, no smaller budget is told to be faster than the plan, and no larger one slower.
    """
    context_bytes = request.device.context_bytes
    held_fraction = best.predicted_peak_allocated_bytes / best.predicted_peak_reserved_bytes
    first = least_device_bytes(request, candidates, best)
    last = max(plain.predicted_peak_reserved_bytes + context_bytes, first)
    budgets = {first + (last - first) * i // (CURVE_POINTS - 1) for i in range(CURVE_POINTS)}
    one_more = request.budget_bytes + GIB
    for budget_bytes in sorted(budgets | ({one_more} if one_more < last else set())):
        allocated_bytes = int((budget_bytes - context_bytes) * held_fraction)
        times = [candidate.seconds_at_best(allocated_bytes) for candidate in candidates]
        if best.settings.nested:
            times += [candidate.nested_seconds_at_best(allocated_bytes) for candidate in candidates]
        found = [seconds for seconds in times if seconds is not None]
        if found:
            bound = max if budget_bytes <= request.budget_bytes else min
            yield BudgetPoint(
                budget_bytes=budget_bytes,
                predicted_step_seconds=bound(min(found), best.predicted_step_seconds),
            )


def least_device_bytes(request: Request, candidates: list[Candidate], best: Estimate) -> int:
    """What the leanest choice without nested segments takes, as far as is known without capturing it."""
    held_fraction = best.predicted_peak_allocated_bytes / best.predicted_peak_reserved_bytes
    leanest = min(candidates, key=Candidate.smallest_peak_bytes)
    held_bytes = int(leanest.smallest_peak_bytes() / held_fraction) + 1
    reserved_bytes = min(leanest.reserved_at_smallest_peak(), request.reserved_budget_bytes)
    return max(held_bytes, reserved_bytes) + request.device.context_bytes


def _largest_by_hand(candidates: list[Candidate], action: Action, label: str) -> Alternative | None:
    """One action for all units at the largest micro-batch that fits; None if none does."""
    for candidate in sorted(candidates, key=lambda c: -c.settings.micro_batch_size):
        if action is Action.RECOMPUTE and not candidate.units:
            return None
        by_hand = candidate.uniform_alternative(action, label)
        if by_hand.fits:
            return by_hand
    return None
