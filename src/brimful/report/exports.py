"""Exports for a reader: what the file leaves to its user, not its content."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.exports import Export
from brimful.quantities import format_bytes
from brimful.report.layout import Part, Remark, Report, Row


def export_report(export: Export) -> Report:
    """How a step runs with an exported file, what of the plan it lacks, and what the user sets."""
    return Report(
        heading=f"for {export.tool}: {export.settings.describe()}",
        parts=tuple(_parts(export)),
    )


def _parts(export: Export) -> Iterator[Part]:
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
