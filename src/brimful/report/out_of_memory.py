"""How an out-of-memory error is explained: what was asked for, what held the rest, what to change."""

from __future__ import annotations

from collections.abc import Iterator

from brimful.memory.at_error import MemoryAtError, Saving, changes
from brimful.report.at_peak import peak_listings
from brimful.report.layout import Listing, Part, Remark, Report, Row, as_text
from brimful.utils.quantities import format_bytes

HEADING = "out of memory"


def out_of_memory_text(found: MemoryAtError, next_steps: tuple[str, ...] = ()) -> str:
    """What was asked for, what held the rest, and what to change.

    `next_steps` are sentences on what the caller knows of the settings, such as what a plan predicted.
    """
    return as_text(Report(heading=HEADING, parts=tuple(_parts(found, next_steps))))


def asked_row(op: str | None, line: str, requested_bytes: int | None, label: str) -> Row:
    """The row on what was asked for, and by which line."""
    asked = "memory" if requested_bytes is None else f"{format_bytes(requested_bytes)} more"
    return Row(label, f"{op or 'a call'} in {line or 'the script'} asked for {asked}")


def savings_listing(found: tuple[Saving, ...], title: str) -> Iterator[Listing]:
    """Changes, each with what it frees."""
    rows = tuple((format_bytes(each.size_bytes), each.change) for each in found)
    if rows:
        yield Listing(title=title, line="    {:>9}  {}", rows=rows)


def _parts(found: MemoryAtError, next_steps: tuple[str, ...]) -> Iterator[Part]:
    held_bytes = found.peak_allocated_bytes
    yield asked_row(found.peak_op, found.line, found.requested_bytes, "asked")
    yield Row("held", f"{format_bytes(held_bytes)} in tensors")
    if found.free_bytes:
        yield Row("free", format_bytes(found.free_bytes))
    if found.unused_bytes:
        yield Row("unused", f"{format_bytes(found.unused_bytes)} reserved by torch, in pieces")
    if found.others:
        listed = ", ".join(f"{format_bytes(size)} by process {number}" for number, size in found.others)
        yield Row("others", f"on the card: {listed}")
    if held_bytes:
        yield from peak_listings(found, held_bytes)
    found_changes = changes(found)
    title = "to make it fit, the first choice first: about what it frees, and the change"
    if found_changes.lacking_bytes:
        lacking = format_bytes(found_changes.lacking_bytes)
        title = f"these may not be enough, {lacking} may be lacking still: about what it frees, and the change"
    yield from savings_listing(found_changes.listed, title)
    for each in next_steps:
        yield Remark("next", each)
