"""A study for a reader, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from brimful.codec import to_json_document
from brimful.report.layout import Listing, Part, Remark, Report
from brimful.results import StudyFigure, StudyPrediction, StudyResult, StudyRow
from brimful.utils.quantities import format_bytes, format_seconds

_HEADING = ("", "today", "article's", "published", "error", "samples/s", "published", "error")
_LINE = "  {:<41}{:>10}{:>10}{:>10}{:>7}{:>10}{:>10}{:>7}"
_FIGURE_HEADING = ("", "", "predicted", "published", "")
_FIGURE_LINE = "  {:<41}{:<22}{:>10}{:>10}  {}"
_SMALL_HEADING = ("", "peak", "time", "a step", "loss", "accuracy", "published")
_SMALL_LINE = "  {:<41}{:>10}{:>8}{:>9}{:>14}{:>10}{:>11}"


def study_report(study: StudyResult) -> Report:
    """The rows predicted at full scale, those run at a small scale, and what to choose."""
    return Report(heading=f"{study.title}, on {study.device}", parts=tuple(_parts(study)))


def study_document(study: StudyResult) -> dict[str, Any]:
    """The document of `brimful compare --study NAME --json`."""
    document = to_json_document(study)
    errors = zip(document["rows"], study.peak_errors(), study.speed_errors(), strict=True)
    for row, peak_error, speed_error in errors:
        row |= {"peak_error": peak_error, "speed_error": speed_error}
    return document


def _parts(study: StudyResult) -> Iterator[Part]:
    figures = zip(study.rows, study.peak_errors(), study.speed_errors(), study.speed_ratios(), strict=True)
    full = tuple(
        (
            row.label,
            _peak(row.today),
            _peak(row.as_published),
            _published_peak(row),
            _error(peak_error),
            _predicted_speed(row, ratio),
            _published_speed(row),
            _error(speed_error),
        )
        for row, peak_error, speed_error, ratio in figures
        if row.compared is not None
    )
    if full:
        yield Listing(title="Full scale: peak memory and speed", line=_LINE, heading=_HEADING, rows=full)
    further = tuple(
        (row.label if index == 0 else "", figure.name, *_figure_cells(figure))
        for row in study.rows
        for index, figure in enumerate(row.figures)
    )
    if further:
        yield Listing(title="Further figures", line=_FIGURE_LINE, heading=_FIGURE_HEADING, rows=further)
    small = tuple(_small_cells(row) for row in study.rows if row.small is not None)
    if small:
        title = "Small scale, run on this machine: peak memory, and what was learnt"
        yield Listing(title=title, line=_SMALL_LINE, heading=_SMALL_HEADING, rows=small)
    else:
        yield Remark("", "--measure trains the small scale of each row on the CPU.")
    yield from (Remark(row.label, row.why_not) for row in study.rows if row.why_not)
    yield from (Remark(f"uncertain, {row.label}", text) for row in study.rows for text in row.uncertain)
    if any(row.as_published for row in study.rows):
        yield Remark(
            "article's", "a loop as its software ran it; speed and errors are of that where it is given"
        )
    yield Remark("guide", study.source)
    yield from (Remark("note", note) for note in study.notes)
    yield Remark("choose", study.conclusion)


def _error(error: float | None) -> str:
    return "–" if error is None else f"{error:+.0%}"


def _peak(prediction: StudyPrediction | None) -> str:
    return "–" if prediction is None else format_bytes(prediction.predicted_peak_device_bytes)


def _figure_cells(figure: StudyFigure) -> tuple[str, str, str]:
    """Predicted, published, unit."""
    is_bytes = figure.unit == "bytes"
    cells = (
        "–" if number is None else format_bytes(int(number)) if is_bytes else _number(number)
        for number in (figure.predicted, figure.published)
    )
    return (*cells, "" if is_bytes else figure.unit)  # type: ignore[return-value]


def _predicted_speed(row: StudyRow, ratio: float | None) -> str:
    if row.compared is None or not row.compared.predicted_fits:
        return "over"
    if row.published.relative_speed is not None and ratio is not None:
        return f"{ratio:.2f} ×"
    return _number(row.compared.predicted_samples_per_second)


def _published_peak(row: StudyRow) -> str:
    peak_bytes = row.published.peak_device_bytes
    if row.published.is_out_of_memory:
        return "over"
    return "–" if peak_bytes is None else format_bytes(peak_bytes)


def _published_speed(row: StudyRow) -> str:
    published = row.published
    if published.samples_per_second is not None:
        return _number(published.samples_per_second)
    return "–" if published.relative_speed is None else f"{published.relative_speed:.2f} ×"


def _small_cells(row: StudyRow) -> tuple[str, ...]:
    assert row.small is not None
    small, peak_bytes, accuracy = row.small, row.small.measured_peak_allocated_bytes, row.published.accuracy
    return (
        row.label,
        "–" if peak_bytes is None else format_bytes(peak_bytes),
        format_seconds(small.seconds),
        "–" if small.median_step_seconds is None else format_seconds(small.median_step_seconds),
        f"{small.first_training_loss:.2f} → {small.validation_loss:.2f}",
        f"{small.accuracy:.1%}",
        "–" if accuracy is None else f"{accuracy:.2%}",
    )


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
