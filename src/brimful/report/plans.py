"""Estimates and plans as text for a reader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from brimful.memory import ModuleShare
from brimful.planner.plan import Alternative, BudgetPoint, Plan
from brimful.prediction import Estimate
from brimful.quantities import GIB, format_bytes, format_rate, format_seconds
from brimful.trace import Category

_BAR_CELLS = 24
_LISTED_BLOCKS = 5
_LISTED_MODULES = 10
_SHOWN_MODULE_FRACTION = 0.05
_LABEL_CELLS = 44


def estimate_text(estimate: Estimate) -> str:
    """Text of an estimate: memory and time, what holds the memory, and whether it fits."""
    return "\n".join(_estimate_lines(estimate))


def plan_text(plan: Plan) -> str:
    """Text of a plan: the chosen settings, their memory and time, and the alternatives."""
    return "\n".join(_plan_lines(plan))


def phase_lines(estimate: Estimate) -> Iterator[str]:
    """Lines on the memory of each part of a training run."""
    yield "  peak allocated in each part of a run"
    for phase in estimate.phases:
        size = format_bytes(phase.predicted_peak_allocated_bytes)
        yield f"    {phase.name:<16}{size:>9}  {phase.note}"


def bar(share: float) -> str:
    """A share from 0 to 1 as a bar."""
    return "█" * round(min(max(share, 0.0), 1.0) * _BAR_CELLS)


def _estimate_lines(estimate: Estimate) -> Iterator[str]:
    yield (
        f"{estimate.job} on {estimate.device}: {estimate.verdict} "
        f"({format_bytes(estimate.predicted_peak_device_bytes)} of {format_bytes(estimate.capacity_bytes)})"
    )
    yield f"  settings        {_settings(estimate)}"
    yield f"  predicted peak  {_peak(estimate)}"
    low, high = estimate.predicted_device_interval_bytes
    if (low, high) != (estimate.predicted_peak_device_bytes,) * 2:
        context = estimate.predicted_peak_device_bytes - estimate.predicted_peak_reserved_bytes
        which = "with the CUDA context" if context else "allocated"
        yield f"  interval        {format_bytes(low)} to {format_bytes(high)} {which}"
    yield f"  predicted step  {_step(estimate)}"
    if estimate.own_checkpoints:
        yield (
            f"  checkpointing   by the model itself: {estimate.own_checkpoints} regions are recomputed in "
            'backward. With bf.plan(own_checkpointing="off") the plan decides'
        )
    yield from _what_happens_at_capacity(estimate)
    module = "setup" if estimate.peak_module is None else estimate.peak_module or "the model itself"
    where = f"{estimate.peak_phase}, {module}, {estimate.peak_op or '-'}"
    yield f"  at the peak ({where})"
    for category, held_bytes in estimate.breakdown:
        if category is Category.OTHER_TENSORS and not held_bytes:
            continue
        share = held_bytes / max(estimate.predicted_peak_allocated_bytes, 1)
        name = category.replace("_", " ")
        yield f"    {name:<16}{format_bytes(held_bytes):>9}  {bar(share)}".rstrip()
    yield "  largest blocks at the peak"
    for block in estimate.largest[:_LISTED_BLOCKS]:
        label = block.label if len(block.label) <= _LABEL_CELLS else f"…{block.label[1 - _LABEL_CELLS :]}"
        origin = f" in {block.module}" if block.module and not block.module.startswith("<") else ""
        line = f" ({block.line})" if block.line else ""
        what = block.category.replace("_", " ")
        yield f"    {format_bytes(block.held_bytes):>9}  {what}: {label}{origin}{line}"
    yield from _module_lines(estimate)
    yield from _allocator_lines(estimate)
    changed = [rule for rule in estimate.corrections if rule.occurrences]
    if changed:
        yield "  corrections for the device, summed over all captured steps, not at the peak"
        for rule in changed:
            times = f"{rule.occurrences} time{'s' if rule.occurrences > 1 else ''}"
            together = " together" if rule.occurrences > 1 else ""
            size = f", {_signed(rule.changed_bytes)}{together}" if rule.changed_bytes else ""
            yield f"    {rule.name.replace('_', ' ')}: {times}{size}"
    for uncertain in estimate.uncertain:
        yield f"  uncertain: {uncertain}"
    for note in estimate.notes:
        yield f"  note: {note}"


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


def _allocator_lines(estimate: Estimate) -> Iterator[str]:
    """Lines on the effect of other allocator settings."""
    if not estimate.allocators:
        return
    yield "  other allocator settings: peak reserved, and the smallest capacity that suffices"
    for what_if in estimate.allocators:
        reserved = format_bytes(what_if.peak_reserved_bytes)
        enough = format_bytes(what_if.smallest_surviving_capacity_bytes)
        flushes = f", {what_if.cache_flushes} cache flushes" if what_if.cache_flushes else ""
        fits = "" if what_if.fits else ", does not fit"
        yield f"    {reserved:>9} {enough:>9}  {str(what_if.settings) or 'as they are'}{flushes}{fits}"


def _module_lines(estimate: Estimate) -> Iterator[str]:
    """The modules that hold most, as a tree that ends where it gets fine; numbered siblings are one line."""
    least = _SHOWN_MODULE_FRACTION * estimate.predicted_peak_allocated_bytes
    siblings: dict[tuple[str, str], list[ModuleShare]] = {}
    for share in estimate.modules:
        parent, _, name = share.fqn.rpartition(".")
        if share.depth:
            siblings.setdefault((parent, share.class_name if name.isdecimal() else name), []).append(share)
    lines = []
    folded: tuple[str, ...] = ()
    for (parent, _), group in siblings.items():
        held = sum(share.held_bytes for share in group)
        if held < least or f"{parent}.".startswith(folded):
            continue
        first, last = group[0], group[-1]
        indent = "  " * (first.depth - 1)
        if len(group) > 2:
            folded += tuple(f"{share.fqn}." for share in group)
            name = f"{first.fqn.rpartition('.')[2]}…{last.fqn.rpartition('.')[2]}"
            lines.append(f"    {format_bytes(held):>9}  {indent}{name} ({len(group)} × {first.class_name})")
        else:
            lines += [
                f"    {format_bytes(share.held_bytes):>9}  {indent}{share.fqn.rpartition('.')[2]}"
                + (f" ({share.class_name})" if share.class_name else "")
                for share in group
                if share.held_bytes >= least
            ]
    if lines:
        yield "  by module, submodules included"
        yield from lines[:_LISTED_MODULES]


def _what_happens_at_capacity(estimate: Estimate) -> Iterator[str]:
    failed = estimate.out_of_memory_at
    if failed is not None:
        where = ", ".join(filter(None, (str(failed.phase), failed.module, failed.op, failed.line)))
        yield f"  out of memory   {where}: {format_bytes(failed.requested_bytes)} more for {failed.label}"
    elif estimate.cache_flushes:
        yield f"  cache flushes   {estimate.cache_flushes}: the allocator frees its cache to fit, which is slow"


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


def _plan_lines(plan: Plan) -> Iterator[str]:
    yield (
        f"{plan.job} on {plan.device}, global batch {plan.settings.global_batch_size}, "
        f"budget {format_bytes(plan.budget_bytes)}"
    )
    needs = format_bytes(plan.plain.predicted_peak_reserved_bytes + _context_bytes(plan))
    speed = _speed(plan.plain)
    yield f"  baseline        {needs}: " + (
        f"fits; {speed}" if plan.plain.fits else f"does not fit (would take {speed})"
    )
    yield f"  plan            {plan.settings.describe()}"
    words = _unit_words(plan.settings.describe())
    if words:
        yield f"  unit            {words}"
    used = plan.predicted_peak_device_bytes / plan.budget_bytes
    rate = format_rate(plan.predicted_samples_per_second)
    chance = plan.predicted_exceedance_probability
    over = "" if chance is None else f"; over it with probability {_probability(chance)}"
    yield (
        f"  predicted       {format_bytes(plan.predicted_peak_device_bytes)} ({used:.0%} of the budget{over}), "
        f"{_seconds(plan)} a step, {rate}"
    )
    yield f"  peak in         {plan.peak_at}"
    only_recomputed = tuple(fqn for fqn in plan.settings.recomputed if fqn not in plan.settings.nested)
    if only_recomputed:
        yield f"  recomputed      {_compact(only_recomputed)}"
    if plan.settings.nested:
        yield f"  nested          {_compact(plan.settings.nested)}"
    if plan.settings.offloaded:
        yield f"  offloaded       {_compact(plan.settings.offloaded)}"
    if plan.settings.chunked_loss:
        chunked = plan.settings.chunked_loss
        yield f"  loss in chunks  {chunked.chunks} parts of the tokens, from {chunked.layer} on"
    yield from _curve_lines(plan)
    if plan.alternatives:
        others = "" if words else _unit_words(", ".join(a.settings.describe() for a in plan.alternatives))
        yield "  also considered" + (f" (unit: {others})" if others else "")
    for other in plan.alternatives:
        size = format_bytes(other.predicted_peak_reserved_bytes + _context_bytes(plan))
        by_hand = "" if other.label == other.settings.describe() else f"{other.label}: "
        fit = "" if other.fits else ", does not fit"
        yield f"    {by_hand}{other.settings.describe()}: {size}, {_slower(other, plan)}{fit}"
    for note in plan.notes:
        yield f"  note: {note}"


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


def _probability(value: float) -> str:
    """In percent: "0.4%", "under 0.1%"."""
    return "under 0.1%" if value < 0.001 else f"{value:.1%}" if value < 0.095 else f"{value:.0%}"


def _seconds(result: Estimate | Plan) -> str:
    """The predicted time with its interval: "412 ms (350–480 ms)"."""
    seconds = format_seconds(result.predicted_step_seconds)
    if result.predicted_step_seconds_interval is None:
        return seconds
    low, high = map(format_seconds, result.predicted_step_seconds_interval)
    number, _, unit = low.partition(" ")
    return f"{seconds} ({number if high.endswith(unit) and ' ' not in unit else low}–{high})"


def _slower(other: Alternative, plan: Plan) -> str:
    """The difference from the plan's time with its interval: "+3.1 % time (+1 to +5 %)"."""
    slower = other.predicted_step_seconds / plan.predicted_step_seconds - 1
    if other.predicted_difference_interval_seconds is None:
        return f"{slower:+.1%} time"
    low, high = (each / plan.predicted_step_seconds for each in other.predicted_difference_interval_seconds)
    return f"{slower:+.1%} time ({low:+.1%} to {high:+.1%})"


_MOST_CURVE_POINTS = 6
_GAIN = 0.005
"""Smaller changes of the step time are not shown. A choice."""
_MOST_SLOWER = 3.0
"""Budgets whose steps are slower by more than this factor are not shown: nobody would choose them. A choice."""


def _curve_lines(plan: Plan) -> Iterator[str]:
    """Lines on the effect of larger and smaller budgets."""
    now = plan.predicted_step_seconds
    more = [point for point in plan.budget_curve if point.budget_bytes > plan.budget_bytes]
    one_more = next((point for point in more if point.budget_bytes - plan.budget_bytes == GIB), None)
    if one_more is not None:
        gain = one_more.predicted_step_seconds / now - 1
        yield f"  1 GiB more      {'no faster' if gain > -_GAIN else f'{gain:+.1%} time'}"
    others = [
        point
        for point in plan.budget_curve
        if point is not one_more and _GAIN < abs(point.predicted_step_seconds / now - 1) <= _MOST_SLOWER
    ]
    if others:
        others = [
            point
            for before, point in pairwise((None, *others))
            if point is not None and (before is None or _gain(before, now) != _gain(point, now))
        ]
        step = -(-len(others) // _MOST_CURVE_POINTS)
        listed = " · ".join(
            f"{format_bytes(point.budget_bytes)} {_gain(point, now)}" for point in others[::step]
        )
        yield f"  other budgets   step time against this: {listed}"


def _gain(point: BudgetPoint, seconds: float) -> str:
    return f"{point.predicted_step_seconds / seconds - 1:+.0%}"


def _context_bytes(plan: Plan) -> int:
    return plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes


def _speed(alternative: Alternative) -> str:
    rate = alternative.settings.global_batch_size / alternative.predicted_step_seconds
    return f"{format_seconds(alternative.predicted_step_seconds)} a step, {format_rate(rate)}"


def _compact(units: tuple[str, ...]) -> str:
    """Unit paths with runs of numbered siblings folded: "layer.0–5, layer.9"."""
    folded: list[tuple[str, int, int] | tuple[str, None, None]] = []
    for unit in units:
        parent, _, last = (unit or "the model itself").rpartition(".")
        if not last.isdecimal():
            folded.append((unit or last, None, None))
            continue
        number = int(last)
        previous = folded[-1] if folded else None
        if previous and previous[0] == parent and previous[2] is not None and previous[2] + 1 == number:
            folded[-1] = (parent, previous[1], number)
        else:
            folded.append((parent, number, number))
    return ", ".join(
        name if first is None else f"{name}.{first}".lstrip(".") + (f"–{last}" if last != first else "")
        for name, first, last in folded
    )


def _signed(size_bytes: int) -> str:
    return ("+" if size_bytes >= 0 else "−") + format_bytes(abs(size_bytes))
