"""Exports as text: what the file leaves to its user, not its content."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.exports import Export
from brimful.quantities import format_bytes


def export_text(export: Export) -> str:
    """How a step runs with an exported file, what of the plan it lacks, and what the user sets."""
    return "\n".join([f"for {export.tool}: {export.settings.describe()}", *_lines(export)])


def _lines(export: Export) -> Iterator[str]:
    for each in export.not_expressed:
        yield f"  not expressed   {each}"
    if export.predicted_peak_device_bytes is not None and export.budget_bytes is not None:
        verdict = "fits" if export.fits else "DOES NOT FIT; plan with recompute='all' or a smaller budget"
        peak, budget = format_bytes(export.predicted_peak_device_bytes), format_bytes(export.budget_bytes)
        yield f"  predicted peak  {peak} of {budget}: {verdict}"
    for name, value in export.environment:
        yield f"  environment     {name}={value}"
    for remark in export.remarks:
        yield f"  - {remark}"
