"""The largest of a row of sizes that fits, in few predictions; and the records of what was found.

Memory grows with a size: as a line, or as a parabola. Each prediction says which part of the permitted memory
a size takes, its `load`. So the next size to predict is where a parabola through those nearest to a load of 1
says that memory ends. Where two in a row do not halve the interval, its middle is next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from brimful.errors import InfeasibleError
from brimful.planner.headroom import limit_of
from brimful.planner.plan import Plan
from brimful.planner.request import Request
from brimful.prediction import Estimate, Verdict
from brimful.prediction.exceedance import bytes_at_probability
from brimful.utils.display import PrintedResult
from brimful.utils.quantities import format_bytes

Result = TypeVar("Result")

MOST_STEPS = 2**20
"""Steps from 0 at which the search ends. A choice."""
_MOST_GROWTH = 8
"""The next size is at most as many times the largest that fits: what is known of small sizes says little of far
larger ones. A choice."""
_MOST_SLOW = 2
"""Predictions in a row that may not halve the interval, such as of the size after the largest one. A choice."""
_NEAREST = 3
"""Sizes through which the parabola goes."""


class Limit(StrEnum):
    """What ends the search for the largest size."""

    MEMORY = "memory"
    MODEL = "model"
    """The model takes no larger size."""
    SEARCH = "search"
    """The search ends at a size that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Generic[Result]):
    """What is predicted of one size."""

    fits: bool
    needed_bytes: float | None
    """None if that is not known."""
    permitted_bytes: int
    why: str
    """What is predicted, or why the model does not take it."""
    result: Result | None = None
    is_refused: bool = False
    """Whether the model does not take the size."""

    @property
    def load(self) -> float | None:
        """The memory that it needs over what is permitted; None if that is not known."""
        return None if self.needed_bytes is None else self.needed_bytes / self.permitted_bytes

    @classmethod
    def refused(cls, why: str) -> Tried[Result]:
        """A size that the model does not take."""
        return cls(fits=False, needed_bytes=None, permitted_bytes=0, why=why, is_refused=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Generic[Result]):
    """The largest size that fits, and why the next one does not."""

    value: int
    """0 if nothing fits."""
    next_value: int
    limited_by: Limit
    reason: str
    result: Result | None
    """What was predicted of the largest size; None if nothing fits."""
    tried: Mapping[int, Tried[Any]]
    """All that was predicted, by size, in the order of the search."""


def find_largest(
    predict: Callable[[int], Tried[Result]],
    *,
    refusal: Callable[[int], str | None] = lambda _: None,
    step: int = 1,
    start: int = 1,
    most: int = MOST_STEPS,
) -> Largest[Result]:
    """The largest multiple of `step` that fits, where each larger one takes more.

    Args:
        predict: Says of a size whether it fits.
        refusal: Says why the model does not take a size, nor any larger one; None if it takes it.
        step: What sizes are multiples of.
        start: The first size to predict.
        most: The search ends at this many steps.

    Returns:
        The largest that fits; it was predicted, and the next one was predicted or is refused.
    """
    tried: dict[int, Tried[Result]] = {}
    low, high, last, growth, slow = 0, most + 1, most, 1, 0
    count = min(max(start // step, 1), last)
    while high - low > 1:
        if refusal(count * step) is not None:
            last = _last_taken(refusal, low, count, step)
            high, count = last + 1, last
            continue
        width = high - low
        now = tried[count * step] = predict(count * step)
        low, high = (count, high) if now.fits else (low, count)
        guess = _where_full({size // step: each.load for size, each in tried.items()})
        if high > last:  # all that were tried fit
            count = min(max(guess or 0, low + growth), _MOST_GROWTH * low, last)
            growth = 1 if count > low + growth else 2 * growth
            continue
        slow = slow + 1 if 2 * (high - low) > width else 0
        if guess is None or slow > _MOST_SLOW:
            count, slow = (low + high) // 2, 0
        else:
            count = min(max(guess, low + 1), high - 1)
    return _found(tried, low * step, high * step, refusal)


def _last_taken(refusal: Callable[[int], str | None], taken: int, refused: int, step: int) -> int:
    """The last step that the model takes, between one that it takes and one that it refuses."""
    while refused - taken > 1:
        middle = (taken + refused) // 2
        taken, refused = (middle, refused) if refusal(middle * step) is None else (taken, middle)
    return taken


def _found(
    tried: Mapping[int, Tried[Result]], value: int, next_value: int, refusal: Callable[[int], str | None]
) -> Largest[Result]:
    best, beyond = tried.get(value), tried.get(next_value)
    if beyond is not None:
        limit, reason = (Limit.MODEL if beyond.is_refused else Limit.MEMORY), beyond.why
    elif (refused := refusal(next_value)) is not None:
        limit, reason = Limit.MODEL, refused
    else:
        limit, reason = Limit.SEARCH, "the search ends there; larger ones may fit"
    return Largest(
        value=value,
        next_value=next_value,
        limited_by=limit,
        reason=reason,
        result=None if best is None else best.result,
        tried=tried,
    )


def _where_full(loads: dict[int, float | None]) -> int | None:
    """The last size of a load up to 1 by the parabola through the nearest ones; None if it has none."""
    known = {load: size for size, load in loads.items() if load}
    near = sorted(known, key=lambda load: abs(load - 1))[:_NEAREST]
    if not near:
        return None
    # with t the size less x0: l0 + slope t + bend t (t - (x1 - x0)) = 1
    (l0, x0), bend = (near[0], known[near[0]]), 0.0
    slope = l0 / x0
    if len(near) > 1:
        l1, x1 = near[1], known[near[1]]
        slope = (l1 - l0) / (x1 - x0)
    if len(near) == _NEAREST:
        l2, x2 = near[2], known[near[2]]
        bend = ((l2 - l1) / (x2 - x1) - slope) / (x2 - x0)
        slope -= bend * (x1 - x0)
        if slope**2 < 4 * bend * (l0 - 1):
            slope, bend = slope + bend * (x1 - x0), 0.0
    steepness = slope + math.sqrt(slope**2 - 4 * bend * (l0 - 1))  # twice the mean of those at x0 and the end
    return math.floor(x0 - 2 * (l0 - 1) / steepness) if steepness > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestEstimate(PrintedResult):
    """The largest size with which a step fits, and what is predicted of that step."""

    option: str
    """What the size is of, such as "num_hidden_layers"."""
    size: Largest[Estimate]
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestPlan(PrintedResult):
    """The largest size with which a plan exists, that plan, and how large without one."""

    option: str
    """What the size is of, such as "num_hidden_layers"."""
    size: Largest[Plan]
    plan: Plan
    """Without suggestions, which `brimful.plan` has."""
    kept: Estimate
    """The same size, nothing recomputed and the whole batch at once, as if that fitted."""
    without_plan: LargestEstimate | None
    """The largest size that fits with nothing recomputed and the whole batch at once; None if none does."""


def tried_estimate(estimate: Estimate, shown: str) -> Tried[Estimate]:
    """What an estimate says of a size, which `shown` names: it fits with the upper end of its interval."""
    most_bytes = estimate.predicted_device_interval_bytes[1]
    why = f"{shown} may take up to {_of_permitted(most_bytes, estimate.capacity_bytes)}"
    if most_bytes <= estimate.capacity_bytes:
        why = f"{shown} fits only where the allocator frees its cache in each step, which is slow"
    return Tried(
        fits=estimate.verdict is Verdict.FITS,
        needed_bytes=most_bytes,
        permitted_bytes=estimate.capacity_bytes,
        why=why,
        result=estimate,
    )


def tried_step(step: Estimate, request: Request, shown: str) -> Tried[Estimate]:
    """Whether the smallest step of a size, which `shown` names, is as safe as a request asks for."""
    limit_bytes = limit_of(request)
    needed_bytes = bytes_at_probability(step.device_peak, request.device.kind, request.asked.max_exceedance)
    return Tried(
        fits=needed_bytes <= limit_bytes,
        needed_bytes=needed_bytes,
        permitted_bytes=limit_bytes,
        why=f"{shown} may take up to {_of_permitted(needed_bytes, limit_bytes)}, in the smallest step found "
        f"({step.settings.describe()})",
        result=step,
    )


def tried_plan(plan: Plan, shown: str) -> Tried[Plan]:
    """A plan of a size, which `shown` names: it fits if it is as safe as was asked for."""
    chance, asked = plan.predicted_exceedance_probability or 0.0, plan.asked.max_exceedance
    budget = format_bytes(plan.budget_bytes)
    return Tried(
        fits=chance <= asked,
        needed_bytes=None,
        permitted_bytes=plan.budget_bytes,
        why=f"the safest plan of {shown} exceeds {budget} with a probability of {chance:.2g}; {asked:.2g} is "
        "permitted",
        result=plan,
    )


def tried_without_plan(error: InfeasibleError, shown: str) -> Tried[Plan]:
    """A size, which `shown` names, of which no plan fits."""
    why = f"{shown} takes {_of_permitted(error.smallest_peak_bytes, error.budget_bytes)}, in the smallest plan"
    return Tried(
        fits=False,
        needed_bytes=error.smallest_peak_bytes,
        permitted_bytes=error.budget_bytes,
        why=why,
    )


def _of_permitted(needed_bytes: int, permitted_bytes: int) -> str:
    too_much = f", {format_bytes(needed_bytes - permitted_bytes)} too much" * (needed_bytes > permitted_bytes)
    return f"{format_bytes(needed_bytes)} of {format_bytes(permitted_bytes)}{too_much}"
