"""Measurements, comparisons and checks of a plan for a reader: predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from brimful.planner import Plan, PlanCheck
from brimful.report.layout import Bar, Gauge, Listing, Part, Remark, Report, Row, Tone
from brimful.results import Comparison, EquivalenceReport, Measurement, SelfCorrection, TrainingResult
from brimful.results.measurement import busy_text
from brimful.utils.quantities import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSoFar:
    """What a plan predicts, and what has been measured of its run until now, under the names of a result."""

    predicted_peak_allocated_bytes: int | None
    measured_peak_allocated_bytes: int | None
    predicted_peak_reserved_bytes: int | None
    measured_peak_reserved_bytes: int | None
    predicted_peak_device_bytes: int | None
    measured_peak_device_bytes: int | None
    predicted_step_seconds: float | None
    measured_step_seconds: float | None


Compared = Measurement | TrainingResult | MeasuredSoFar


def predicted_beside_measured(compared: Compared) -> Listing:
    """A table of peaks and step time: predicted, measured, and how far apart. On a CPU there is one peak."""
    rows = [
        (name, _bytes(predicted), _bytes(measured), _error(predicted, measured))
        for name, predicted, measured in _peaks(compared)
    ]
    predicted_step, measured_step = compared.predicted_step_seconds, compared.measured_step_seconds
    error = _error(predicted_step, measured_step)
    rows.append(("median step", _seconds(predicted_step), _seconds(measured_step), error))
    heading = ("", "predicted", "measured", "error")
    return Listing(line="  {:<20}{:>12}{:>12}{:>9}", heading=heading, rows=tuple(rows))


def gauges(compared: Compared, budget_bytes: int | None = None) -> Iterator[Gauge]:
    """The largest peak and the step time as bars, predicted above measured, as far as both are known."""
    _, predicted, measured = _peaks(compared)[-1]
    if predicted is not None and measured is not None:
        bars = _pair("peak", (predicted, _bytes(predicted)), (measured, _bytes(measured)))
        yield Gauge(bars=bars, limit=budget_bytes)
    expected, taken = compared.predicted_step_seconds, compared.measured_step_seconds
    if expected is not None and taken is not None:
        yield Gauge(bars=_pair("step", (expected, _seconds(expected)), (taken, _seconds(taken))))


def _pair(what: str, predicted: tuple[float, str], measured: tuple[float, str]) -> tuple[Bar, Bar]:
    return (
        Bar(label=f"predicted {what}", size=predicted[0], text=predicted[1], tone=Tone.PREDICTED),
        Bar(label=f"measured {what}", size=measured[0], text=measured[1]),
    )


def _peaks(compared: Compared) -> list[tuple[str, int | None, int | None]]:
    peaks = [
        ("peak allocated", compared.predicted_peak_allocated_bytes, compared.measured_peak_allocated_bytes),
        ("peak reserved", compared.predicted_peak_reserved_bytes, compared.measured_peak_reserved_bytes),
        ("peak on the device", compared.predicted_peak_device_bytes, compared.measured_peak_device_bytes),
    ]
    return peaks if compared.measured_peak_device_bytes is not None else peaks[:1]


def _bytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def measurement_report(measurement: Measurement) -> Report:
    """One measured step, beside what was predicted for it."""
    count = measurement.measured_steps
    shortest = format_seconds(measurement.shortest_step_seconds)
    longest = format_seconds(measurement.longest_step_seconds)
    spread = f"{count} steps of {shortest} to {longest}" if count > 1 else "1 step"
    parts: list[Part] = [*gauges(measurement), predicted_beside_measured(measurement)]
    if busy := busy_text(measurement.core_wait_fraction):
        parts.append(Row("busy machine", busy))
    heading = f"measured on {measurement.device}, {spread}"
    return Report(heading=heading, parts=tuple(parts), label_cells=20)


def comparison_text(comparison: Comparison) -> str:
    """One line: what was compared, and how far apart the two are."""
    if comparison.why_not_compared:
        return f"{comparison.name}: not compared, {comparison.why_not_compared}"
    if comparison.evidence:
        return f"{comparison.name}: the loss is {comparison.evidence}, not a mean over samples"
    if comparison.is_bitwise:
        return f"{comparison.name}: loss, gradients and buffers are equal to the last bit"
    verdict = "within" if comparison.holds else "BEYOND"
    return (
        f"{comparison.name}: largest difference {comparison.largest_difference:.2g} of its tensor's largest "
        f"entry, in {comparison.where}; {verdict} the bound of {comparison.bound:.2g}"
    )


def equivalence_report(report: EquivalenceReport) -> Report:
    """The verdict, each comparison, and what to do where one does not hold."""
    verdict = "is the same training" if report.holds else "is NOT the same training"
    if all(comparison.why_not_compared for comparison in report.comparisons):
        verdict = "was not compared with the baseline"
    elif report.holds and report.known_differences:
        verdict = "is the same training, except for layers that depend on the micro-batch"
    is_compared = any(not (each.why_not_compared or each.evidence) for each in report.comparisons)
    compared = f" ({report.samples} samples compared on {report.device})" if is_compared else ""
    sentences = [comparison_text(comparison) for comparison in report.comparisons]
    sentences += [report.way_out] if report.way_out else []
    return Report(
        heading=f"{report.job}: the plan {verdict}{compared}",
        parts=tuple(Remark("", sentence) for sentence in sentences),
    )


def check_report(check: PlanCheck) -> Report:
    """Whether a plan still fits, with what was predicted now and when it was made."""
    over_bytes = check.predicted_peak_device_bytes - check.budget_bytes
    if check.fits:
        verdict = f"fits, {format_bytes(-over_bytes)} to spare"
    else:
        verdict = f"does not fit, {format_bytes(over_bytes)} too much: {_why_over(check)}; plan it again"
    peak, planned = map(format_bytes, (check.predicted_peak_device_bytes, check.planned_peak_device_bytes))
    step, before = map(format_seconds, (check.predicted_step_seconds, check.planned_step_seconds))
    bars = (
        Bar(label="when planned", text=planned, size=check.planned_peak_device_bytes),
        Bar(label="now", text=peak, size=check.predicted_peak_device_bytes, tone=Tone.FITS),
    )
    return Report(
        heading=f"{check.job} on {check.device}: the plan {verdict}",
        parts=(
            Gauge(bars=bars, limit=check.budget_bytes),
            Row("settings", check.settings.describe()),
            Row("predicted peak", f"{peak} of {format_bytes(check.budget_bytes)}; when planned {planned}"),
            Row("predicted step", f"{step}; when planned {before}"),
        ),
    )


def _why_over(check: PlanCheck) -> str:
    if check.planned_peak_device_bytes > check.budget_bytes:
        return f"it was planned for more, {format_bytes(check.planned_peak_device_bytes)}"
    return "the job takes more than when it was planned"


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "-"


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
