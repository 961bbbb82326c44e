"""The joint search: micro-batch × precision × an action per unit, replayed, the fastest that fits.

Every candidate tells the least time that the budget could permit it, and with more work what is expected of it
once all that is reserved counts. They are captured in that order, each to its fastest choice that really is
within the budget, until none that is left could be faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter

from brimful.cost import least_host_update_seconds, model_flops
from brimful.errors import CaptureError, UsageError
from brimful.planning.candidates import Candidate, CandidateFamily, Expected, alternative
from brimful.planning.coupling import what_splitting_changes, why_kept_whole
from brimful.planning.estimate import MARGIN_FRACTION, NO_LIMIT_BYTES, Estimate
from brimful.planning.infeasible import nothing_fits
from brimful.planning.logits import LOSS_CHUNKS, logits_layer
from brimful.planning.ranks import of_one_rank
from brimful.planning.records import Alternative, BudgetPoint, Plan, PlanStatus
from brimful.planning.request import Request
from brimful.planning.sizes import Capture
from brimful.settings import Action, ChunkedLoss, OptimizerImplementation, Parallelism, Settings
from brimful.timeline import most_held_bytes, pinned_host_bytes
from brimful.trace import Category, Trace
from brimful.units import GIB, format_bytes, format_seconds

_OWN_LOOP_NOTE = (
    "The job's own training loop is not used: this is a plan for brimful's own step, with one loss and one "
    "optimizer. `estimate` follows the loop."
)

_FUSED_NOTE = (
    "The optimizer runs as one fused kernel: the same formula, rounded in another order, in the last digits."
)

_CHUNKED_NOTE = (
    "The loss is computed for a part of the tokens at a time: the same sums in another order. Logits that are "
    "used for anything else are computed again."
)

_EXPANDABLE_NOTE = (
    "The CUDA allocator is to grow its segments, or less fits. brimful's own step and training tell it so; "
    "elsewhere set PYTORCH_ALLOC_CONF=expandable_segments:True."
)

_GUESSED_NOTE = (
    "Values that are not known before training decide sizes, such as the experts that a router selects. The "
    "plan assumes an even or the most uneven selection, whichever takes more; others may take a little more."
)

_BUSY_NOTE = (
    "Times are told by what was measured of this device while other work kept it busy, and may be far off; "
    "`brimful calibrate --force` measures again."
)

ROUGHNESS = 0.001
"""Part by which times of captures and of what is derived from them may differ."""

CURVE_POINTS = 12
"""Budgets besides its own for which a plan tells the time."""

MOST_ALTERNATIVES = 6
"""Those listed in a plan."""


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
    plain_trace = of_one_rank(capture(request.plain_settings()))
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
        alternatives=_alternatives(request, candidates, found),
        peak_at=" of ".join([str(best.peak_phase), *([best.peak_module] if best.peak_module else [])]),
        budget_curve=tuple(_budget_curve(request, candidates, best, plain)),
        notes=(
            *dict.fromkeys(notes),
            *([_BUSY_NOTE] if request.device.was_measured_busy else []),
            *_why_the_batch_is_whole(best.settings, plain_trace, request),
            *([_OWN_LOOP_NOTE] if request.brings_own_loop else []),
            *_what_splitting_changes(best.settings, plain_trace, request),
            *_what_the_optimizer_changes(best.settings, request),
            *_what_the_host_gives(best, request),
            *_where_the_optimizer_returns(best, request, candidates),
            *_what_the_model_recomputes(best, plain_trace),
            *([_GUESSED_NOTE] if plain_trace.sizes_are_guessed else []),
            *_what_ranks_take(best.settings, plain_trace, request),
            *([_CHUNKED_NOTE] if best.settings.chunked_loss else []),
            *([_EXPANDABLE_NOTE] if best.settings.expandable_segments else []),
            *([_FUSED_NOTE] if best.settings.optimizer_implementation is OptimizerImplementation.FUSED else []),
            *(f"Not sure about: {uncertain}." for uncertain in best.uncertain),
            *_what_it_may_take(best, request, candidates),
        ),
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
    expected = next(_expected(candidates, request.reserved_budget_bytes), None)
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
    bases = dict.fromkeys(replace(each, expandable_segments=False, optimizer_on_host=True) for each in whole)
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
    for expected in _expected(candidates, budget_bytes):
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


def _expected(candidates: list[Candidate], budget_bytes: int) -> Iterator[Expected]:
    """The best that is expected of each candidate, by the least time it may be found to take.

    A candidate's bound is told at once, what is expected of it takes work: so that is found out only once no
    other is before its bound.
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


def _alternatives(
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
        next(_expected(own_optimizer, request.reserved_budget_bytes), None)
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


def _budget_curve(
    request: Request, candidates: list[Candidate], best: Estimate, plain: Alternative
) -> Iterator[BudgetPoint]:
    """Times at budgets from the smallest that holds anything to that of plain training, and with one GiB more.

    Segments are taken to hold as much more than is allocated as they do in the plan, and at the least as they
    do there. As that is rough, no smaller budget is told to be faster than the plan, and no larger one slower.
    """
    context_bytes = request.device.context_bytes
    held_fraction = best.predicted_peak_allocated_bytes / best.predicted_peak_reserved_bytes
    first = _least_device_bytes(request, candidates, best)
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


def _least_device_bytes(request: Request, candidates: list[Candidate], best: Estimate) -> int:
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


def _why_the_batch_is_whole(settings: Settings, plain: Trace, request: Request) -> list[str]:
    """That no smaller micro-batches were tried, if the job's batches cannot be split, or should not be.

    Layers that depend on the micro-batch are named where the plan spares memory in another way.
    """
    if request.why_not_split is not None:
        return [f"Smaller micro-batches were not considered: {request.why_not_split}"]
    if request.keeps_batch_whole(plain) and (settings.changed or settings.chunked_loss):
        return [
            f"The batch is not split: {why_kept_whole(plain)}. To permit it, set split_batch_norm=True "
            "(--split-batch-norm)."
        ]
    return []


def _what_the_optimizer_changes(settings: Settings, request: Request) -> list[str]:
    """That the optimizer is another than the job's, if it is."""
    if settings.optimizer == request.optimizer:
        return []
    return [
        f"The optimizer is {settings.optimizer}, which you allowed: it computes other updates than the job's."
    ]


def _what_it_may_take(best: Estimate, request: Request, candidates: list[Candidate]) -> list[str]:
    """How far the upper end of what is predicted is beyond the budget, if it is."""
    most_bytes, capacity_bytes = best.predicted_device_interval_bytes[1], request.device.capacity_bytes
    leaves_margin = request.budget_bytes >= int(capacity_bytes / (1 + MARGIN_FRACTION))  # as without a budget
    over_bytes = most_bytes - (capacity_bytes if leaves_margin else request.budget_bytes)
    if over_bytes <= 0:
        return []
    surely = request.budget_bytes - (most_bytes - best.predicted_peak_device_bytes)
    unsure = (
        "what kernels take inside, what the allocator reserves and the CUDA context are not known to the byte"
        if request.device.kind == "cuda"
        else "what some kernels take inside is not known exactly"
    )
    least_bytes = min(_least_device_bytes(request, candidates, best), best.predicted_peak_device_bytes)
    if best.settings.nested:
        nesting = (each for each in candidates if each.settings == replace(best.settings, units=()))
        nested_bytes = min(map(Candidate.smallest_nested_peak_bytes, nesting)) + request.device.context_bytes
        least_bytes = min(least_bytes, nested_bytes)
    advice = (
        f"To be sure, plan with about {format_bytes(surely)}."
        if surely >= least_bytes
        else f"No plan is sure to be within it: the least that one takes is about {format_bytes(least_bytes)}."
    )
    return [f"It may take up to {format_bytes(over_bytes)} more than the budget: {unsure}. {advice}"]


def _what_the_host_gives(best: Estimate, request: Request) -> list[str]:
    """What of its memory, and what its time was told by."""
    device, settings = request.device, best.settings
    notes = []
    if settings.optimizer_on_host and device.kind == "cpu":
        notes.append(
            "The optimizer is on the host, as you asked, which is the device here: nothing is spared, and what "
            "is on its way takes memory."
        )
    if settings.offloaded:
        assert device.host_link_bytes_per_second is not None
        notes.append(
            f"Offloading's copies are timed at {device.host_link_bytes_per_second / 1e9:.3g} GB/s each way; "
            "`brimful calibrate` measures the link of a GPU in this machine."
        )
    if settings.cpu_offload and device.kind == "cuda":
        notes.append(
            "Each rank has its parts of parameters, gradients and optimizer state, "
            f"{format_bytes(best.predicted_host_state_bytes)}, in the host's memory, and updates them there as "
            f"if it had {device.host_update_bytes_per_second / 1e9:.3g} GB/s for itself."
        )
    if settings.optimizer_on_host and device.kind == "cuda":
        is_measured = device.measured_host_update_bytes_per_second is not None
        how = "measured" if is_measured else "assumed: `brimful calibrate` measures it where the GPU is"
        notes.append(
            f"The optimizer's state, {format_bytes(best.predicted_host_state_bytes)}, is in the host's memory, "
            "and updates are rounded as the host's kernels round. They are timed as if the host read and wrote "
            f"{device.host_update_bytes_per_second / 1e9:.3g} GB/s ({how})."
        )
    taken_bytes = best.predicted_pinned_host_bytes + best.predicted_host_state_bytes
    if taken_bytes and device.kind == "cuda":
        permitted = (
            f"{format_bytes(request.offload_host_bytes)} permitted (set it with host_memory, --host-memory)"
        )
        how = "of the" if taken_bytes <= request.offload_host_bytes else "more than the"
        notes.append(
            f"{'Training' if settings.ranks == 1 else 'Each rank'} takes {format_bytes(taken_bytes)} of the "
            f"host's memory, {how} {permitted}; "
            f"{format_bytes(best.predicted_pinned_host_bytes)} of it are pinned for copies."
        )
    return notes


def _where_the_optimizer_returns(best: Estimate, request: Request, candidates: list[Candidate]) -> list[str]:
    """From about which budget on the optimizer fits the device, if the plan chose the host for want of room."""
    if not best.settings.optimizer_on_host or request.optimizer_on_host:
        return []
    on_device = [candidate for candidate in candidates if not candidate.settings.optimizer_on_host]
    least_bytes = min(map(Candidate.smallest_peak_bytes, on_device)) + request.device.context_bytes
    if least_bytes <= request.budget_bytes:
        return []
    return [f"With its optimizer on the device a plan takes about {format_bytes(least_bytes)} or more."]


def _what_the_model_recomputes(best: Estimate, plain: Trace) -> list[str]:
    """What the model's own activation checkpointing costs, or whether it is off."""
    regions = plain.own_checkpoints
    if not regions:
        return []
    if best.settings.own_checkpointing:
        recompute = format_seconds(best.step_time.recompute_seconds)
        return [
            f"The model itself checkpoints {regions} regions of its forward, which are recomputed in backward "
            f"whatever the plan chooses. Recomputation takes {recompute} of a step of "
            f'{format_seconds(best.predicted_step_seconds)}. Turn it off (own_checkpointing="off", '
            "--own-checkpointing off), and the plan alone decides what is recomputed."
        ]
    if best.own_checkpoints:
        return [
            f"The model itself still checkpoints {best.own_checkpoints} regions of its forward: they have no "
            "attribute gradient_checkpointing or grad_checkpointing that turns them off. Remove "
            "torch.utils.checkpoint from the model's code."
        ]
    return [f"The model's own checkpointing of {regions} regions is off while the plan is applied."]


def _what_ranks_take(settings: Settings, plain: Trace, request: Request) -> list[str]:
    """What is not known well of training on several ranks, and what it changes."""
    if settings.ranks == 1:
        return []
    rate = request.device.peer_bytes_per_second(settings.ranks, settings.nodes)
    unseen = (
        "NCCL's own memory is not counted"
        if request.device.kind == "cuda"
        else "each is timed as if it had the machine to itself"
    )
    notes = [
        f"What is predicted is of each of {settings.ranks} ranks. Gradients are taken to go between them at "
        f"{rate / 1e9:.3g} GB/s; {unseen}."
    ]
    if settings.gathered_dtype is not None:
        notes.append(
            f"Parameters are gathered in {settings.gathered_dtype}: those of norms and embeddings, and what "
            "comes into each unit, are rounded to it too, which autocast alone does not do. Gradients are "
            "averaged in float32."
        )
    if settings.parallelism.is_zero:
        notes.append(
            "What DeepSpeed takes is computed by its rules, not captured: how-ranks-train.md says how well."
        )
    if plain.stateful_modules:
        notes.append(
            f"{len(plain.stateful_modules)} layers change their buffers in forward, each rank for itself; "
            "those of the first are kept."
        )
    if plain.batch_norm_modules:
        notes.append(
            f"{len(plain.batch_norm_modules)} BatchNorm layers normalise over each rank's own samples, not "
            "over the global batch. On GPUs nn.SyncBatchNorm.convert_sync_batchnorm(model) lets ranks share "
            "statistics; the first rank's running statistics are those kept."
        )
    return notes


def _what_splitting_changes(settings: Settings, plain: Trace, request: Request) -> list[str]:
    """What is not the same as in plain training, if the batch is split."""
    if settings.gradient_accumulation_steps == 1:
        return []
    changes = []
    if plain.couples_samples:
        changes.append(
            "The loss is that of all samples of the global batch together: each micro-batch's forward runs "
            "twice, without gradients for its embeddings, then for their gradient."
        )
    elif not request.weighs_by_count:
        changes.append(
            "The loss must be a mean over samples. For a mean over something else, such as tokens that are not "
            'ignored, pass Job(count=...); for a sum, Job(reduction="sum").'
        )
    for change in what_splitting_changes(plain.batch_norm_modules, plain.stateful_modules, settings):
        changes.append(f"{change[0].upper()}{change[1:]}.")
    if any(op.random for op in plain.ops):
        changes.append(
            "Random layers (dropout) draw other numbers for a split batch: the same distribution, "
            "not the same values."
        )
    return changes
