"""Changes that a plan does not make unasked, as they change what is computed, and what each would gain.

With each change everything is kept, at the plan's micro-batch, or where size gains at the largest that fits;
else actions for the model's units are searched at the plan's, and where size gains at the next larger one. A
plan with the change may find a faster way still. Start reading at `suggestions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice
from operator import attrgetter

from brimful.cost import difference_interval
from brimful.memory import most_held_bytes
from brimful.planner.explain.changed_steps import Context, accumulated_with, fastest_with
from brimful.planner.explain.changes import (
    LEAST_GAIN,
    Change,
    JobChanges,
    batch_norm_split,
    optimizer_changes,
    precision_changes,
    two_gpus,
)
from brimful.planner.headroom import exceedance_of
from brimful.planner.request import Request
from brimful.prediction.estimate import Estimate
from brimful.prediction.estimator import Capture
from brimful.results import Suggestion
from brimful.settings import Parallelism, Precision, Settings
from brimful.trace import Category, Trace
from brimful.trace.units import find_units

MOST_SUGGESTIONS = 5
"""Number of suggestions, at most."""

LEAST_SUGGESTIONS = 3
"""Number of suggestions to an estimate below which changes are tried together."""

LEAST_GAIN_OF_MEMORY = 0.1
"""Fraction of the step time that unlimited memory must gain for changes to be tried that only take less. A
choice: they gain a part of it."""

LEAST_GAIN_BY_SIZE = 0.05
"""Fraction of forward and backward that the whole batch at once must gain for micro-batches larger than the
plan's to be tried, which takes two captures of each change in place of one. A choice."""

LARGE_FRACTION_OF_STATE = 0.5
"""Fraction of the budget from which gradients and optimizer state count as large. A choice."""


def suggestions(
    capture: Capture,
    request: Request,
    baseline: Trace,
    best: Estimate,
    others: JobChanges,
    *,
    notes: list[str],
    unlimited: Estimate,
) -> tuple[Suggestion, ...]:
    """The changes with which a plan would certainly be faster, the fastest first.

    `baseline` is training without a plan, and `unlimited` its estimate where memory permits it; `best` is the
    choice of the plan; `others` has changes of the job. Why a change could not be tried is added to `notes`.
    """
    most_seconds, least_seconds = (
        best.predicted_step_seconds * (1 - LEAST_GAIN),
        unlimited.predicted_step_seconds,
    )
    most_samples = None if _gains_by_size(unlimited, best) else best.settings.micro_batch_size
    context = Context(capture, request, baseline, best, most_seconds, most_samples=most_samples, notes=notes)
    found = []
    changes = [*_changes(request, baseline, best.settings)]
    if best.predicted_step_seconds * (1 - LEAST_GAIN_OF_MEMORY) < least_seconds:
        changes = [each for each in changes if each.gains_speed]
    if _is_limited(best.settings):
        changes += (
            each for each in others(baseline) if each.gains_speed or _is_mostly_state(baseline, request)
        )
    if best.settings.nested:  # little more memory does not change what it does
        changes = [each for each in changes if each.keeps_ranks]
    for change, faster in _found(context, changes):
        if faster.predicted_step_seconds > most_seconds:
            continue
        interval = difference_interval(faster.step_time, best.step_time, request.device)
        if interval[1] < 0:
            found.append(_suggestion(change, faster, request, interval))
    return _first_of(found)


def what_would_fit(
    capture: Capture,
    request: Request,
    baseline: Trace,
    smallest: Estimate,
    others: JobChanges,
    *,
    notes: list[str],
) -> tuple[Suggestion, ...]:
    """The changes with which there would be a plan where nothing fits a request, the fastest first.

    `smallest` is the choice that takes least of what is permitted. Where no change suffices, two together are
    tried. Why one could not be is added to `notes`.
    """
    context = Context(capture, request, baseline, smallest, notes=notes)
    changes = [*_changes(request, baseline, smallest.settings, takes_all=True), *others(baseline)]
    found = [*_suggested(context, _found(context, changes))]
    if not found:
        found = [*_suggested(context, _found(context, _pairs(changes)))]
    return _first_of(found)


def what_an_estimate_lacks(
    capture: Capture,
    request: Request,
    trace: Trace,
    estimate: Estimate,
    others: JobChanges,
    *,
    notes: list[str],
) -> tuple[Suggestion, ...]:
    """The changes with which a step that does not fit would, those that keep its results among them.

    Where fewer than `LEAST_SUGGESTIONS` suffice, the others are tried together: with accumulation, in pairs.
    `trace` is of that step. The budget of the request is what it must fit, and its global batch that of a step.
    Why a change could not be tried is added to `notes`.
    """
    settings = estimate.settings
    recomputing = Change(
        name="activation checkpointing",
        effect="the same results, with forwards computed again in backward",
        option='recompute="all"',
        flag="--recompute all",
        recomputes_all=True,
    )
    context = Context(capture, request, trace, estimate, searches=False, notes=notes)
    same = [] if settings.units or not find_units(trace) else [recomputing]
    of_settings = (
        each
        for each in _changes(request, trace, settings, takes_all=True)
        if each.keeps_ranks and each.takes_less and not each.splits_batch
    )
    changes = [*same, *of_settings, *others(trace)]
    accumulation = _accumulation(context)
    sufficient = [*_found(context, changes)]
    found = [*_accumulated(context, [accumulation]), *_suggested(context, sufficient)]
    suffice = {change.family or change.name for change, _ in sufficient}
    refused = {note.partition(":")[0] for note in notes}
    lacking = [
        each for each in changes if (each.family or each.name) not in suffice and each.name not in refused
    ]
    pairs = _suggested(context, _found(context, _pairs(lacking)))
    if not found:
        found = [*pairs]
    accumulated = _accumulated(context, (_together(accumulation, each) for each in lacking))
    found += islice(chain(accumulated, pairs), max(0, LEAST_SUGGESTIONS - len(found)))
    return _first_of(found)


def _suggested(context: Context, found: Iterable[tuple[Change, Estimate]]) -> Iterator[Suggestion]:
    return (_suggestion(change, predicted, context.request, None) for change, predicted in found)


def _found(
    context: Context,
    changes: Iterable[Change],
    find: Callable[[Change, Context], Estimate | None] = fastest_with,
) -> Iterator[tuple[Change, Estimate]]:
    """The changes with which a step fits, each with the step that `find` finds."""
    families: set[str] = set()
    for change in changes:
        if change.family is None or change.family not in families:
            found = find(change, context)
            if found is not None:
                families |= {change.family} if change.family else set()
                yield change, found


_ACCUMULATION = Change(
    name="gradient accumulation",
    effect="the same loss and gradients, if the loss is a mean over samples",
    option="",
    flag="",
)


def _accumulation(context: Context) -> Change:
    """Micro-batches of a step, which its size asks for."""
    is_coupled = context.request.keeps_batch_whole(context.baseline)
    return replace(batch_norm_split(context.baseline), option="", flag="") if is_coupled else _ACCUMULATION


def _accumulated(context: Context, changes: Iterable[Change]) -> Iterator[Suggestion]:
    """The largest smaller micro-batch that fits with each change, accumulated to the same step."""
    for change, found in _found(context, changes, accumulated_with):
        size, steps = found.settings.micro_batch_size, found.settings.gradient_accumulation_steps
        of_size = f"micro_batch_size={size}, gradient_accumulation_steps={steps}"
        yield replace(
            _suggestion(change, found, context.request, None),
            option=", ".join(filter(None, (of_size, change.option))),
            flag=f"--micro-batch-size {size} --gradient-accumulation-steps {steps} {change.flag}".rstrip(),
        )


def _pairs(changes: Sequence[Change]) -> Iterator[Change]:
    """Two changes together: of different settings, or one of the job and one of settings but the optimizer."""
    for first, second in combinations(changes, 2):
        of_job = [each for each in (first, second) if each.capture is not None]
        has_optimizer = "optimizer" in {*first.settings, *second.settings}
        is_of_one_job = not of_job or (len(of_job) == 1 and not has_optimizer)
        together = {**first.settings, **second.settings}
        if together.get("precision") is Precision.FP16 and together.get("parallelism") is Parallelism.FSDP2:
            continue
        if is_of_one_job and first.settings.keys().isdisjoint(second.settings):
            yield _together(first, second)


def _together(first: Change, second: Change) -> Change:
    """Two changes, at most one of which is of the job."""
    changed = first if first.capture is not None else second
    return Change(
        name=f"{first.name} and {second.name}",
        effect=f"{first.effect}; {second.effect}",
        option=", ".join(filter(None, (first.option, second.option))),
        flag=f"{first.flag} {second.flag}".strip(),
        settings={**first.settings, **second.settings},
        capture=changed.capture,
        splits_batch=first.splits_batch or second.splits_batch,
        may_be_refused=first.may_be_refused or second.may_be_refused,
        recomputes_all=first.recomputes_all or second.recomputes_all,
        floor_bytes=changed.floor_bytes,
        family=changed.family,
    )


def _first_of(found: Sequence[Suggestion]) -> tuple[Suggestion, ...]:
    return tuple(sorted(found, key=attrgetter("predicted_step_seconds"))[:MOST_SUGGESTIONS])


def _suggestion(
    change: Change, predicted: Estimate, request: Request, interval: tuple[float, float] | None
) -> Suggestion:
    return Suggestion(
        change=change.name,
        effect=change.effect,
        option=change.option,
        flag=change.flag,
        settings=predicted.settings,
        predicted_peak_device_bytes=predicted.predicted_peak_device_bytes,
        predicted_exceedance_probability=exceedance_of(predicted, request),
        predicted_step_seconds=predicted.predicted_step_seconds,
        predicted_difference_interval_seconds=interval,
        uncertain=predicted.uncertain,
    )


def _changes(
    request: Request, baseline: Trace, chosen: Settings, *, takes_all: bool = False
) -> Iterator[Change]:
    """The changes of settings that may gain something beside a choice, under which a step may take less."""
    yield from precision_changes(request)
    if _is_limited(chosen) or takes_all:
        yield from optimizer_changes(request, baseline, takes_all=takes_all)
        if request.keeps_batch_whole(baseline) and request.job.why_not_split is None:
            yield batch_norm_split(baseline)
    yield from two_gpus(request, baseline, Parallelism.FSDP2 if takes_all else Parallelism.DDP)


def _gains_by_size(unlimited: Estimate, best: Estimate) -> bool:
    """Whether forward and backward of the whole batch at once are faster than in a choice's micro-batches."""
    times = unlimited.step_time, best.step_time
    whole, parts = (each.forward_seconds + each.backward_seconds for each in times)
    return whole < parts * (1 - LEAST_GAIN_BY_SIZE)


def _is_limited(chosen: Settings) -> bool:
    """Whether a choice does something only to take less memory."""
    return bool(chosen.changed) or chosen.gradient_accumulation_steps > 1 or chosen.offload_optimizer


def _is_mostly_state(baseline: Trace, request: Request) -> bool:
    """Whether what adapters do without, gradients and optimizer state, is a large part of the budget."""
    state_bytes = sum(
        most_held_bytes(baseline, each) for each in (Category.GRADIENTS, Category.OPTIMIZER_STATE)
    )
    return state_bytes >= LARGE_FRACTION_OF_STATE * request.reserved_budget_bytes
