"""Why nothing fits a budget, and what would."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter

from brimful.errors import CaptureError, InfeasibleError, UsageError
from brimful.memory import pinned_host_bytes
from brimful.planner.coupling import why_kept_whole
from brimful.planner.explain.changes import JobChanges
from brimful.planner.explain.suggestions import what_would_fit
from brimful.planner.floor import Floor
from brimful.planner.headroom import lowered_limit
from brimful.planner.request import Request
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture
from brimful.prediction.exceedance import bytes_at_probability
from brimful.results import Suggestion
from brimful.settings import Action, Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace
from brimful.utils.quantities import format_bytes, format_seconds, parse_bytes


def nothing_fits(
    capture: Capture,
    request: Request,
    smallest: Estimate,
    trace: Trace,
    baseline: Estimate,
    notes: Iterable[str],
    job_changes: JobChanges | None,
    *,
    is_searched: bool = True,
) -> InfeasibleError:
    """The error to raise: by how much nothing fits, because of what, and the nearest options.

    `smallest` is the least that anything permitted takes, or if that was not searched for, a step that takes
    little; `trace` and `baseline` are of training without a plan; `notes` say why something could not be tried;
    `job_changes` are those of the job; without them no change is tried.
    """
    would_fit: tuple[Suggestion, ...] = ()
    skipped: list[str] = []
    if job_changes is not None:
        would_fit = what_would_fit(capture, request, trace, smallest, job_changes, notes=skipped)
    lines = [
        f"no plan fits {format_bytes(request.budget_bytes)} on {request.device.name}.",
        f"  baseline: {format_bytes(baseline.predicted_peak_device_bytes)}",
        *_too_much(request, smallest, trace, is_searched=is_searched),
        *_why_no_less(request, trace),
        *(f"  would fit: {option}" for option in _options(capture, request, smallest, trace, would_fit)),
    ]
    if not is_searched:
        lines[-1] += ", perhaps less"
    lines += [f"  note: {note}" for note in dict.fromkeys([*notes, *skipped])]
    return InfeasibleError(
        "\n".join(lines),
        budget_bytes=request.budget_bytes,
        smallest_peak_bytes=smallest.predicted_peak_device_bytes,
        suggestions=would_fit,
    )


def _too_much(request: Request, smallest: Estimate, trace: Trace, *, is_searched: bool) -> Iterator[str]:
    """The least that anything permitted takes; or what every plan holds, and what a small step takes."""
    peak = f"{format_bytes(smallest.predicted_peak_device_bytes)} ({smallest.settings.describe()})"
    floor = Floor.of(trace, request)
    floor_bytes = floor.held_bytes + request.device.context_bytes
    over_bytes = smallest.predicted_peak_device_bytes - request.budget_bytes
    if is_searched:
        category, part_bytes = max(smallest.breakdown, key=itemgetter(1))
        yield f"  smallest predicted peak: {peak}, {format_bytes(over_bytes)} too much"
        yield f"  largest part: {category.replace('_', ' ')}, {format_bytes(part_bytes)}"
    else:
        yield (
            f"  every plan holds {floor.parts} at once: {format_bytes(floor_bytes)}, "
            f"{format_bytes(floor_bytes - request.budget_bytes)} too much"
        )
        yield f"  a small step: {peak}"


def _why_no_less(request: Request, trace: Trace) -> Iterator[str]:
    """What takes memory in any plan, and what was not tried, or not permitted."""
    if request.device.context_bytes:
        yield f"  CUDA context: {format_bytes(request.device.context_bytes)}"
    if request.job.why_not_split is not None:
        yield f"  the batch cannot be split: {request.job.why_not_split}"
    elif request.keeps_batch_whole(trace):
        yield (
            f"  the batch cannot be split: {why_kept_whole(trace)}. Permit it with "
            "split_batch_norm, --split-batch-norm (statistics and states are then those of micro-batches)"
        )
    if asked := ", ".join(_what_was_asked(request)):
        yield f"  you asked for: {asked}; without that, a smaller budget may do"
    is_format_default = request.memory_formats == (None,)
    if is_format_default and trace.convolves_images and not Floor.of(trace, request).is_over(request):
        yield (
            "  not tried: memory_format='auto' (--memory-format auto). Convolutions may take less in "
            "channels_last, with results equal within rounding"
        )


def _what_was_asked(request: Request) -> Iterator[str]:
    """Pinned or forbidden options without which a plan could take less memory."""
    if request.asked.micro_batch_size not in (None, 1):
        yield f"micro-batches of {request.asked.micro_batch_size}"
    if request.recompute is not None:
        yield f"{'nothing' if request.recompute is Action.KEEP else 'everything'} recomputed"
    if not request.asked.chunked_loss:
        yield "no chunked loss"
    if request.device.kind == "cuda" and not request.asked.expandable_segments:
        yield "no expandable segments"
    if request.device.kind == "cpu" and request.asked.offload_optimizer:
        yield "the optimizer on the host, which is the device here, so that nothing is spared"
    if request.device.kind == "cuda" and not request.offload_host_bytes:
        yield "no offload"
    elif request.device.kind == "cuda" and request.asked.offload_optimizer is False:
        yield "no optimizer on the host"


def _options(
    capture: Capture, request: Request, smallest: Estimate, baseline: Trace, would_fit: Iterable[Suggestion]
) -> Iterator[str]:
    """Changes that would fit, none of which is made unasked: they change results, the host or the budget."""
    for each in would_fit:
        unsure = f"; uncertain: {'; '.join(each.uncertain)}" if each.uncertain else ""
        yield (
            f"{each.flag} ({each.option}): {format_bytes(each.predicted_peak_device_bytes)} and "
            f"{format_seconds(each.predicted_step_seconds)} a step predicted; {each.effect}{unsure}"
        )
    if not Floor.of(baseline, request, has_state=False).is_over(request):
        yield from _more_host_memory(capture, request, smallest.settings)
    exceedance = request.asked.max_exceedance
    needed_bytes = bytes_at_probability(smallest.device_peak, request.device.kind, exceedance)
    yield f"a budget of {_rounded_up(needed_bytes)}, with a probability of {1 - exceedance:.4g}"


def _keeps_limit(estimate: Estimate, request: Request) -> bool:
    """Whether a step exceeds the limit with at most the probability that is permitted."""
    return lowered_limit(estimate.device_peak, request, request.asked.max_exceedance) is None


def _more_host_memory(capture: Capture, request: Request, settings: Settings) -> Iterator[str]:
    """The host memory with which the optimizer on the host would fit, if what is permitted is too little."""
    if not request.may_offload_optimizer or settings.offload_optimizer:
        return
    try:
        trace = per_rank_trace(capture(replace(settings, offload_optimizer=True)))
    except (CaptureError, UsageError):
        return
    needed_bytes = trace.host_state_bytes + pinned_host_bytes(trace)
    estimate = estimate_unlimited(trace, request.device)
    if _keeps_limit(estimate, request) and needed_bytes > request.offload_host_bytes:
        yield (
            f"host_memory {_rounded_up(needed_bytes)}, --host-memory, for the optimizer's state "
            f"({format_bytes(request.offload_host_bytes)} permitted now; "
            f"{format_bytes(estimate.predicted_peak_device_bytes)} predicted on the device)"
        )


def _rounded_up(size_bytes: int) -> str:
    """A size as text, rounded so that parsing it gives no fewer bytes."""
    shown = size_bytes
    while parse_bytes(format_bytes(shown)) < size_bytes:
        shown += max(size_bytes // 1000, 1)
    return format_bytes(shown)
