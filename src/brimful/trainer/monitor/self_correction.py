"""What self-correction shows: predicted beside measured, better settings, and the change to them."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.planner import Plan
from brimful.quantities import format_bytes, format_seconds
from brimful.results import SelfCorrection
from brimful.results.measurement import busy_text


def factor_line(found: SelfCorrection, plan: Plan) -> str:
    """Predicted beside measured, in one line."""
    peak = "the peak was not measured"
    if found.measured_peak_reserved_bytes is not None:
        ratio = found.measured_peak_reserved_bytes / found.predicted_peak_reserved_bytes
        over = f", OVER the budget of {format_bytes(plan.budget_bytes)}" if found.exceeds_budget else ""
        peak = (
            f"peak {format_bytes(found.predicted_peak_reserved_bytes)} predicted, "
            f"{format_bytes(found.measured_peak_reserved_bytes)} measured (× {ratio:.2f}){over}"
        )
    ratio = found.measured_step_seconds / found.predicted_step_seconds
    busy = busy_text(found.core_wait_fraction)
    return (
        f"step {found.step}  step time {format_seconds(found.predicted_step_seconds)} predicted, "
        f"{format_seconds(found.measured_step_seconds)} measured (× {ratio:.2f}); {peak}"
        f"{f'; {busy}' if busy else ''}"
    )


def correction_lines(found: SelfCorrection, plan: Plan, problem: str | None) -> Iterator[str]:
    """Better settings with both numbers, and whether the run changed to them.

    Args:
        found: What was found.
        plan: In force before.
        problem: Why there was no search or no change; None without a problem.

    Yields:
        One or two lines.
    """
    better = found.better
    took = "" if found.searched_seconds is None else f" (search: {format_seconds(found.searched_seconds)})"
    if better is None:
        why = "" if problem is None else f": {problem}"
        yield f"no better settings were found{took}{why}"
        return
    low, high = (bound * 1e3 for bound in better.predicted_difference_interval_seconds)
    how = "within the budget" if found.exceeds_budget else "faster"
    yield (
        f"{how} by corrected predictions: {better.settings.describe()}: "
        f"{format_seconds(better.predicted_step_seconds)} a step ({low:+.0f} to {high:+.0f} ms), peak "
        f"{format_bytes(better.predicted_peak_device_bytes)} of {format_bytes(plan.budget_bytes)}{took}"
    )
    if found.changed_after_step is not None:
        yield f"changed to them after step {found.changed_after_step}; parameters and data stay as they are"
    elif problem is not None:
        yield f"not changed to them: {problem}"
    else:
        yield "to change to them in training, set replan=True (--replan)"


def change_lines(found: SelfCorrection, plan: Plan) -> Iterator[str]:
    """What was measured after the change, and whether the run keeps it."""
    change = found.change
    assert change is not None
    parts = []
    if change.measured_step_seconds is not None:
        before = format_seconds(found.measured_step_seconds)
        if change.measured_again_step_seconds is not None:
            before += f" and {format_seconds(change.measured_again_step_seconds)} when measured again"
        parts.append(f"step time {format_seconds(change.measured_step_seconds)}, before the change {before}")
    if change.measured_peak_reserved_bytes is not None:
        peak = format_bytes(change.measured_peak_reserved_bytes)
        parts.append(f"peak {peak} of {format_bytes(plan.budget_bytes)}")
    measured = "; ".join(parts) or "memory ran out"
    then = "kept" if change.is_kept else f"returned to {found.settings.describe()}"
    yield f"step {change.step}  measured after the change: {measured}: {then}"
