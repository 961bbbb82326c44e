"""The largest size that fits, for a reader and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from brimful.planner import LargestEstimate, LargestPlan
from brimful.report.layout import Listing, Part, Report, Row, as_text
from brimful.report.plans import estimate_report, plan_report
from brimful.utils.quantities import format_bytes, format_rate, format_seconds

_LINE_CELLS = 90
_LABEL_CELLS = 16


def largest_estimate_text(found: LargestEstimate) -> str:
    """The size, its step and what limits it; then the estimate."""
    estimate, size = found.estimate, found.size
    peak, capacity = format_bytes(estimate.predicted_peak_device_bytes), format_bytes(estimate.capacity_bytes)
    rates = _rates(estimate.predicted_samples_per_second, estimate.tokens_per_sample)
    seconds = format_seconds(estimate.predicted_step_seconds)
    report = Report(
        heading=f"{estimate.job} on {estimate.device}: the largest {found.option} that fits is {size.value:,}",
        parts=(
            *_wrapped("limited by", f"{size.limited_by}: {size.reason}"),
            Row("predicted", f"{peak} of {capacity}, {seconds} a step, {rates}"),
            Row("parameters", f"{estimate.parameter_count:,}"),
            *_wrapped("sizes tried", ", ".join(f"{each:,}" for each in size.tried)),
        ),
    )
    return f"{as_text(report)}\n{as_text(estimate_report(estimate))}"


def largest_plan_text(found: LargestPlan) -> str:
    """The size with and without a plan, and what limits it; then the plan."""
    plan, size = found.plan, found.size
    report = Report(
        heading=f"{plan.job} on {plan.device}: the largest {found.option} with a plan is {size.value:,}",
        parts=(
            *_wrapped("limited by", f"{size.limited_by}: {size.reason}"),
            _beside_none(found),
            *_wrapped("same size", _same_size(found)),
            *_wrapped("sizes tried", ", ".join(f"{each:,}" for each in size.tried)),
        ),
    )
    return f"{as_text(report)}\n{as_text(plan_report(plan))}"


def _beside_none(found: LargestPlan) -> Listing:
    """The plan beside the largest size without one."""
    title, line = "without a plan: everything kept, the whole batch at once", "    {:<22}{:>15}{:>15}{:>9}"
    rows = []
    beside = _figures(found.without_plan) if found.without_plan is not None else {}
    for name, (value, text) in _figures(found).items():
        other, shown = beside.get(name, (0, "nothing fits"))
        rows.append((name, text, shown, f"{value / other:.3g} ×" if other else ""))
    return Listing(title=title, line=line, heading=("", "with a plan", "without", "ratio"), rows=tuple(rows))


def _figures(found: LargestEstimate | LargestPlan) -> dict[str, tuple[float, str]]:
    """Figures of the largest size and their texts, by name."""
    result = found.estimate if isinstance(found, LargestEstimate) else found.plan
    model = found.estimate if isinstance(found, LargestEstimate) else found.kept
    peak_bytes, seconds = result.predicted_peak_device_bytes, result.predicted_step_seconds
    rate, tokens = result.predicted_samples_per_second, result.tokens_per_sample
    return {
        found.option: (found.size.value, f"{found.size.value:,}"),
        "parameters": (model.parameter_count, f"{model.parameter_count:,}"),
        "peak": (peak_bytes, format_bytes(peak_bytes)),
        "step time": (seconds, format_seconds(seconds)),
        "speed": (rate, format_rate(rate)),
        **({} if tokens is None else {"": (rate * tokens, format_rate(rate * tokens, "tokens"))}),
    }


def _same_size(found: LargestPlan) -> str:
    """What the plan costs beside everything kept at the same size, if that fitted."""
    kept, plan = found.kept, found.plan
    slower = plan.predicted_step_seconds / kept.predicted_step_seconds - 1
    return (
        f"everything kept, the whole batch at once, {found.size.value:,} would take "
        f"{format_bytes(kept.predicted_peak_device_bytes)} and {format_seconds(kept.predicted_step_seconds)} a "
        f"step; the plan takes {slower:+.1%} time"
    )


def _rates(per_second: float, tokens: float | None) -> str:
    rates = [format_rate(per_second)]
    if tokens is not None:
        rates.append(format_rate(per_second * tokens, "tokens"))
    return ", ".join(rates)


def _wrapped(label: str, text: str) -> Iterator[Part]:
    """Rows of a text, broken so that no line is longer than a terminal is wide."""
    for number, line in enumerate(textwrap.wrap(text, _LINE_CELLS - _LABEL_CELLS - 2)):
        yield Row("" if number else label, line)


def largest_estimate_document(found: LargestEstimate) -> dict[str, Any]:
    """The document of `brimful estimate --largest --json`, without the name on the command line."""
    return found.estimate.to_json() | {"largest_value": _of_size(found)}


def largest_plan_document(found: LargestPlan) -> dict[str, Any]:
    """The document of `brimful plan --largest --json`."""
    without = found.without_plan
    beside = {
        "parameter_count": found.kept.parameter_count,
        "kept": {name: getattr(found.kept, name) for name in _OF_A_STEP},
        "without_plan": None
        if without is None
        else {"value": without.size.value, "parameter_count": without.estimate.parameter_count}
        | {name: getattr(without.estimate, name) for name in _OF_A_STEP},
    }
    return found.plan.to_json() | {"largest_value": _of_size(found) | beside}


_OF_A_STEP = ("predicted_peak_device_bytes", "predicted_step_seconds", "predicted_samples_per_second")


def _of_size(found: LargestEstimate | LargestPlan) -> dict[str, Any]:
    size = found.size
    return {
        "option": found.option,
        "value": size.value,
        "next_value": size.next_value,
        "limited_by": str(size.limited_by),
        "reason": size.reason,
        "tried": list(size.tried),
    }
