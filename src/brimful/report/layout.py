"""The layout of a result for a reader, from which both its text and its HTML are made.

A `Report` has a heading and parts, in order. `as_text` writes it for a terminal, `report.html` for a notebook,
so that both have the same words and numbers. Only a `Gauge` has no text: it draws what the rows say.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from shutil import get_terminal_size
from textwrap import wrap

_BAR_CELLS = 24
_COLUMNS, _LEAST_COLUMNS = 90, 60
"""Width of text where there is no terminal, which a page that shows it has room for; and on any terminal."""
_MOST_CELLS_BEFORE = 60
"""Width of a table's other columns beside which its last one is still wrapped."""

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]?i?B|[mµ]?s|min|h)\b)")
_NO_BREAK = "\u00a0"


class Share(float):
    """A part of a whole, from 0 to 1; as text a bar. `place` decides its colour: that of a category is the same
    wherever it is drawn.
    """

    place: int

    def __new__(cls, fraction: float, place: int = 0) -> Share:
        """A part, with the number of its colour."""
        self = super().__new__(cls, fraction)
        self.place = place
        return self

    def __str__(self) -> str:
        return "█" * round(min(max(float(self), 0.0), 1.0) * _BAR_CELLS)


@dataclass(frozen=True, slots=True)
class Row:
    """A fact: its label, and what holds."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence that may be long: "note: …"."""

    kind: str
    """Text before the colon; "" for a sentence of its own."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table."""

    title: str = ""
    """A line above the table; "" for none."""
    line: str
    """Format of a line of text, with a replacement field for each cell; ">" in it aligns the column to the
    right."""
    heading: tuple[str, ...] = ()
    """Names of the columns, if they have any."""
    rows: tuple[tuple[str | Share, ...], ...]
    is_detail: bool = False
    """Whether HTML shows it only when it is opened."""
    is_whole: bool = False
    """Whether the shares of the rows are of one whole, which HTML draws as one bar in colours."""


class Tone(StrEnum):
    """What a bar stands for."""

    NEUTRAL = "neutral"
    PREDICTED = "predicted"
    """A predicted quantity beside a measured one."""
    FITS = "fits"
    TIGHT = "tight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A quantity to draw."""

    label: str
    text: str
    """The quantity for a reader."""
    size: float
    """The quantity in the unit of the gauge, such as bytes."""
    high: float | None = None
    """Upper end of the interval; None without one."""
    tone: Tone = Tone.NEUTRAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """Bars on one scale, against a limit; drawn in HTML only."""

    bars: tuple[Bar, ...]
    limit: float | None = None
    """Budget or capacity; what is beyond it is drawn as too much. None for no limit."""


Part = Row | Remark | Listing | Gauge


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A result for a reader."""

    heading: str
    parts: tuple[Part, ...]
    label_cells: int = 16
    """Width of the labels of rows in text."""


def as_text(report: Report) -> str:
    """A report as lines of text: the heading, and below it, indented, the parts."""
    return "\n".join([*wrapped("", report.heading), *part_lines(report.parts, report.label_cells)])


def part_lines(parts: tuple[Part, ...], label_cells: int) -> Iterator[str]:
    """Lines of parts of a report, indented by two spaces or more."""
    for part in parts:
        match part:
            case Row():
                yield from wrapped(f"  {part.label:<{label_cells}}", part.text)
            case Remark():
                yield from wrapped("  ", f"{part.kind}: {part.text}" if part.kind else part.text, indent=4)
            case Listing():
                yield from listing_lines(part)
            case Gauge():
                pass


def listing_lines(listing: Listing) -> Iterator[str]:
    """Lines of a table; a last cell that is too long continues below itself."""
    if listing.title:
        yield from wrapped("  ", listing.title)
    for row in (*((listing.heading,) if listing.heading else ()), *listing.rows):
        *cells, last = map(str, row)
        before = listing.line.format(*cells, "")
        if len(before) > _MOST_CELLS_BEFORE or not listing.line.endswith("{}"):
            yield listing.line.format(*cells, last).rstrip()
        else:
            yield from wrapped(before, last)


def wrapped(before: str, text: str, indent: int | None = None) -> Iterator[str]:
    """Text after something on its first line, in lines as wide as the terminal; a longer word stays whole."""
    columns = max(get_terminal_size((_COLUMNS, 0)).columns, _LEAST_COLUMNS)
    below = " " * (len(before) if indent is None else indent)
    for line in text.split("\n"):
        lines = wrap(
            _BEFORE_UNIT.sub(_NO_BREAK, line),
            columns,
            initial_indent=before,
            subsequent_indent=below,
            break_long_words=False,
            break_on_hyphens=False,
        )
        yield from (each.replace(_NO_BREAK, " ") for each in lines or [before.rstrip()])
        before = below
