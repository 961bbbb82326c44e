"""What training shows of its first steps: predicted beside measured, and whether to plan again."""

from __future__ import annotations

from brimful.planner import Plan
from brimful.quantities import format_bytes, format_seconds
from brimful.results import SelfCorrection
from brimful.results.measurement import busy_text


def comparison_line(found: SelfCorrection, plan: Plan) -> str:
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


def plan_again_line(found: SelfCorrection) -> str:
    """Why another plan, made with the measured factors, would be better, in one line."""
    why = "the plan exceeds its budget"
    if not found.exceeds_budget:
        why = "memory is left with which a step may be faster"
    return f"{why}: plan again, with predictions corrected by what was measured"
