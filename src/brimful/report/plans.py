"""Estimates, plans and exported plans for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from brimful.exports import Export
from brimful.planner.plan import NOT_SURE, Alternative, BudgetPoint, Plan
from brimful.prediction import Estimate, Verdict
from brimful.report.at_peak import peak_listings, peak_place
from brimful.report.layout import Bar, Gauge, Listing, Part, Remark, Report, Row, Tone, listing_lines
from brimful.report.unit_names import folded
from brimful.results import Suggestion
from brimful.utils.quantities import GIB, format_bytes, format_interval, format_rate, format_seconds


def estimate_report(estimate: Estimate) -> Report:
    """Memory and time of an estimate, what holds the memory, and whether it fits."""
    return Report(
        heading=f"{estimate.job} on {estimate.device}: {estimate.verdict} ({_of_capacity(estimate)})",
        parts=tuple(_estimate_parts(estimate)),
    )


def plan_report(plan: Plan) -> Report:
    """The chosen settings of a plan, their memory and time, and the alternatives."""
    heading = (
        f"{plan.job} on {plan.device}, global batch {plan.settings.global_batch_size}, "
        f"budget {format_bytes(plan.budget_bytes)}{_origin_of_budget(plan)}"
    )
    return Report(heading=heading, parts=tuple(_plan_parts(plan)))


def _origin_of_budget(plan: Plan) -> str:
    """The origin of a budget that was not given in bytes: " (50% of the baseline)"."""
    asked = plan.asked.budget
    if asked is None:
        less = " minus 5%" if plan.device_kind == "cuda" else ""
        return f" (default: available memory{less})"
    return f" ({asked} of the baseline)" if asked.endswith("%") else ""


def phase_lines(estimate: Estimate) -> Iterator[str]:
    """Lines on the memory of each part of a training run."""
    rows = tuple(
        (phase.name, format_bytes(phase.predicted_peak_allocated_bytes), phase.note)
        for phase in estimate.phases
    )
    title = "peak allocated in each part of a run"
    yield from listing_lines(Listing(title=title, line="    {:<16}{:>9}  {}", rows=rows))


def _of_capacity(estimate: Estimate) -> str:
    peak, capacity = estimate.predicted_peak_device_bytes, estimate.capacity_bytes
    return f"{format_bytes(peak)} of {format_bytes(capacity)}"


TONES = {Verdict.FITS: Tone.FITS, Verdict.TIGHT: Tone.TIGHT, Verdict.DOES_NOT_FIT: Tone.TIGHT}


def _estimate_parts(estimate: Estimate) -> Iterator[Part]:
    low, high = estimate.predicted_device_interval_bytes
    peak = Bar(
        label="peak",
        text=_of_capacity(estimate),
        size=estimate.predicted_peak_device_bytes,
        high=high,
        tone=TONES[estimate.verdict],
    )
    yield Gauge(bars=(peak,), limit=estimate.capacity_bytes)
    yield Row("settings", _settings(estimate))
    yield Row("assumed", f"kernels and allocator of PyTorch {estimate.torch_version}")
    if estimate.trainable_parameter_count < estimate.parameter_count:
        yield Row(
            "parameters",
            f"{estimate.parameter_count:,}, {estimate.trainable_parameter_count:,} of them trained",
        )
    yield Row("predicted peak", _peak(estimate))
    if (low, high) != (estimate.predicted_peak_device_bytes,) * 2:
        context = estimate.predicted_peak_device_bytes - estimate.predicted_peak_reserved_bytes
        which = "with the CUDA context" if context else "allocated"
        yield Row("interval", f"{format_bytes(low)} to {format_bytes(high)} {which}")
    yield Row("predicted step", _step(estimate))
    yield Row("time goes to", time_shares_text(estimate.predicted_time_shares))
    yield from uncertain_rows(estimate.uncertain)
    if estimate.own_checkpoints:
        yield Row(
            "checkpointing",
            f"by the model itself: {estimate.own_checkpoints} regions are recomputed in "
            'backward. With bf.plan(own_checkpointing="off") the plan decides',
        )
    yield from _what_happens_at_capacity(estimate)
    peak_bytes = estimate.predicted_peak_allocated_bytes
    yield from peak_listings(estimate, peak_bytes)
    yield from _allocator_listing(estimate)
    yield from _correction_listing(estimate)
    if estimate.suggestions:
        yield Listing(
            title="would fit: peak, step time, change",
            line="    {:>9}  {:>8}  {}",
            rows=tuple(map(_fitting_row, estimate.suggestions)),
        )
    yield from (Remark("note", note) for note in estimate.notes)


_SHOWN_TIME_SHARE = 0.005
"""Fraction of a step's time below which a kind of operation is not listed: it would be 0 %."""

_NAMED = 3
"""Ops that a line of what is uncertain names."""


def uncertain_rows(items: Iterable[str]) -> Iterator[Row]:
    """Rows on what is uncertain, one for all items "WHAT: REASON" with the same reason."""
    by_reason: dict[str, list[str]] = {}
    for item in items:
        what, _, reason = item.partition(": ")
        by_reason.setdefault(reason or what, []).append(what)
    for position, (reason, named) in enumerate(by_reason.items()):
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        line = reason if named == [reason] else f"{', '.join(named[:_NAMED])}{more}: {reason}"
        yield Row("" if position else "uncertain", line)


def _correction_listing(estimate: Estimate) -> Iterator[Listing]:
    rows = []
    for rule in estimate.corrections:
        if not rule.occurrences:
            continue
        times = f"{rule.occurrences} time{'s' if rule.occurrences > 1 else ''}"
        together = " together" if rule.occurrences > 1 else ""
        size = f", {_signed(rule.changed_bytes)}{together}" if rule.changed_bytes else ""
        rows.append((rule.name.replace("_", " "), f"{times}{size}"))
    if rows:
        title = "corrections for the device, summed over all captured steps, not at the peak"
        yield Listing(title=title, line="    {}: {}", rows=tuple(rows), is_detail=True)


def _settings(estimate: Estimate) -> str:
    settings = estimate.settings
    if not estimate.is_own_loop:
        described = settings.describe()
        return (
            described.replace("everything kept", "own checkpointing") if estimate.own_checkpoints else described
        )
    accumulated = settings.gradient_accumulation_steps
    parts = [
        f"the job's own loop, batches of {settings.micro_batch_size}",
        f"{accumulated} to an optimizer step" if accumulated > 1 else "",
        f"all {len(settings.recomputed)} units recomputed" if settings.recomputed else "",
    ]
    return ", ".join(filter(None, parts))


def _allocator_listing(estimate: Estimate) -> Iterator[Listing]:
    """The effect of other allocator settings."""
    rows = []
    for what_if in estimate.allocators:
        flushes = f", {what_if.cache_flushes} cache flushes" if what_if.cache_flushes else ""
        fits = "" if what_if.fits else ", does not fit"
        rows.append(
            (
                format_bytes(what_if.peak_reserved_bytes),
                format_bytes(what_if.smallest_surviving_capacity_bytes),
                f"{str(what_if.settings) or 'as they are'}{flushes}{fits}",
            )
        )
    if rows:
        title = "other allocator settings: peak reserved, and the smallest capacity that suffices"
        yield Listing(title=title, line="    {:>9} {:>9}  {}", rows=tuple(rows), is_detail=True)


def _what_happens_at_capacity(estimate: Estimate) -> Iterator[Row]:
    failed = estimate.out_of_memory_at
    if failed is not None:
        where = peak_place(failed.phase, failed.module, failed.op, failed.line)
        yield Row("out of memory", f"{where}: {format_bytes(failed.requested_bytes)} more for {failed.label}")
    elif estimate.cache_flushes:
        flushes = f"{estimate.cache_flushes}: the allocator frees its cache to fit, which is slow"
        yield Row("cache flushes", flushes)


def _peak(estimate: Estimate) -> str:
    allocated = format_bytes(estimate.predicted_peak_allocated_bytes)
    reserved = format_bytes(estimate.predicted_peak_reserved_bytes)
    context = estimate.predicted_peak_device_bytes - estimate.predicted_peak_reserved_bytes
    if not context:
        return f"{allocated} allocated"
    device = format_bytes(estimate.predicted_peak_device_bytes)
    return f"{allocated} allocated, {reserved} reserved, {device} with the CUDA context"


def _step(estimate: Estimate) -> str:
    time = estimate.step_time
    parts = [("forward", time.forward_seconds), ("backward", time.backward_seconds)]
    if estimate.settings.recomputed or estimate.own_checkpoints:
        parts.append(("recompute", time.recompute_seconds))
    parts.append(("optimizer", time.optimizer_seconds))
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts)
    rate = format_rate(estimate.predicted_samples_per_second)
    return f"{_seconds(estimate)}, {rate} ({listed})"


def time_shares_text(shares: Iterable[tuple[str, float]]) -> str:
    """Kinds of operation with their shares of the step, those that round to 1 % or more."""
    shown = [(kind, share) for kind, share in shares if share >= _SHOWN_TIME_SHARE]
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shown)


def _plan_parts(plan: Plan) -> Iterator[Part]:
    context = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
    plain_bytes = plan.plain.predicted_peak_reserved_bytes + context
    needs, peak = format_bytes(plain_bytes), format_bytes(plan.predicted_peak_device_bytes)
    bars = (
        Bar(label="baseline", text=needs, size=plain_bytes),
        Bar(
            label="plan",
            text=f"{peak} of {format_bytes(plan.budget_bytes)}",
            size=plan.predicted_peak_device_bytes,
            tone=Tone.FITS,
        ),
    )
    yield Gauge(bars=bars, limit=plan.budget_bytes)
    speed = _speed(plan.plain)
    does_it = f"fits; {speed}" if plan.plain.fits else f"does not fit (would take {speed})"
    yield Row("baseline", f"{needs}: {does_it}")
    yield Row("plan", plan.settings.describe())
    described = [plan.settings.describe(), *(other.settings.describe() for other in plan.alternatives)]
    if words := _unit_words(", ".join(described)):
        yield Row("unit", words)
    used = plan.predicted_peak_device_bytes / plan.budget_bytes
    rate = format_rate(plan.predicted_samples_per_second)
    chance = plan.predicted_exceedance_probability
    unsure = [note.removeprefix(NOT_SURE) for note in plan.notes if note.startswith(NOT_SURE)]
    aside = ", apart from what is uncertain" if unsure else ""
    over = "" if chance is None else f"; over it with probability {format_probability(chance)}{aside}"
    yield Row("predicted", f"{peak} ({used:.0%} of the budget{over}), {_seconds(plan)} a step, {rate}")
    yield from uncertain_rows(what.removesuffix(".") for what in unsure)
    yield Row("peak in", plan.peak_at)
    only_recomputed = tuple(fqn for fqn in plan.settings.recomputed if fqn not in plan.settings.nested)
    if only_recomputed:
        yield Row("recomputed", folded(only_recomputed))
    if plan.settings.nested:
        yield Row("nested", folded(plan.settings.nested))
    if plan.settings.offloaded:
        yield Row("offloaded", folded(plan.settings.offloaded))
    if plan.settings.chunked_loss:
        chunked = plan.settings.chunked_loss
        yield Row("loss in chunks", f"{chunked.chunks} parts of the tokens, from {chunked.layer} on")
    yield from _curve_rows(plan)
    if plan.alternatives:
        yield Listing(
            title="alternatives: peak, step time against the plan (90 %), settings",
            line="    {:>9}  {:<27}  {}",
            rows=tuple(_alternative_row(other, plan, context) for other in plan.alternatives),
            is_detail=True,
        )
    if plan.suggestions:
        yield Listing(
            title="with your permission: peak, step time against the plan (90 %), change",
            line="    {:>9}  {:<27}  {}",
            rows=tuple(_suggestion_row(each, plan) for each in plan.suggestions),
        )
    yield from (Remark("note", note) for note in plan.notes if not note.startswith(NOT_SURE))


def _fitting_row(suggestion: Suggestion) -> tuple[str, str, str]:
    size, seconds = suggestion.predicted_peak_device_bytes, suggestion.predicted_step_seconds
    return format_bytes(size), format_seconds(seconds), _how(suggestion)


def _suggestion_row(suggestion: Suggestion, plan: Plan) -> tuple[str, str, str]:
    size = format_bytes(suggestion.predicted_peak_device_bytes)
    return size, _slower(suggestion, plan), _how(suggestion)


def _how(suggestion: Suggestion) -> str:
    """How to ask for a change, and what it changes."""
    unsure = "; ".join(suggestion.uncertain)
    return f"{suggestion.flag}: {suggestion.effect}{f'; uncertain: {unsure}' if unsure else ''}"


def _alternative_row(other: Alternative, plan: Plan, context_bytes: int) -> tuple[str, str, str]:
    by_hand = "" if other.label == other.settings.describe() else f"{other.label}: "
    fit = "" if other.fits else ", does not fit"
    size = format_bytes(other.predicted_peak_reserved_bytes + context_bytes)
    return size, _slower(other, plan), f"{by_hand}{other.settings.describe()}{fit}"


def _unit_words(described: str) -> str:
    """What the words about units mean that occur in a description of settings; "" if none does."""
    if " units " not in described:
        return ""
    words = ["a module that is kept, recomputed or offloaded as a whole"]
    if "recomputed in part" in described:
        words.append("recomputed in part: some results are saved")
    if "offloaded in part" in described:
        words.append("offloaded in part: some saved tensors stay on the device")
    if "nested" in described:
        words.append("nested: input recomputed too")
    return "; ".join(words)


def format_probability(value: float) -> str:
    """A probability in percent: "0.4%", "under 0.1%" or "12%", as its size permits."""
    return "under 0.1%" if value < 0.001 else f"{value:.1%}" if value < 0.095 else f"{value:.0%}"


def _seconds(result: Estimate | Plan) -> str:
    """The predicted time with its interval: "412 ms (350–480 ms)"."""
    seconds = format_seconds(result.predicted_step_seconds)
    if result.predicted_step_seconds_interval is None:
        return seconds
    return f"{seconds} ({format_interval(*map(format_seconds, result.predicted_step_seconds_interval))})"


def _slower(other: Alternative | Suggestion, plan: Plan) -> str:
    """The difference from the plan's time with its interval: "+3.1% (+1.0% to +5.2%)"."""
    slower = other.predicted_step_seconds / plan.predicted_step_seconds - 1
    if other.predicted_difference_interval_seconds is None:
        return f"{slower:+.1%}"
    low, high = (each / plan.predicted_step_seconds for each in other.predicted_difference_interval_seconds)
    return f"{slower:+.1%} ({low:+.1%} to {high:+.1%})"


_MOST_CURVE_POINTS = 6
_GAIN = 0.005
"""Smaller changes of the step time are not shown. A choice."""
_MOST_SLOWER = 3.0
"""Budgets whose steps are slower by more than this factor are not shown: nobody would choose them. A choice."""


def _curve_rows(plan: Plan) -> Iterator[Row]:
    """The effect of larger and smaller budgets."""
    now = plan.predicted_step_seconds
    more = [point for point in plan.budget_curve if point.budget_bytes > plan.budget_bytes]
    one_more = next((point for point in more if point.budget_bytes - plan.budget_bytes == GIB), None)
    if one_more is not None:
        gain = one_more.predicted_step_seconds / now - 1
        yield Row("1 GiB more", "no faster" if gain > -_GAIN else f"{gain:+.1%} time")
    others = [
        point
        for point in plan.budget_curve
        if point is not one_more
        and format_bytes(point.budget_bytes) != format_bytes(plan.budget_bytes)
        and _GAIN < abs(point.predicted_step_seconds / now - 1) <= _MOST_SLOWER
    ]
    if others:
        others = list({format_bytes(point.budget_bytes): point for point in others}.values())
        others = [
            point
            for before, point in pairwise((None, *others))
            if point is not None and (before is None or _gain(before, now) != _gain(point, now))
        ]
        step = -(-len(others) // _MOST_CURVE_POINTS)
        listed = " · ".join(
            f"{format_bytes(point.budget_bytes)}: {_gain(point, now)}" for point in others[::step]
        )
        yield Row("other budgets", f"{listed} step time")


def _gain(point: BudgetPoint, seconds: float) -> str:
    return f"{point.predicted_step_seconds / seconds - 1:+.0%}"


def _speed(alternative: Alternative) -> str:
    rate = alternative.settings.global_batch_size / alternative.predicted_step_seconds
    return f"{format_seconds(alternative.predicted_step_seconds)} a step, {format_rate(rate)}"


def _signed(size_bytes: int) -> str:
    return ("+" if size_bytes >= 0 else "−") + format_bytes(abs(size_bytes))


def export_report(export: Export) -> Report:
    """How a step runs with an exported file, what of the plan it lacks, and what the user sets."""
    return Report(
        heading=f"for {export.tool}: {export.settings.describe()}",
        parts=tuple(_export_parts(export)),
    )


def _export_parts(export: Export) -> Iterator[Part]:
    for each in export.not_expressed:
        yield Row("not expressed", each)
    if export.predicted_peak_device_bytes is not None and export.budget_bytes is not None:
        verdict = "fits" if export.fits else "DOES NOT FIT; plan with recompute='all' or a smaller budget"
        peak, budget = format_bytes(export.predicted_peak_device_bytes), format_bytes(export.budget_bytes)
        yield Row("predicted peak", f"{peak} of {budget}: {verdict}")
    for name, value in export.environment:
        yield Row("environment", f"{name}={value}")
    for remark in export.remarks:
        yield Remark("", f"- {remark}")
