"""Measurements, comparisons and checks of a plan as text: predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from brimful.planner import PlanCheck
from brimful.quantities import format_bytes, format_seconds
from brimful.results import Comparison, EquivalenceReport, Measurement
from brimful.results.measurement import busy_text


class _Compared(Protocol):
    """What has been predicted and measured, in bytes and seconds; None where it was not."""

    @property
    def predicted_peak_allocated_bytes(self) -> int | None: ...
    @property
    def predicted_peak_reserved_bytes(self) -> int | None: ...
    @property
    def predicted_peak_device_bytes(self) -> int | None: ...
    @property
    def predicted_step_seconds(self) -> float | None: ...
    @property
    def measured_peak_allocated_bytes(self) -> int | None: ...
    @property
    def measured_peak_reserved_bytes(self) -> int | None: ...
    @property
    def measured_peak_device_bytes(self) -> int | None: ...
    @property
    def measured_step_seconds(self) -> float | None: ...


def predicted_beside_measured(compared: _Compared) -> Iterator[str]:
    """A table for a reader: peaks and step time, predicted, measured, and how far apart.

    Args:
        compared: Of a CPU, where the three peaks are one, or of a GPU.

    Yields:
        Its lines.
    """
    yield f"  {'':<20}{'predicted':>12}{'measured':>12}{'error':>9}"
    peaks = [
        ("peak allocated", compared.predicted_peak_allocated_bytes, compared.measured_peak_allocated_bytes),
        ("peak reserved", compared.predicted_peak_reserved_bytes, compared.measured_peak_reserved_bytes),
        ("peak on the device", compared.predicted_peak_device_bytes, compared.measured_peak_device_bytes),
    ]
    for name, predicted, measured in peaks if compared.measured_peak_device_bytes is not None else peaks[:1]:
        said = "-" if predicted is None else format_bytes(predicted)
        was = "-" if measured is None else format_bytes(measured)
        yield f"  {name:<20}{said:>12}{was:>12}{_error(predicted, measured):>9}"
    predicted_step, measured_step = compared.predicted_step_seconds, compared.measured_step_seconds
    said = "-" if predicted_step is None else format_seconds(predicted_step)
    was = "-" if measured_step is None else format_seconds(measured_step)
    yield f"  {'median step':<20}{said:>12}{was:>12}{_error(predicted_step, measured_step):>9}"


def measurement_text(measurement: Measurement) -> str:
    """One measured step, beside what was predicted for it."""
    count = measurement.measured_steps
    shortest = format_seconds(measurement.shortest_step_seconds)
    longest = format_seconds(measurement.longest_step_seconds)
    spread = f"{count} steps of {shortest} to {longest}" if count > 1 else "1 step"
    lines = [f"measured on {measurement.device}, {spread}", *predicted_beside_measured(measurement)]
    if busy := busy_text(measurement.core_wait_fraction):
        lines.append(f"  {'busy machine':<20}{busy}")
    return "\n".join(lines)


def comparison_text(comparison: Comparison) -> str:
    """One line: what was compared, and how far apart the two are."""
    if comparison.why_not_compared:
        return f"{comparison.name}: not compared, {comparison.why_not_compared}"
    if comparison.is_bitwise:
        return f"{comparison.name}: loss, gradients and buffers are equal to the last bit"
    verdict = "within" if comparison.holds else "BEYOND"
    return (
        f"{comparison.name}: largest difference {comparison.largest_difference:.2g} of its tensor's largest "
        f"entry, in {comparison.where}; {verdict} the bound of {comparison.bound:.2g}"
    )


def equivalence_text(report: EquivalenceReport) -> str:
    """The verdict, each comparison, and what to do where one does not hold."""
    verdict = "is the same training" if report.holds else "is NOT the same training"
    if all(comparison.why_not_compared for comparison in report.comparisons):
        verdict = "was not compared with the baseline"
    elif report.holds and report.known_differences:
        verdict = "is the same training, except for layers that depend on the micro-batch"
    compared = f"({report.samples} samples compared on {report.device})"
    lines = [f"{report.job}: the plan {verdict} {compared}"]
    lines += [f"  {comparison_text(comparison)}" for comparison in report.comparisons]
    return "\n".join([*lines, *([f"  {report.way_out}"] if report.way_out else [])])


def check_text(check: PlanCheck) -> str:
    """Whether a plan still fits, with what was predicted now and when it was made."""
    over_bytes = check.predicted_peak_device_bytes - check.budget_bytes
    if check.fits:
        verdict = f"fits, {format_bytes(-over_bytes)} to spare"
    else:
        verdict = f"does not fit, {format_bytes(over_bytes)} too much: {_why_over(check)}; plan it again"
    return (
        f"{check.job} on {check.device}: the plan {verdict}\n"
        f"  settings        {check.settings.describe()}\n"
        f"  predicted peak  {format_bytes(check.predicted_peak_device_bytes)} of "
        f"{format_bytes(check.budget_bytes)}; when planned {format_bytes(check.planned_peak_device_bytes)}\n"
        f"  predicted step  {format_seconds(check.predicted_step_seconds)}; "
        f"when planned {format_seconds(check.planned_step_seconds)}"
    )


def _why_over(check: PlanCheck) -> str:
    if check.planned_peak_device_bytes > check.budget_bytes:
        return f"it was planned for more, {format_bytes(check.planned_peak_device_bytes)}"
    return "the job takes more than when it was planned"


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "-"
