"""A CUDA memory snapshot for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from brimful.doctor.allocations import DeviceUse, LineUse, device_uses, live_bytes
from brimful.doctor.snapshot import Snapshot
from brimful.doctor.text import findings_part
from brimful.report.layout import Listing, Part, Remark, Report, Row, as_text
from brimful.report.page import Chart, Page, Section, Unit, curve
from brimful.utils.quantities import format_bytes

_LISTED_LINES = 10


def snapshot_text(name: str, uses: Sequence[DeviceUse]) -> str:
    """What a snapshot shows, GPU by GPU."""
    if not uses:
        return f"{name}: no memory of a GPU, and no history"
    reports = [Report(heading=f"{name}: {_device(each)}", parts=tuple(_parts(each))) for each in uses]
    return "\n".join(map(as_text, reports))


def snapshot_page(name: str, snapshot: Snapshot) -> Page:
    """What a snapshot shows, GPU by GPU, with memory over its history."""
    sections, peaks = [], list[int]()
    for each in device_uses(snapshot):
        content: list[Part | Chart] = list(_parts(each))
        if each.events:
            allocated = live_bytes(snapshot, each.device)
            title = f"Memory in tensors on {_device(each)} over its history"
            events = [*range(len(allocated))]
            content.append(curve(title, "event", events, Unit.BYTES, {"allocated": allocated}, of_peak=True))
        sections.append(Section(title=_device(each), content=tuple(content)))
        peaks += () if each.peak is None else (each.peak.size_bytes,)
    highest = f": {format_bytes(max(peaks))} in tensors at the peak" if peaks else ""
    return Page(title=f"{name}{highest}", sections=tuple(sections))


def snapshot_document(uses: Sequence[DeviceUse]) -> dict[str, Any]:
    """What a snapshot shows, as JSON."""
    return {"devices": [asdict(each) for each in uses]}


def _device(use: DeviceUse) -> str:
    """The name of a device; a history without segments may be of any kind of device."""
    return f"{'GPU' if use.segments else 'device'} {use.device}"


def _parts(use: DeviceUse) -> Iterator[Part]:
    if use.segments or use.peak is None:  # a predicted history has no segments
        yield from _now(use)
    for each in use.ran_out:
        free = "" if each.device_free_bytes is None else f", {format_bytes(each.device_free_bytes)} free"
        held = f"{format_bytes(each.allocated_bytes)} in tensors{free}"
        yield Row("out of memory", f"{each.line} asked for {format_bytes(each.asked_bytes)} ({held})")
    if use.peak is None:
        text = (
            "none recorded: call torch.cuda.memory._record_memory_history(max_entries=100000) before training"
        )
        yield Remark("history", text)
    else:
        yield Row("peak", f"{format_bytes(use.peak.size_bytes)} in tensors, as requested")
        yield _lines("at the peak, by line of code", use.peak.lines)
    if use.lines:
        yield replace(_lines("at the end, by line of code", use.lines), is_detail=True)
    if use.before_bytes and use.peak is not None:
        text = (
            f"the history of {use.events} events begins with {format_bytes(use.before_bytes)} allocated, of "
            "which it has no events: record earlier, or with more max_entries"
        )
        yield Remark("note", text)
    yield findings_part(use.findings)


def _now(use: DeviceUse) -> Iterator[Part]:
    """What the allocator holds when the snapshot is taken."""
    yield Row("reserved", f"{format_bytes(use.reserved_bytes)} in {_counted(use.segments, 'segment')}")
    yield Row("allocated", f"{format_bytes(use.allocated_bytes)} in tensors")
    if use.late_bytes:
        yield Row("freed late", f"{format_bytes(use.late_bytes)} that other streams may still use")
    largest = f", the largest block {format_bytes(use.largest_free_bytes)}" if use.free_inside_bytes else ""
    yield Row("free between", f"{format_bytes(use.free_inside_bytes)} in segments with tensors{largest}")
    yield Row("cached", f"{format_bytes(use.cached_bytes)} in empty segments")


def _lines(title: str, lines: Sequence[LineUse]) -> Listing:
    rows = [(format_bytes(each.size_bytes), f"{each.line}, {_counted(each.blocks, 'block')}") for each in lines]
    more = [("…", f"{len(rows) - _LISTED_LINES} more lines")] if len(rows) > _LISTED_LINES else []
    return Listing(title=title, line="    {:>9}  {}", rows=(*rows[:_LISTED_LINES], *more))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
