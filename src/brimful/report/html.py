"""Reports as HTML for notebooks.

One element with inline styles, without scripts, identifiers or style sheets. Its elements and what draws the
bars are among those that JupyterLab's sanitizer keeps in notebooks that are not trusted
(packages/apputils/src/sanitizer.ts; it keeps 0.8 and drops .8). Text has the notebook's own colour, and bars
are legible on light and dark backgrounds. Every text is escaped, as names of jobs and modules are the user's.
"""

from __future__ import annotations

import html
import math
from itertools import groupby
from string import Formatter

from brimful.report.layout import Bar, Gauge, Listing, Part, Remark, Report, Row, Share, Tone

_COLOURS = ("#4c8bd6", "#d9822b", "#2e9e6b", "#9b6fd1", "#c75d8b", "#8a949e", "#a08a2e")
"""Colours of the parts of a whole, in order. Each has a contrast of at least 2.5 with white and with black."""
_OVER = "#d64545"
_TONES = {Tone.NEUTRAL: "#8a949e", Tone.PREDICTED: "#4c8bd6", Tone.FITS: "#2e9e6b", Tone.TIGHT: "#d9822b"}
_TRACK = "rgba(128,128,128,0.22)"
_CELL = (
    "padding:1px 10px 1px 0;border:0;vertical-align:top;background:none;white-space:pre-wrap;line-height:1.5"
)
_NUMBERS = "font-variant-numeric:tabular-nums"
_FAINT = "opacity:0.75"
_LABEL = f"{_FAINT};white-space:nowrap;min-width:8em"
_UNBROKEN = 12
"""Characters of a cell that stay on one line."""
_IGNORED_BY_MATHJAX = "tex2jax_ignore mathjax_ignore"
"""Classes in which a dollar sign is not the start of a formula."""


def as_html(report: Report) -> str:
    """A report as an HTML `<div>` with the words and numbers of the report's text."""
    return (
        f'<div class="{_IGNORED_BY_MATHJAX}" style="max-width:64em;font-size:13px;line-height:1.5">'
        f'<div style="font-weight:600;margin:2px 0 4px">{escaped(report.heading)}</div>'
        f"{parts_html(report.parts)}</div>"
    )


def parts_html(parts: tuple[Part, ...]) -> str:
    """Parts of a report, in order."""
    return "".join(_parts(tuple(group)) for _, group in groupby(parts, type))


def preformatted(text: str) -> str:
    """Text as HTML in a font of fixed width, with lines that do not wrap."""
    style = "white-space:pre;overflow-x:auto;background:none;line-height:1.3"
    return f'<pre class="{_IGNORED_BY_MATHJAX}" style="{style}">{escaped(text)}</pre>'


def escaped(text: str) -> str:
    """Text for elements and attributes; what UTF-8 has no bytes for is written as an escape."""
    return html.escape(text.encode("utf-8", "backslashreplace").decode())


def _parts(parts: tuple[Part, ...]) -> str:
    """Parts of one type; rows that follow one another are one table."""
    rows = "".join(_fact(part) for part in parts if isinstance(part, Row))
    return f"{_TABLE}{rows}</table>" if rows else "".join(map(_part, parts))


def _part(part: Part) -> str:
    match part:
        case Row():
            return _fact(part)
        case Listing():
            return _listing(part)
        case Gauge():
            return _gauge(part)
        case Remark():
            kind = f"{escaped(part.kind)}: " if part.kind else ""
            return f'<div style="margin:3px 0;opacity:0.8">{kind}{escaped(part.text)}</div>'


def _fact(row: Row) -> str:
    return _row((_cell(escaped(row.label), _LABEL), _cell(escaped(row.text))))


_TABLE = '<table style="border-collapse:collapse;border:0;margin:4px 0;font-size:13px;text-align:left">'


def _row(cells: tuple[str, ...]) -> str:
    return f'<tr style="background:none;border:0">{"".join(cells)}</tr>'


def _cell(content: str, *styles: str, align: str = "left") -> str:
    return f'<td style="{";".join((_CELL, f"text-align:{align}", *styles))}">{content}</td>'


def _listing(listing: Listing) -> str:
    aligned = [
        "right" if (spec or "").startswith(">") else "left"
        for _, name, spec, _ in Formatter().parse(listing.line)
        if name is not None
    ]
    lines = []
    if listing.heading:
        names = zip(listing.heading, aligned, strict=True)
        lines.append(_row(tuple(_cell(escaped(name), _FAINT, align=align) for name, align in names)))
    for cells in listing.rows:
        shown = (
            _share(cell) if isinstance(cell, Share) else _text(cell, align)
            for cell, align in zip(cells, aligned, strict=True)
        )
        lines.append(_row(tuple(shown)))
    table = f"{_TABLE}{''.join(lines)}</table>"
    title = escaped(listing.title)
    if listing.is_detail:
        summary = f'<summary style="cursor:pointer;opacity:0.8">{title}</summary>'
        return f'<details style="margin:3px 0">{summary}<div style="margin-left:14px">{table}</div></details>'
    above = f'<div style="margin:6px 0 2px;opacity:0.8">{title}</div>' if title else ""
    return f"{above}{_whole(listing) if listing.is_whole else ''}{table}"


def _text(text: str, align: str) -> str:
    """A cell of a table; a size is not broken between its number and its unit."""
    unbroken = ("white-space:nowrap",) if len(text) <= _UNBROKEN else ()
    return _cell(escaped(text), _NUMBERS, *unbroken, align=align)


def _whole(listing: Listing) -> str:
    """The shares of a listing as one bar, in the colours of their rows."""
    shares = [cell for cells in listing.rows for cell in cells if isinstance(cell, Share)]
    parts = [(_percent(share), _colour(share)) for share in shares if share > 0]
    return f'<div style="max-width:36em;margin:2px 0">{_track(parts, 100)}</div>'


def _colour(share: Share) -> str:
    return _COLOURS[share.place % len(_COLOURS)]


def _share(share: Share) -> str:
    """A cell that is filled in proportion to a share, in the colour of the share in the bar of the whole."""
    width = f"width:{_percent(share):.1f}%;min-width:{1 if share > 0 else 0}px"
    box = f"{width};height:10px;margin-top:5px;background:{_colour(share)}"
    return _cell(f'<div style="{box}"></div>', "min-width:140px")


def _gauge(gauge: Gauge) -> str:
    ends = [*(bar.size for bar in gauge.bars), *(bar.high or 0 for bar in gauge.bars), gauge.limit or 0]
    whole = max((end for end in ends if math.isfinite(end)), default=0) or 1
    rows = "".join(
        _row(
            (
                _cell(escaped(bar.label), _LABEL),
                _cell(_bar(bar, gauge.limit, whole), "min-width:180px;width:36em;padding-top:5px"),
                _cell(escaped(bar.text), "white-space:nowrap", _NUMBERS),
            )
        )
        for bar in gauge.bars
    )
    return f"{_TABLE}{rows}</table>"


def _bar(bar: Bar, limit: float | None, whole: float) -> str:
    """A bar on its track, paler to the end of its interval, red beyond the limit, where the track ends."""
    end = whole if limit is None else limit
    colour = _TONES[bar.tone]
    likely, most = min(bar.size, end), min(max(bar.high or 0, bar.size), end)
    parts = [
        (_percent(likely / whole), colour),
        (_percent((most - likely) / whole), f"{colour}66"),
    ]
    over, over_most = max(bar.size - end, 0), max((bar.high or 0) - end, bar.size - end, 0)
    parts += [
        (_percent(over / whole), _OVER),
        (_percent((over_most - over) / whole), f"{_OVER}66"),
    ]
    return _track([part for part in parts if part[0] > 0], _percent(end / whole))


def _track(parts: list[tuple[float, str]], end: float) -> str:
    """Coloured parts beside one another, then the track as far as `end`, all in percent."""
    filled = sum(width for width, _ in parts)
    shown = [*parts, (max(end - filled, 0), _TRACK)]
    boxes = "".join(
        f'<div style="width:{width:.1f}%;min-width:{0 if colour == _TRACK else 2}px;background:{colour}"></div>'
        for width, colour in shown
    )
    return f'<div style="display:flex;height:11px;border-radius:2px;overflow:hidden">{boxes}</div>'


def _percent(share: float) -> float:
    """A share in percent, from 0 to 100; 0 if it is not a number."""
    return 100 * min(max(share, 0.0), 1.0) if math.isfinite(share) else 0.0
