"""The joint search: micro-batch × precision × an action per unit, replayed, the fastest that fits.

Every candidate tells the least time that the budget could permit it, and with more work what is expected of it
once all that is reserved counts. They are captured in that order, each to its fastest choice that really is
within the budget, until none that is left could be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from operator import itemgetter

from brimful.cost import least_host_update_seconds, model_flops
from brimful.errors import CaptureError, UsageError
from brimful.memory import most_held_bytes, pinned_host_bytes
from brimful.planner.alternatives import alternatives, budget_curve
from brimful.planner.candidate import Candidate, CandidateFamily, alternative
from brimful.planner.infeasible import nothing_fits
from brimful.planner.notes import notes_for
from brimful.planner.plan import Plan, PlanStatus
from brimful.planner.problem.logits import LOSS_CHUNKS, logits_layer
from brimful.planner.ranking import by_least_time
from brimful.planner.request import Request
from brimful.prediction.estimate import NO_LIMIT_BYTES, Estimate
from brimful.prediction.estimator import Capture
from brimful.quantities import format_bytes
from brimful.settings import ChunkedLoss, Parallelism, Settings
from brimful.trace import Category, Trace
from brimful.trace.ddp import per_rank_trace

ROUGHNESS = 0.001
"""Part by which times of captures and of what is derived from them may differ."""


def search(capture: Capture, request: Request) -> Plan:
    """The fastest plan within the request's budget.

    Args:
        capture: Runs a step on fake tensors.
        request: What is asked and what is pinned.

    Returns:
        A plan whose prediction is of a capture with the plan applied.

    Raises:
        InfeasibleError: Nothing permitted fits; the message says by how much, why, and what would.
        UsageError: The request contradicts itself or the device.
    """
    for precision in request.precisions:
        request.device.check_precision(precision)
    plain_trace = per_rank_trace(capture(request.plain_settings()))
    plain = alternative("plain training", plain_trace, request.plain_settings(), request)
    notes: list[str] = []
    candidates = _candidates(capture, request, plain_trace, request.bases(), notes)
    can_chunk = request.permits_chunked_loss and not plain_trace.couples_samples
    if can_chunk and _is_held_back(candidates, request):
        candidates += _with_chunked_loss(capture, request, plain_trace, notes)
    can_grow = request.permits_expandable_segments and request.device.kind == "cuda"
    if can_grow and _is_held_back(candidates, request):
        candidates += [candidate.with_expandable_segments() for candidate in candidates]
    if request.may_put_optimizer_on_host and _may_gain_on_host(candidates, request, plain_trace):
        candidates += _with_optimizer_on_host(capture, request, plain_trace, candidates, notes)
    found = _fastest(candidates, request.reserved_budget_bytes)
    if found:
        found = _by_time(found + _without_offloading(candidates, found, request.reserved_budget_bytes))
    else:
        leanest = _leanest(candidates)
        found = [each for each in leanest if each.predicted_peak_device_bytes <= request.budget_bytes][:1]
        if not found:
            smallest = min(leanest, key=lambda estimate: estimate.predicted_peak_device_bytes)
            raise nothing_fits(capture, request, smallest, plain, plain_trace, notes)
    best = found[0]
    return Plan(
        status=PlanStatus.FEASIBLE,
        job=request.job,
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
        model_flops=model_flops(plain_trace),
        peak_flops_per_second=request.device.peak_flops_per_second(best.settings.precision),
        plain=plain,
        alternatives=alternatives(request, candidates, found),
        peak_at=" of ".join([str(best.peak_phase), *([best.peak_module] if best.peak_module else [])]),
        budget_curve=tuple(budget_curve(request, candidates, best, plain)),
        notes=notes_for(best, plain_trace, request, candidates, notes),
    )


def _candidates(
    capture: Capture, request: Request, plain: Trace, bases: Iterable[Settings], notes: list[str]
) -> list[Candidate]:
    """All ways to train that can be captured; what cannot is noted."""
    is_whole = request.keeps_batch_whole(plain)
    sizes = (request.rank_batch_size,) if is_whole else request.micro_batch_sizes()
    found: list[Candidate] = []
    for base in bases:
        try:
            found += CandidateFamily(capture, request, base, sizes, notes).candidates()
        except (CaptureError, UsageError) as error:
            if base.parallelism is Parallelism.FSDP2 and len(request.parallelisms) > 1:
                notes.append(f"FSDP2 is not considered: {error}")
                continue
            if base.optimizer_implementation is None:
                raise
            left_to_torch = replace(base, optimizer_implementation=None)
            found += CandidateFamily(capture, request, left_to_torch, sizes, notes).candidates()
            notes.append(f"The {base.optimizer_implementation} optimizer is not considered: {error}")
    return found


def _leanest(candidates: list[Candidate]) -> tuple[Estimate, ...]:
    """Captures of what takes least, with growing segments where they are permitted.

    Args:
        candidates: Those with growing segments last.

    Returns:
        Of the leanest candidate that can be captured: without nested segments, and with them.

    Raises:
        CaptureError: None can.
    """
    growing_first = [*candidates]
    growing_first.reverse()  # of two that take the same, the one with growing segments reserves less
    for candidate in sorted(growing_first, key=Candidate.smallest_nested_peak_bytes):
        if found := candidate.leanest():
            return found
    raise CaptureError("none of the ways to train that would take least can be captured.")


def _is_held_back(candidates: list[Candidate], request: Request) -> bool:
    """Whether sparing memory could make the best plan faster, or there is none.

    What is expected decides, and its capture only if that would be fast enough. On a CPU it always could:
    memory that a step has not touched yet takes time to touch.
    """
    if request.device.kind == "cpu":
        return True
    fastest_ever = min(filter(None, (candidate.seconds_at_best(NO_LIMIT_BYTES) for candidate in candidates)))
    fast_enough = fastest_ever * (1 + ROUGHNESS)
    expected = next(by_least_time(candidates, request.reserved_budget_bytes), None)
    if expected is None or expected.seconds > fast_enough:
        return True
    found = _fastest(candidates, request.reserved_budget_bytes)
    return not found or found[0].predicted_step_seconds > fast_enough


def _may_gain_on_host(candidates: list[Candidate], request: Request, plain: Trace) -> bool:
    """Whether nothing fits, or the host's update takes less than what sparing memory costs now."""
    found = _fastest(candidates, request.reserved_budget_bytes)
    if not found:
        return True
    fastest_ever = min(filter(None, (candidate.seconds_at_best(NO_LIMIT_BYTES) for candidate in candidates)))
    most_spared = found[0].predicted_step_seconds - fastest_ever
    state_bytes = 0 if request.other_optimizers else most_held_bytes(plain, Category.OPTIMIZER_STATE)
    return most_spared > least_host_update_seconds(plain, request.device, state_bytes)


def _with_optimizer_on_host(
    capture: Capture, request: Request, plain: Trace, candidates: list[Candidate], notes: list[str]
) -> list[Candidate]:
    """The same ways to train with the optimizer on the host, but for those that fail or have no room there."""
    whole = (candidate.settings.with_micro_batch_size(request.rank_batch_size) for candidate in candidates)
    bases = dict.fromkeys(replace(each, expandable_segments=False, offload_optimizer=True) for each in whole)
    found: list[Candidate] = []
    for base in bases:
        try:
            tried = _candidates(capture, request, plain, [base], notes)
        except (CaptureError, UsageError) as error:
            notes.append(f"{base.optimizer or 'The optimizer'} stays on the device: {error}")
            continue
        reason = _why_not_on_host(tried[0].kept, request)
        if reason is None:
            found += tried
        else:
            notes.append(f"{base.optimizer or 'The optimizer'} stays on the device: {reason}")
    can_grow = any(candidate.settings.expandable_segments for candidate in candidates)
    return found + [candidate.with_expandable_segments() for candidate in found if can_grow]


def _why_not_on_host(kept: Trace, request: Request) -> str | None:
    """Why no plan may choose the host for an optimizer; None if it may."""
    taken_bytes = kept.host_state_bytes + pinned_host_bytes(kept)
    if taken_bytes > request.offload_host_bytes:
        return (
            f"it needs {format_bytes(taken_bytes)} of host memory, and host_memory (--host-memory) permits "
            f"{format_bytes(request.offload_host_bytes)}."
        )
    if any(op.on_host and op.flops for op in kept.ops):
        return "its update multiplies matrices, and how fast the host does that is not known."
    return None


def _with_chunked_loss(capture: Capture, request: Request, plain: Trace, notes: list[str]) -> list[Candidate]:
    """The same ways to train with the loss computed in chunks; none where it is small or that fails."""
    layer = logits_layer(plain)
    if layer is None:
        return []
    chunked = ChunkedLoss(layer=layer, chunks=LOSS_CHUNKS)
    whole = [base for base in request.bases() if base.parallelism is Parallelism.DDP]
    bases = [replace(base, chunked_loss=chunked) for base in whole]
    try:
        return _candidates(capture, request, plain, bases, notes)
    except (CaptureError, UsageError) as error:
        notes.append(f"The loss is not computed in chunks: {error}")
        return []


def _fastest(candidates: list[Candidate], budget_bytes: int) -> list[Estimate]:
    """The fastest choices of candidates, the best first; those not among them cannot be faster.

    Nested segments are tried last: they are captured, and slower than whatever else fits the same candidate.
    """
    found: list[Estimate] = []
    for expected in by_least_time(candidates, budget_bytes):
        if expected.seconds_at_best >= _least_seconds(found):
            break
        if captured := expected.candidate.captured_from(expected.rung, budget_bytes):
            found.append(captured)
    best = _least_seconds(found)
    nested = [(candidate.nested_seconds_at_best(budget_bytes, best), candidate) for candidate in candidates]
    for seconds, candidate in sorted(((s, c) for s, c in nested if s is not None), key=itemgetter(0)):
        if seconds * (1 - candidate.roughness) < _least_seconds(found):
            captured = candidate.fastest_nested_within(budget_bytes)
            found += [captured] if captured else []
    return _by_time(found)


def _by_time(found: Iterable[Estimate]) -> list[Estimate]:
    return sorted(found, key=lambda estimate: estimate.predicted_step_seconds)


def _without_offloading(
    candidates: list[Candidate], found: list[Estimate], budget_bytes: int
) -> list[Estimate]:
    """What may be faster than all without its offloading: the solver knows only roughly what hides a copy."""
    offloading = [replace(each.settings, units=()) for each in found if each.settings.offloaded]
    faster: list[Estimate] = []
    for candidate in candidates:
        bound = candidate.seconds_at_best(budget_bytes)  # whatever does not offload is among its choices
        if candidate.settings not in offloading or bound is None or bound >= _least_seconds(found):
            continue
        leaner = candidate.without_offloading()
        expected = leaner.expected_within(budget_bytes)
        if expected and expected.seconds_at_best < _least_seconds(found):
            captured = leaner.captured_from(expected.rung, budget_bytes)
            faster += [captured] if captured else []
    return faster


def _least_seconds(found: list[Estimate]) -> float:
    return min((estimate.predicted_step_seconds for estimate in found), default=math.inf)
