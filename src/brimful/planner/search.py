"""A request → a `Plan`: the joint search of micro-batch size, precision and an action per unit.

1. Capture training without a plan. Where parameters, gradients and optimizer state alone are over the budget,
   stop (`floor`). Else capture every candidate that the request permits, and where memory limits the best of
   them, candidates that take less: with a chunked loss, expandable segments, or the optimizer on the host
   (`candidates`).
2. Take candidates in the order of the least time that they may need, and capture the fastest choice of each
   that really is within the budget, until none that is left could be faster (`fastest`).
3. Take the simplest of the choices that are as fast as predictions can distinguish (`simplest`), with enough
   headroom to exceed the budget as rarely as is permitted (`headroom`). If none has enough, add candidates with
   the optimizer on the host, and take the choice that exceeds the budget least often.
4. Where nothing fits, capture what takes least. If that is over the budget too, say by how much, and what would
   fit (`explain.infeasible`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from brimful.cost import least_distinguished_seconds, model_flops
from brimful.errors import CaptureError
from brimful.planner.candidate import Candidate, planned_trace
from brimful.planner.candidates import SearchSpace
from brimful.planner.explain.alternatives import alternatives, baseline_alternative, budget_curve
from brimful.planner.explain.changes import JobChanges
from brimful.planner.explain.infeasible import nothing_fits
from brimful.planner.explain.notes import notes_for, what_safety_costs
from brimful.planner.explain.suggestions import suggestions
from brimful.planner.fastest import by_time, expected_fastest, fastest_within, with_less_offloading
from brimful.planner.floor import step_over_floor
from brimful.planner.headroom import exceedance_of, lowered_limit, with_headroom
from brimful.planner.plan import Plan, PlanStatus
from brimful.planner.request import Request
from brimful.planner.simplest import simplest_first
from brimful.prediction.estimate import NO_LIMIT_BYTES, Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture
from brimful.settings import Compile, Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace
from brimful.trace.modules import shown_module

HIGHER_PROBABILITIES = (0.03, 0.1, 0.3, 1.0)
"""Probabilities of exceeding the budget that are permitted one after another, where no choice exceeds it as
rarely as was asked for. They are a choice of ours."""

MOST_ROUNDS = 8
"""Budgets that are searched for a choice with enough headroom; two are enough for nearly all jobs. Where
headroom is a fraction f of the budget, what is lacking is multiplied by about f in each round; f ≤ 0.25."""


def search(capture: Capture, request: Request, job_changes: JobChanges | None = None) -> Plan:
    """The fastest plan within the request's budget, or the simplest of those that are as fast.

    The prediction is of a capture with the plan applied. If nothing permitted fits, an InfeasibleError says by
    how much, why, and what would; a request that contradicts itself or the device raises UsageError.
    """
    for precision in request.precisions:
        request.device.check_precision(precision)
    trace = per_rank_trace(capture(request.baseline_settings()))
    baseline = estimate_unlimited(trace.with_last_step_again(), request.device)
    request = request.for_model(trace)
    notes: list[str] = []
    if small := step_over_floor(capture, request, trace):
        raise nothing_fits(capture, request, small, trace, baseline, notes, job_changes, is_searched=False)
    space = SearchSpace(capture, with_headroom(request, baseline), trace, notes)
    candidates = space.candidates()
    found = _found(candidates, request, request.asked.max_exceedance)
    if not found:
        candidates += space.with_optimizer_on_host(candidates)
        found = _safest(candidates, request)
    if request.compiles != (Compile.NONE,):
        candidates, found = _with_compiled(space, candidates, found, request)
    if found:
        notes += what_safety_costs(found[0], candidates, request)
    else:
        smallest = _smallest(candidates)
        found = [each for each in smallest if each.predicted_peak_device_bytes <= request.budget_bytes][:1]
        if not found:
            least = min(smallest, key=lambda estimate: estimate.predicted_peak_device_bytes)
            raise nothing_fits(capture, request, least, trace, baseline, notes, job_changes)
    planned = planned_trace(found[0].settings, capture)  # known from the search
    plan = _plan(request, trace, baseline, candidates, found, planned, notes)
    if job_changes is None:
        return plan
    skipped: list[str] = []
    suggested = suggestions(
        *(capture, request, trace, found[0], job_changes),
        notes=skipped,
        unlimited=baseline,
    )
    return replace(plan, suggestions=suggested, notes=(*plan.notes, *skipped))


def _with_compiled(
    space: SearchSpace, candidates: list[Candidate], found: list[Estimate], request: Request
) -> tuple[list[Candidate], list[Estimate]]:
    """Candidates and choices with those that compile, which come first where they are faster or asked for."""
    smallest = min(candidates, key=lambda each: each.solutions.smallest_nested_peak_bytes)
    compiled = space.compiled(found[0].settings if found else smallest.settings)
    faster = _safest(compiled, request) if compiled else []
    if Compile.NONE not in request.compiles:
        return (candidates + compiled, faster + found) if faster else (compiled, [])
    if found and faster:
        seconds = found[0].predicted_step_seconds
        least_gain = least_distinguished_seconds(seconds) if request.prefers_simplest else 0.0
        gains = seconds - faster[0].predicted_step_seconds > least_gain
        permitted = max(exceedance_of(found[0], request), request.asked.max_exceedance)
        if not gains or exceedance_of(faster[0], request) > permitted:
            return candidates, found
    return candidates + compiled, faster + found


def least_step(capture: Capture, request: Request) -> Estimate:
    """The step that takes least of all that a request permits, as `search` finds it where nothing else fits."""
    trace = per_rank_trace(capture(request.baseline_settings()))
    request = request.for_model(trace)
    small = step_over_floor(capture, request, trace)
    if small is not None:
        return small
    baseline = estimate_unlimited(trace.with_last_step_again(), request.device)
    space = SearchSpace(capture, with_headroom(request, baseline), trace, [])
    candidates = space.candidates()
    candidates += space.with_optimizer_on_host(candidates)
    return min(_smallest(candidates), key=lambda estimate: estimate.predicted_peak_device_bytes)


def _safest(candidates: Sequence[Candidate], request: Request) -> list[Estimate]:
    """The choice of the plan and the others captured, at the first permitted probability that one keeps.

    The probability asked for is tried again, as candidates were added.
    """
    asked = request.asked.max_exceedance
    permitted = [asked, *(each for each in HIGHER_PROBABILITIES if each > asked)]
    return next(filter(None, (_found(candidates, request, each) for each in permitted)), [])


def _found(candidates: Sequence[Candidate], request: Request, exceedance: float) -> list[Estimate]:
    """The choice of the plan and the others captured, where it exceeds the limit with at most a probability.

    The list is empty if no choice does. The headroom that a choice needs is known once it is captured, so the
    limit is lowered until the choice has enough. A simpler choice is sought only below a limit at which the
    fastest has enough.
    """
    limit_bytes = _expected_limit(candidates, request, exceedance)
    for _ in range(MOST_ROUNDS):
        found = fastest_within(candidates, limit_bytes)
        if not found:
            return []
        lowered = lowered_limit(found[0].device_peak, request, exceedance)
        if lowered is None:
            found = _simplest_of(candidates, found, request, limit_bytes)
            lowered = lowered_limit(found[0].device_peak, request, exceedance)
            if lowered is None:
                return found
        limit_bytes = lowered
    return []


def _expected_limit(candidates: Sequence[Candidate], request: Request, exceedance: float) -> int:
    """Reserved bytes at which the fastest choice is expected to have the headroom that it needs.

    Splices show it, which take no captures where units can be spliced. What they show not to fit is left to
    captures: they may predict more than a capture does, and choices that fit would be excluded.
    """
    limit_bytes = request.reserved_budget_bytes
    for _ in range(MOST_ROUNDS):
        best = expected_fastest(candidates, limit_bytes)
        lowered = None if best is None else lowered_limit(best.device_peak, request, exceedance)
        if best is None or lowered is None:
            break
        if best.device_peak.likely_bytes - request.device.context_bytes > limit_bytes:
            break
        limit_bytes = lowered
    return limit_bytes


def _simplest_of(
    candidates: Sequence[Candidate], fastest: Sequence[Estimate], request: Request, limit_bytes: int
) -> list[Estimate]:
    """The fastest choices; the simplest of those that are as fast comes first, unless the fastest should."""
    found = with_less_offloading(candidates, fastest, limit_bytes)
    if request.prefers_simplest:
        return simplest_first(candidates, found, request, limit_bytes)
    return found


def _smallest(candidates: Sequence[Candidate]) -> list[Estimate]:
    """Captures of what takes least, the fastest first: without nested segments and with them.

    Of candidates with the same peak the last comes first: with expandable segments it reserves less. The first
    that can be captured is taken, and those that only have other units, where they might reserve less.
    """
    found: list[Estimate] = []
    settings: Settings | None = None
    last_first = reversed(candidates)
    for each in sorted(last_first, key=lambda each: each.solutions.smallest_nested_peak_bytes):
        least_bytes = min((one.predicted_peak_reserved_bytes for one in found), default=NO_LIMIT_BYTES)
        if each.solutions.smallest_nested_peak_bytes < least_bytes and settings in (None, each.settings):
            found += each.smallest()
            settings = each.settings if found else None
    if not found:
        raise CaptureError("none of the ways to train that would take least can be captured.")
    return by_time(found)


def _plan(
    request: Request,
    trace: Trace,
    baseline: Estimate,
    candidates: Sequence[Candidate],
    found: Sequence[Estimate],
    planned: Trace,
    notes: Sequence[str],
) -> Plan:
    """The plan of the first choice that was found, of which `planned` is the trace.

    `trace` and `baseline` are of training without a plan.
    """
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
        model_flops=model_flops(trace),
        peak_flops_per_second=request.device.peak_flops_per_second(best.settings.precision),
        plain=baseline_alternative(request, baseline, best),
        predicted_exceedance_probability=exceedance_of(best, request),
        alternatives=alternatives(request, candidates, found),
        peak_at=" of ".join(
            [str(best.peak_phase), *([shown_module(best.peak_module)] if best.peak_module else [])]
        ),
        budget_curve=tuple(budget_curve(request, candidates, best, baseline)),
        notes=tuple(notes_for(found, trace, planned, request, candidates, notes)),
    )
