"""A request → a `Plan`: the joint search of micro-batch size, precision and an action per unit.

1. Capture training without a plan. Where parameters, gradients and optimizer state alone are over the budget,
   stop (`floor`). Else capture every candidate that the request permits (`search_space`).
2. Where memory limits the best of them, add candidates that take less: with a chunked loss, expandable
   segments, or the optimizer on the host.
3. Take candidates in the order of the least time that they may need, and capture the fastest choice of each
   that really is within the budget, until none that is left could be faster (`fastest`).
4. Take the simplest of the choices that are as fast as predictions can distinguish (`simplest`), with enough
   headroom to exceed the budget as rarely as is permitted (`headroom`).
5. Where nothing fits, capture what takes least. If that is over the budget too, say by how much, and what would
   fit (`infeasible`).
"""

from __future__ import annotations

from collections.abc import Sequence

from brimful.cost import least_distinguished_seconds, least_host_update_seconds, model_flops
from brimful.errors import CaptureError
from brimful.memory import most_held_bytes
from brimful.planner.alternatives import alternatives, budget_curve
from brimful.planner.baseline import Baseline
from brimful.planner.candidate_search import CandidateSearch
from brimful.planner.fastest import (
    by_least_time,
    fastest_within,
    least_seconds_within,
    with_less_offloading,
)
from brimful.planner.floor import bytes_of_update, step_over_floor
from brimful.planner.headroom import bytes_over, exceedance_of, with_headroom
from brimful.planner.infeasible import nothing_fits
from brimful.planner.notes import notes_for, what_safety_costs
from brimful.planner.plan import Plan, PlanStatus
from brimful.planner.request import Request
from brimful.planner.search_space import SearchSpace
from brimful.planner.simplest import simplest_first
from brimful.prediction.estimate import NO_LIMIT_BYTES, Estimate
from brimful.prediction.estimator import Capture
from brimful.settings import Settings
from brimful.trace import Category, Trace

MOST_ROUNDS = 4
"""Budgets that are searched for a choice with enough headroom; two are enough for nearly all jobs."""

TIME_UNCERTAINTY = 0.001
"""Fraction by which times of captures and of what is predicted from them may differ."""


def search(capture: Capture, request: Request) -> Plan:
    """The fastest plan within the request's budget, or the simplest of those that are as fast.

    The prediction is of a capture with the plan applied. If nothing permitted fits, an InfeasibleError says by
    how much, why, and what would; a request that contradicts itself or the device raises UsageError.
    """
    for precision in request.precisions:
        request.device.check_precision(precision)
    baseline = Baseline.of(capture, request)
    request = request.for_model(baseline.trace)
    notes: list[str] = []
    if small := step_over_floor(capture, request, baseline.trace):
        raise nothing_fits(capture, request, small, baseline, notes, is_searched=False)
    candidates = _candidates(capture, with_headroom(request, baseline.estimate), baseline.trace, notes)
    found = _safely_found(candidates, request) or _found(candidates, request)
    if found:
        notes += what_safety_costs(found[0], candidates, request)
        return _plan(request, baseline, candidates, found, notes)
    smallest = _smallest(candidates)
    found = [each for each in smallest if each.predicted_peak_device_bytes <= request.budget_bytes][:1]
    if not found:
        least = min(smallest, key=lambda estimate: estimate.predicted_peak_device_bytes)
        raise nothing_fits(capture, request, least, baseline, notes)
    return _plan(request, baseline, candidates, found, notes)


def _found(candidates: Sequence[CandidateSearch], request: Request) -> list[Estimate]:
    """The choice of the plan and the others captured; none if nothing is within the budget."""
    limit_bytes = request.reserved_budget_bytes
    fastest = fastest_within(candidates, limit_bytes)
    return _simplest_of(candidates, fastest, request, limit_bytes) if fastest else []


def _safely_found(candidates: Sequence[CandidateSearch], request: Request) -> list[Estimate]:
    """The choice of the plan and the others captured, where it exceeds the limit as rarely as is permitted.

    The list is empty if no choice does. The headroom that a choice needs is known once it is captured, so the
    limit is lowered until the choice has enough. A simpler choice is sought only below a limit at which the
    fastest has enough.
    """
    limit_bytes = request.reserved_budget_bytes
    for _ in range(MOST_ROUNDS):
        found = fastest_within(candidates, limit_bytes)
        if not found:
            return []
        over_bytes = bytes_over(found[0], request, request.asked.max_exceedance)
        if over_bytes <= 0:
            found = _simplest_of(candidates, found, request, limit_bytes)
            over_bytes = bytes_over(found[0], request, request.asked.max_exceedance)
            if over_bytes <= 0:
                return found
        limit_bytes = min(limit_bytes, found[0].predicted_peak_reserved_bytes) - over_bytes
    return []


def _simplest_of(
    candidates: Sequence[CandidateSearch], fastest: Sequence[Estimate], request: Request, limit_bytes: int
) -> list[Estimate]:
    """The fastest choices; the simplest of those that are as fast comes first, unless the fastest should."""
    found = with_less_offloading(candidates, fastest, limit_bytes)
    if request.prefers_simplest:
        return simplest_first(candidates, found, request, limit_bytes)
    return found


def _candidates(capture: Capture, request: Request, baseline: Trace, notes: list[str]) -> list[CandidateSearch]:
    """All candidates that are worth a search; those that take less memory only where it limits the others."""
    space = SearchSpace(capture, request, baseline, notes)
    candidates = space.of_bases(request.bases())
    can_chunk = request.asked.chunked_loss and not baseline.couples_samples
    if can_chunk and _is_limited_by_memory(candidates, request):
        candidates += space.with_chunked_loss()
    can_expand = request.asked.expandable_segments and request.device.kind == "cuda"
    if can_expand and _is_limited_by_memory(candidates, request):
        candidates += [each.with_expandable_segments() for each in candidates]
    if request.may_offload_optimizer and _may_gain_on_host(candidates, request, baseline):
        candidates += space.with_offloaded_optimizer(candidates)
    return candidates


def _is_limited_by_memory(candidates: Sequence[CandidateSearch], request: Request) -> bool:
    """Whether taking less memory could make the best plan faster, or there is no plan.

    What is expected decides, and its capture only if that would be fast enough. On a CPU it always could:
    memory that a step has not touched yet takes time to touch.
    """
    if request.device.kind == "cpu":
        return True
    fast_enough = _fastest_ever_seconds(candidates) * (1 + TIME_UNCERTAINTY)
    expected = next(by_least_time(candidates, request.reserved_budget_bytes), None)
    if expected is None or expected.seconds > fast_enough:
        return True
    found = fastest_within(candidates, request.reserved_budget_bytes)
    return not found or found[0].predicted_step_seconds > fast_enough


def _may_gain_on_host(candidates: Sequence[CandidateSearch], request: Request, baseline: Trace) -> bool:
    """Whether nothing fits, or the host's update takes less time than what it could gain.

    It gains at most what the bytes that leave the device would, added to the budget. Where the simplest of
    equal plans is chosen, it must gain enough to be distinguished.
    """
    expected = next(by_least_time(candidates, request.reserved_budget_bytes), None)
    if expected is None:
        return True
    by_optimizer = {each.settings.optimizer: each.candidate.kept for each in candidates}
    leaving_bytes = max(map(bytes_of_update, by_optimizer.values()))
    least_seconds = least_seconds_within(candidates, request.reserved_budget_bytes + leaving_bytes)
    if least_seconds is None:
        return True
    most_gained_seconds = expected.seconds - least_seconds
    state_bytes = 0 if request.asked.allow_optimizers else most_held_bytes(baseline, Category.OPTIMIZER_STATE)
    needed_seconds = least_host_update_seconds(baseline, request.device, state_bytes)
    if request.prefers_simplest:
        needed_seconds += least_distinguished_seconds(expected.seconds)
    return most_gained_seconds > needed_seconds


def _fastest_ever_seconds(candidates: Sequence[CandidateSearch]) -> float:
    """The least time of a step with unlimited memory."""
    return least_seconds_within(candidates, NO_LIMIT_BYTES) or 0.0


def _smallest(candidates: Sequence[CandidateSearch]) -> tuple[Estimate, ...]:
    """Captures of what takes least, the fastest first: without nested segments and with them.

    Of candidates with the same peak the last comes first: with expandable segments it reserves less. The first
    that can be captured is taken, and those that only have other units, where they might reserve less.
    """
    found: list[Estimate] = []
    settings: Settings | None = None
    last_first = list(reversed(candidates))
    for each in sorted(last_first, key=lambda each: each.grid.smallest_nested_peak_bytes):
        least_bytes = min((one.predicted_peak_reserved_bytes for one in found), default=NO_LIMIT_BYTES)
        if each.grid.smallest_nested_peak_bytes < least_bytes and settings in (None, each.settings):
            found += each.smallest()
            settings = each.settings if found else None
    if not found:
        raise CaptureError("none of the ways to train that would take least can be captured.")
    return tuple(sorted(found, key=lambda estimate: estimate.predicted_step_seconds))


def _plan(
    request: Request,
    baseline: Baseline,
    candidates: Sequence[CandidateSearch],
    found: Sequence[Estimate],
    notes: Sequence[str],
) -> Plan:
    """The plan of the first choice that was found."""
    best = found[0]
    return Plan(
        status=PlanStatus.FEASIBLE,
        job=request.job.name,
        device=request.device.name,
        device_kind=request.device.kind,
        budget_bytes=request.budget_bytes,
        settings=best.settings,
        predicted_peak_allocated_bytes=best.predicted_peak_allocated_bytes,
        predicted_peak_reserved_bytes=best.predicted_peak_reserved_bytes,
        predicted_peak_device_bytes=best.predicted_peak_device_bytes,
        predicted_pinned_host_bytes=best.predicted_pinned_host_bytes,
        predicted_host_state_bytes=best.predicted_host_state_bytes,
        predicted_step_seconds=best.predicted_step_seconds,
        predicted_step_seconds_interval=best.predicted_step_seconds_interval,
        model_flops=model_flops(baseline.trace),
        peak_flops_per_second=request.device.peak_flops_per_second(best.settings.precision),
        plain=baseline.compared_with(best.step_time, request.device),
        predicted_exceedance_probability=exceedance_of(best, request),
        alternatives=alternatives(request, candidates, found),
        peak_at=" of ".join([str(best.peak_phase), *([best.peak_module] if best.peak_module else [])]),
        budget_curve=tuple(budget_curve(request, candidates, best, baseline.alternative)),
        notes=notes_for(found, baseline.trace, request, candidates, notes),
    )
