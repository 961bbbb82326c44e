"""A page as one HTML file that needs nothing else.

Styles, scripts and uPlot, the library that draws the charts, are in the file, and its Content-Security-Policy
permits no request, no other script and no other style sheet; a live page may ask for itself. Every text is
escaped in elements; what the scripts draw is JSON in which "<" is escaped, and they set text, never HTML. A
live page takes over elements of its next version, which no script of that version enters.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from brimful.report.html import escaped, parts_html
from brimful.report.layout import Part
from brimful.report.page.charts import Chart
from brimful.utils.quantities import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A module of the tree of modules, with those inside it."""

    name: str
    class_name: str
    held_bytes: int
    seconds: float | None
    """None if not known."""
    share: float
    """Part of the peak, from 0 to 1."""
    branches: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The modules of a model."""

    root: Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBox:
    """A unit of the model, and what a plan does with it."""

    name: str
    action: str
    """"kept", "recomputed", "nested" or "offloaded", and how far."""
    kind: str
    """Class of the box: "kept", "recomputed" or "offloaded"."""


@dataclass(frozen=True, slots=True)
class Model:
    """The units of a model in the order in which they run."""

    units: tuple[UnitBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page with a heading."""

    title: str
    content: tuple[Part | Chart | Tree | Model, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A result for a reader with a browser."""

    title: str
    sections: tuple[Section, ...]


def page_html(page: Page, *, is_live: bool = False) -> str:
    """A page as an HTML document; a live one asks for itself again and again, and shows what changed."""
    charts: list[Chart] = []
    sections = "".join(_section(section, charts) for section in page.sections)
    data = json.dumps([chart.drawn() for chart in charts], separators=(",", ":")).replace("<", "\\u003c")
    scripts = "".join(f"<script>{_asset(*name)}</script>" for name in _SCRIPTS) if charts or is_live else ""
    styles = "".join(f"<style>{_asset(*name)}</style>" for name in _STYLES)
    title = escaped(page.title)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(is_live=is_live)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>{styles}</head><body>{_LIVE if is_live else ''}<main><h1>{title}</h1>"
        f'{sections}</main><script type="application/json" id="charts">{data}</script>{scripts}</body></html>\n'
    )


_SCRIPTS = (("uplot", "uPlot.iife.min.js"), ("page.js",))
_STYLES = (("uplot", "uPlot.min.css"), ("page.css",))
_LIVE = (
    '<header class="live"><span role="status">Live</span> <span></span> '
    '<button type="button">Pause</button></header>'
)
"""Whether the page still follows its run, since when, and what stops it."""


@cache
def security_policy(*, is_live: bool) -> str:
    """The Content-Security-Policy of a page: its own scripts and styles; a live page's requests for itself."""
    scripts, styles = (" ".join(map(_digest, names)) for names in (_SCRIPTS, _STYLES))
    requests = "; connect-src 'self'" if is_live else ""
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; style-src-attr 'unsafe-inline'"
        f"{requests}; base-uri 'none'; form-action 'none'"
    )


def _digest(name: tuple[str, ...]) -> str:
    digest = hashlib.sha256(_asset(*name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(*name: str) -> str:
    text = resources.files("brimful.report.page").joinpath(*name).read_text(encoding="utf-8")
    assert "</s" not in text.lower(), f"{name} would end its own element"
    return text


def _section(section: Section, charts: list[Chart]) -> str:
    shown = []
    plain: list[Part] = []
    for each in section.content:
        if not isinstance(each, Chart | Tree | Model):
            plain.append(each)
            continue
        shown.append(_scrolled(parts_html(tuple(plain))))
        plain.clear()
        if isinstance(each, Chart):
            shown.append(_chart(each, len(charts)))
            charts.append(each)
        else:
            shown.append(_tree(each) if isinstance(each, Tree) else _model(each))
    shown.append(_scrolled(parts_html(tuple(plain))))
    return f"<section><h2>{escaped(section.title)}</h2>{''.join(shown)}</section>"


def _scrolled(content: str) -> str:
    return f'<div class="facts">{content}</div>' if content else ""


def _chart(chart: Chart, number: int) -> str:
    rows = "".join(_row(cells, "td") for cells in chart.rows)
    title, summary = escaped(chart.title), escaped(chart.summary)
    return (
        f'<figure data-chart="{number}"><figcaption><h3>{title}</h3><p>{summary}</p></figcaption>'
        f"{_legend(chart)}"
        f'<div class="plot" role="img" tabindex="0" aria-label="Chart: {title}. {summary}. '
        'The arrow keys read its points."></div>'
        f'<div class="readout{" detailed" if chart.details else ""}" role="status"></div>'
        f"<details><summary>{title} as a table</summary>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title} as a table"><table><thead>'
        f"{_row(chart.heading, 'th')}</thead><tbody>{rows}</tbody></table></div></details></figure>"
    )


def _legend(chart: Chart) -> str:
    colours = zip(chart.colours, chart.series, strict=True)
    items = (f'<li><span class="swatch c{at % 7}"></span>{escaped(each.label)}</li>' for at, each in colours)
    return f'<ul class="legend">{"".join(items)}</ul>' if len(chart.series) > 1 else ""


def _row(cells: tuple[str, ...], tag: str) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    return f"<tr>{''.join(f'<{tag}{scope}>{escaped(cell)}</{tag}>' for cell in cells)}</tr>"


def _tree(tree: Tree) -> str:
    return f'<ul class="tree">{_branch(tree.root, is_open=True)}</ul>'


def _branch(branch: Branch, *, is_open: bool = False) -> str:
    seconds = "" if branch.seconds is None else f" · {format_seconds(branch.seconds)}"
    about = f' <span class="class">{escaped(branch.class_name)}</span>' if branch.class_name else ""
    line = (
        f'<span class="name">{escaped(branch.name)}{about}</span> '
        f'<span class="size">{format_bytes(branch.held_bytes)}{seconds}</span>'
        f'<span class="bar" style="width:{100 * branch.share:.1f}%"></span>'
    )
    if not branch.branches:
        return f'<li><div class="leaf">{line}</div></li>'
    is_only = is_open and len(branch.branches) == 1
    inside = "".join(_branch(each, is_open=is_only) for each in branch.branches)
    opened = " open" if is_open else ""
    return f"<li><details{opened}><summary>{line}</summary><ul>{inside}</ul></details></li>"


def _model(model: Model) -> str:
    boxes = (
        f'<li class="{unit.kind}"><span class="name">{escaped(unit.name)}</span> {escaped(unit.action)}</li>'
        for unit in model.units
    )
    return f'<ol class="units">{"".join(boxes)}</ol>'
