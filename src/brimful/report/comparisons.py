"""A comparison of techniques as text, Markdown, JSON and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from brimful.codec import to_json_document
from brimful.errors import UsageError
from brimful.planner.comparison import ComparedTechnique, SameResults, TechniqueComparison
from brimful.planner.plan import NOT_SURE
from brimful.prediction import Verdict
from brimful.report.layout import Listing, Part, Remark, Report, Row
from brimful.report.plans import uncertain_rows
from brimful.results.measurement import busy_text
from brimful.utils.files import write_file
from brimful.utils.quantities import SHOWN_UNITS, format_bytes, format_seconds

_HEADING = ("technique", "peak", "samples/s", "×", "results", "")
_LINE = "  {:<39}{:>9}{:>11}{:>7}  {:<9}  {}"
_MEASURED_HEADING = ("technique", "predicted", "measured", "error", "predicted", "measured", "error")
_MEASURED_LINE = "  {:<39}{:>9}{:>9}{:>7}{:>10}{:>9}{:>6}"
_NO_RESULT = "–"
"""Results of a row that is not predicted."""
_OF_TEXT = (
    "×: speed beside the baseline's.",
    "What each row changes, and how to ask for it: --markdown, to_markdown().",
)
_TIGHT = "tight: the likely peak fits, and exceeds too often for a plan."
_OVER = "over: does not fit."
_RESULTS = (
    "results: weights after the step beside the baseline's. identical: bit for bit. rounding: other last "
    "digits, and dropout may draw other numbers. different: other mathematics."
)


def comparison_report(comparison: TechniqueComparison) -> Report:
    """The rows as a table, which is the fastest, and what was measured."""
    heading = (
        f"{comparison.job} on {comparison.device}, global batch {comparison.global_batch_size}, to fit "
        f"{format_bytes(comparison.capacity_bytes)}"
    )
    return Report(heading=heading, parts=tuple(_parts(comparison)))


def _parts(comparison: TechniqueComparison) -> Iterator[Part]:
    rows = tuple(_cells(row, comparison) for row in comparison.rows)
    yield Listing(line=_LINE, heading=_HEADING, rows=rows)
    yield from (Remark("", each) for each in _findings(comparison))
    measured = tuple(_measured_cells(row) for row in comparison.rows if row.measured is not None)
    if measured:
        title = "Predicted beside measured: peak memory, and step time"
        yield Listing(title=title, line=_MEASURED_LINE, heading=_MEASURED_HEADING, rows=measured)
        waits = [row.measured.core_wait_fraction or 0.0 for row in comparison.rows if row.measured is not None]
        if busy := busy_text(max(waits)):
            yield Row("busy machine", busy)
    yield from (Remark(row.technique, row.why_not) for row in comparison.rows if row.why_not)
    over = (_OVER,) if any(row.verdict is Verdict.DOES_NOT_FIT for row in comparison.rows) else ()
    yield from (Remark("", each) for each in (*_legend(comparison), *over, *_OF_TEXT))
    yield from uncertain_rows(_noted(comparison)[0])
    yield from (Remark("note", note) for note in _noted(comparison)[1])


def _legend(comparison: TechniqueComparison) -> tuple[str, ...]:
    """What the words of the table mean."""
    tight = (_TIGHT,) if any(row.verdict is Verdict.TIGHT for row in comparison.rows) else ()
    return (*tight, _RESULTS)


def _noted(comparison: TechniqueComparison) -> tuple[list[str], list[str]]:
    """What is uncertain, and the other notes."""
    unsure = [note.removeprefix(NOT_SURE) for note in comparison.notes if note.startswith(NOT_SURE)]
    return unsure, [note for note in comparison.notes if not note.startswith(NOT_SURE)]


def _cells(row: ComparedTechnique, comparison: TechniqueComparison) -> tuple[str, ...]:
    if row.predicted is None:
        return (row.technique, "–", "–", "–", _NO_RESULT, "not predicted")
    return (
        row.technique,
        format_bytes(row.predicted.predicted_peak_device_bytes),
        _number(row.predicted.predicted_samples_per_second),
        _speedup(row, comparison),
        str(row.results),
        "fastest" if row is comparison.fastest else _OF_VERDICT[row.verdict],
    )


_OF_VERDICT = {Verdict.FITS: "", Verdict.TIGHT: "tight", Verdict.DOES_NOT_FIT: "over", None: "not predicted"}


def _speedup(row: ComparedTechnique, comparison: TechniqueComparison) -> str:
    base = comparison.rows[0].predicted_samples_per_second
    own = row.predicted_samples_per_second
    return "–" if base is None or own is None else f"{own / base:.2f}"


def _findings(comparison: TechniqueComparison) -> Iterator[str]:
    """What to choose: the fastest that computes the same, and the fastest of all."""
    same, best = comparison.fastest, comparison.fastest_of_all
    if same is None:
        yield "Nothing that computes what the baseline does fits."
    elif same.is_plan:
        yield f"The plan is the fastest that fits and computes what the baseline does: {same.effect}."
    else:
        yield f"The fastest that fits and computes what the baseline does: {same.technique}{_flag(same)}."
        if same.settings is not None and same.settings.memory_format is not None:
            yield "A plan chooses between memory formats with --memory-format auto."
    if best is not None and best is not same:
        yield f"The fastest of all that fit: {best.technique}{_flag(best)}."
        yield f"It changes the mathematics: {best.effect}."


def _flag(row: ComparedTechnique) -> str:
    return f" ({row.flag})" if row.flag else ""


def _measured_cells(row: ComparedTechnique) -> tuple[str, ...]:
    found, measured = row.predicted, row.measured
    assert found is not None
    assert measured is not None
    is_gpu = measured.measured_peak_device_bytes is not None
    predicted_bytes = found.predicted_peak_device_bytes if is_gpu else found.predicted_peak_allocated_bytes
    measured_bytes = row.measured_peak_bytes or 0
    predicted_seconds, measured_seconds = found.predicted_step_seconds, measured.measured_step_seconds
    return (
        row.technique,
        format_bytes(predicted_bytes),
        format_bytes(measured_bytes),
        f"{predicted_bytes / measured_bytes - 1:+.1%}",
        format_seconds(predicted_seconds),
        format_seconds(measured_seconds),
        f"{predicted_seconds / measured_seconds - 1:+.0%}",
    )


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def comparison_markdown(comparison: TechniqueComparison) -> str:
    """The rows as a table in Markdown, each with what it changes and how to ask for it."""
    is_measured = any(row.measured is not None for row in comparison.rows)
    twins = ("measured peak", "measured samples/s") if is_measured else ()
    columns = ("technique", "peak", "samples/s", *twins, "results", "fits", "what it changes", "option")
    rows = [columns, tuple("---:" if cell in ("peak", "samples/s", *twins) else "---" for cell in columns)]
    for row in comparison.rows:
        found, speed = row.predicted, row.predicted_samples_per_second
        rows.append(
            (
                f"**{row.technique}**" if row is comparison.fastest else row.technique,
                "–" if found is None else format_bytes(found.predicted_peak_device_bytes),
                "–" if speed is None else _number(speed),
                *(_measured_twins(row) if is_measured else ()),
                str(row.results or _NO_RESULT),
                "not predicted" if row.verdict is None else str(row.verdict),
                row.why_not.replace("\n", " ") or row.effect or "–",
                f"`{row.flag}`" if row.flag else "–",
            )
        )
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in rows]
    title = comparison_report(comparison).heading
    notes = [f"- {note}" for note in comparison.notes]
    return "\n".join(
        [
            f"{title}",
            "",
            *lines,
            "",
            *_findings(comparison),
            "",
            *_legend(comparison),
            "",
            *notes,
            *([""] if notes else []),
        ]
    )


def _measured_twins(row: ComparedTechnique) -> tuple[str, str]:
    peak_bytes, speed = row.measured_peak_bytes, row.measured_samples_per_second
    return ("–", "–") if peak_bytes is None or speed is None else (format_bytes(peak_bytes), _number(speed))


def comparison_document(comparison: TechniqueComparison) -> dict[str, Any]:
    """The document of `brimful compare --json`."""
    same, best = comparison.fastest, comparison.fastest_of_all
    return {
        "job": comparison.job,
        "device": comparison.device,
        "global_batch_size": comparison.global_batch_size,
        "capacity_bytes": comparison.capacity_bytes,
        "rows": [_row_document(row) for row in comparison.rows],
        "fastest": None if same is None else same.technique,
        "fastest_of_all": None if best is None else best.technique,
        "notes": list(comparison.notes),
    }


def _row_document(row: ComparedTechnique) -> dict[str, Any]:
    found = row.predicted
    predicted = {
        "verdict": row.verdict and str(row.verdict),
        "predicted_peak_device_bytes": found and found.predicted_peak_device_bytes,
        "predicted_peak_allocated_bytes": found and found.predicted_peak_allocated_bytes,
        "predicted_exceedance_probability": found and row.predicted_exceedance_probability,
        "predicted_host_bytes": found and found.predicted_pinned_host_bytes + found.predicted_host_state_bytes,
        "predicted_step_seconds": found and found.predicted_step_seconds,
        "predicted_step_seconds_interval": found and list(found.predicted_step_seconds_interval),
        "predicted_samples_per_second": row.predicted_samples_per_second,
        "uncertain_ops": list(found.uncertain) if found else [],
    }
    return {
        "technique": row.technique,
        "results": row.results and str(row.results),
        "effect": row.effect,
        "flag": row.flag,
        "is_plan": row.is_plan,
        "settings": row.settings and to_json_document(row.settings),
        "model_options": dict(row.variant),
        **predicted,
        "measured": None if row.measured is None else to_json_document(row.measured),
        "why_not": row.why_not,
    }


_COLOURS = {SameResults.IDENTICAL: "#2e9e6b", SameResults.ROUNDING: "#4c8bd6", SameResults.DIFFERENT: "#d9822b"}
_INCHES_OF_A_ROW = 0.3
_FARTHEST_LINE = 3
"""Where the memory that rows must fit is more than this many times the largest peak, a line there would leave
the bars no room, and only the heading has it. A choice."""


def plot_comparison(comparison: TechniqueComparison, path: Path) -> None:
    """Write peak memory and speed of each row as bars; see `TechniqueComparison.plot`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UsageError(
            f"a plot is drawn by matplotlib, and it cannot be imported: {error}. pip install 'brimful[report]'"
        ) from None
    rows = [row for row in reversed(comparison.rows) if row.predicted is not None]
    figure = Figure(figsize=(11, 1.6 + _INCHES_OF_A_ROW * len(rows)), layout="constrained")
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise UsageError(
            f"{path}: matplotlib writes no {path.suffix or 'file without an ending'}. Use .svg or .png."
        )
    memory, speed = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    colours = [_COLOURS[row.results] for row in rows if row.results]
    shades = [1.0 if row.fits else 0.35 for row in rows]
    most_bytes = max((row.predicted.predicted_peak_device_bytes for row in rows if row.predicted), default=1)
    unit_bytes, unit = next((each for each in SHOWN_UNITS if each[0] <= most_bytes), (1, "B"))
    peaks = [row.predicted.predicted_peak_device_bytes / unit_bytes for row in rows if row.predicted]
    speeds = [row.predicted_samples_per_second or 0.0 for row in rows]
    measured = (
        [(row.measured_peak_bytes or math.nan) / unit_bytes for row in rows],
        [row.measured_samples_per_second or math.nan for row in rows],
    )
    for axes, values, points in zip((memory, speed), (peaks, speeds), measured, strict=True):
        for bar, shade in zip(axes.barh(places, values, color=colours), shades, strict=True):
            bar.set_alpha(shade)
        axes.scatter(points, places, s=18, color="black", zorder=3)
        for place, value, point in zip(places, values, points, strict=True):
            end = max(value, 0.0 if math.isnan(point) else point)  # behind the measured point, too
            axes.annotate(
                _number(value), (end, place), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
        axes.locator_params(axis="x", nbins=6)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    memory.set_yticks(places, [row.technique for row in rows])
    memory.set_xlabel(f"predicted peak memory, {unit}")
    if comparison.capacity_bytes <= _FARTHEST_LINE * most_bytes:
        memory.axvline(comparison.capacity_bytes / unit_bytes, color="#d64545", linewidth=1)
        memory.set_xlabel(f"predicted peak memory, {unit}; red: what it must fit")
    pale = "" if all(row.fits for row in rows) else "; pale: tight or over"
    speed.set_xlabel(f"predicted samples per second{pale}")
    figure.suptitle(comparison_report(comparison).heading, fontsize=11)
    shown: list[Any] = [Patch(color=colour, label=f"{results} results") for results, colour in _COLOURS.items()]
    if any(row.measured is not None for row in rows):
        shown.append(Line2D([], [], color="black", marker="o", markersize=4, linestyle="", label="measured"))
    figure.legend(handles=shown, fontsize=8, frameon=False, ncols=len(shown), loc="outside lower center")
    image = BytesIO()
    figure.savefig(image, format=path.suffix[1:].lower(), dpi=120)
    write_file(path, image.getvalue())
