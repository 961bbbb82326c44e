"""Pages of results that are only in a JSON file: an estimate, and a watched run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from brimful.codec import NonNegativeInt, UnboundedFloat, decode_directly
from brimful.errors import FileFormatError
from brimful.memory import HeldStorage, ModuleShare, Moment
from brimful.memory.at_error import Saving
from brimful.prediction import Verdict
from brimful.report.at_peak import block_listing, category_listing, peak_place
from brimful.report.layout import Bar, Gauge, Listing, Part, Remark, Row
from brimful.report.out_of_memory import savings_listing
from brimful.report.page.document import Page, Section
from brimful.report.page.pages import module_sections, timeline_sections
from brimful.report.plans import TONES, time_shares_text
from brimful.report.watched import watched_rows, why_partial
from brimful.trace import Category, Phase
from brimful.utils.quantities import format_bytes, format_interval, format_rate, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peak:
    phase: Phase
    module: str | None
    op: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _EstimateFile:
    """What a page shows of the document of `brimful estimate --json`."""

    job: str
    device: str
    verdict: Verdict
    capacity_bytes: NonNegativeInt
    predicted_peak_allocated_bytes: NonNegativeInt
    predicted_peak_device_bytes: NonNegativeInt
    predicted_device_interval_bytes: tuple[NonNegativeInt, NonNegativeInt]
    predicted_step_seconds: float
    predicted_step_seconds_interval: tuple[float, float]
    predicted_samples_per_second: float
    predicted_time_shares: dict[str, float]
    breakdown: dict[Category, NonNegativeInt]
    peak: _Peak
    largest: tuple[HeldStorage, ...]
    modules: tuple[ModuleShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    what: str
    change: str
    line: str = ""
    size_bytes: int | None = None
    seconds: UnboundedFloat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    op: str
    line: str
    requested_bytes: NonNegativeInt | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedFile:
    """What a page shows of the document of `brimful run --output`."""

    script: str = ""
    device: str
    steps: int
    peak_bytes: NonNegativeInt | None
    measured_peak_bytes: NonNegativeInt | None
    peak_phase: Phase | None
    categories: dict[Category, NonNegativeInt]
    modules: tuple[ModuleShare, ...]
    largest: tuple[HeldStorage, ...]
    growth_bytes_per_step: int | None
    step_seconds: float | None
    time_shares: dict[str, float] = field(default_factory=dict)
    launches: int | None = None
    host_waiting_seconds: float | None = None
    watching_seconds: float | None = None
    findings: tuple[_Finding, ...]
    savings: tuple[Saving, ...] = ()
    timeline: tuple[Moment, ...] = ()
    error: str = ""
    compiled: str = ""
    notes: tuple[str, ...] = ()
    failed: _Failure | None = None


def estimate_file_page(content: bytes, *, where: str) -> Page:
    """The page of an estimate's JSON document.

    Raises `FileFormatError`, in which `where` names the file.
    """
    found: _EstimateFile = decode_directly(content, _EstimateFile, where=where)
    place = peak_place(found.peak.phase, found.peak.module, found.peak.op)
    low, high = map(format_bytes, found.predicted_device_interval_bytes)
    bar = Bar(
        label="peak",
        text=f"{format_bytes(found.predicted_peak_device_bytes)} of {format_bytes(found.capacity_bytes)}",
        size=found.predicted_peak_device_bytes,
        high=found.predicted_device_interval_bytes[1],
        tone=TONES[found.verdict],
    )
    seconds = format_interval(*map(format_seconds, found.predicted_step_seconds_interval))
    peak_bytes, capacity = format_bytes(found.predicted_peak_device_bytes), format_bytes(found.capacity_bytes)
    parts: tuple[Part, ...] = (
        Gauge(bars=(bar,), limit=found.capacity_bytes),
        Row("predicted peak", f"{peak_bytes} of {capacity}, {low} to {high}"),
        Row(
            "predicted step",
            f"{format_seconds(found.predicted_step_seconds)} ({seconds}), "
            f"{format_rate(found.predicted_samples_per_second)}",
        ),
        Row("time goes to", time_shares_text(found.predicted_time_shares.items())),
        category_listing(place, found.breakdown.items(), found.predicted_peak_allocated_bytes),
        block_listing(found.largest),
        Remark(
            "note", "memory over the step is in a trace: brimful estimate --save-trace, and report that file"
        ),
    )
    return Page(
        title=f"{found.job} on {found.device}: {found.verdict} ({peak_bytes} of {capacity})",
        sections=(Section(title="Estimate", content=parts), *module_sections(found.modules, {})),
    )


_SCRIPT_CELLS = 100
"""Characters of a script and its arguments in a title. A choice."""


def watched_file_page(content: bytes, *, where: str) -> Page:
    """The page of what `brimful run --output` wrote.

    Raises `FileFormatError`, in which `where` names the file.
    """
    found: _WatchedFile = decode_directly(content, _WatchedFile, where=where)
    if any(len(each.held_bytes) != len(Category) for each in found.timeline):
        raise FileFormatError(f"{where}: field `timeline`: a moment has not one size for each category.")
    sections = [
        Section(title="Findings", content=tuple(_findings(found))),
        Section(title="Peak", content=tuple(_peak(found))),
        *timeline_sections(found.timeline),
        *module_sections(found.modules, {}),
    ]
    script = found.script and f"{found.script[:_SCRIPT_CELLS]}: "
    title = f"{script}watched {found.steps} optimizer step{'s' if found.steps != 1 else ''} on {found.device}"
    if why := why_partial(found.error, found.compiled):
        return Page(title=title, sections=(Section(title="Recording", content=(Remark("note", why),)),))
    peak = "" if found.peak_bytes is None else f", {format_bytes(found.peak_bytes)} in tensors at the peak"
    return Page(title=f"{title}{peak}", sections=tuple(sections))


def _findings(found: _WatchedFile) -> Iterator[Part]:
    if not found.findings:
        yield Remark("findings", "none")
    rows = tuple((_stake(each), each.line, each.what, f"→ {each.change}") for each in found.findings)
    if rows:
        yield Listing(title="at stake, line, what, and the change to make", line="{:>9} {} {} {}", rows=rows)
    yield from savings_listing(found.savings, "would take less at the peak: about how much, and the change")


def _stake(finding: _Finding) -> str:
    if finding.size_bytes is not None:
        return format_bytes(finding.size_bytes)
    return "" if finding.seconds is None else format_seconds(finding.seconds)


def _peak(found: _WatchedFile) -> Iterator[Part]:
    yield from watched_rows(
        steps=found.steps,
        failed=found.failed,
        measured_peak_bytes=found.measured_peak_bytes,
        growth_bytes=found.growth_bytes_per_step,
        step_seconds=found.step_seconds,
        time_shares=found.time_shares.items(),
        launches=found.launches,
        host_waiting_seconds=found.host_waiting_seconds,
        watching_seconds=found.watching_seconds,
        notes=found.notes,
    )
    if found.peak_bytes is None or found.peak_phase is None:
        yield Remark("note", "no tensor was made in the watched steps")
        return
    highest = max(found.timeline, key=lambda each: each.allocated_bytes, default=None)
    module, op = (None, None) if highest is None else (highest.module, highest.op)
    yield category_listing(peak_place(found.peak_phase, module, op), found.categories.items(), found.peak_bytes)
    yield block_listing(found.largest)
