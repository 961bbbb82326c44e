"""Charts of a page: what they show, for the script that draws them and as the table behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from brimful.utils.quantities import format_bytes, format_rate, format_seconds

POINTS = 400
"""The most points of a curve; longer ones are thinned. A choice."""


class Unit(StrEnum):
    """Unit of an axis; the script formats by the same names."""

    BYTES = "bytes"
    SECONDS = "seconds"
    RATE = "rate"
    """Samples per second."""
    NUMBER = "number"
    COUNT = "count"


_FORMATS: dict[Unit, Callable[[float], str]] = {
    Unit.BYTES: lambda value: format_bytes(round(value)),
    Unit.SECONDS: format_seconds,
    Unit.RATE: format_rate,
    Unit.NUMBER: lambda value: f"{value:.4g}",
    Unit.COUNT: lambda value: f"{value:.0f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity of a chart at each of its points."""

    label: str
    values: tuple[float | None, ...]
    """None where it is not known."""
    colour: int | None = None
    """Number of its colour; None for its place among the series."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Quantities over another one."""

    title: str
    summary: str
    """What it shows, with the numbers that matter, for who does not see it."""
    x_label: str
    x: tuple[float, ...]
    x_unit: Unit = Unit.COUNT
    unit: Unit
    series: tuple[Series, ...]
    is_stacked: bool = False
    """Whether the series are parts of a whole, the first at the bottom."""
    mark: int | None = None
    """A point to mark."""
    limit: float | None = None
    """A value to draw as a line, such as the budget, unless it is far above."""
    limit_label: str = ""
    """What it is."""
    x_is_log: bool = False
    """Whether x is drawn on a logarithmic axis."""
    bands: tuple[tuple[int, str, str], ...] = ()
    """Where along x a part begins, by its point, the part's name and a short one for where that is too wide."""
    details: tuple[str, ...] = ()
    """Lines on each point; empty for none."""

    @property
    def colours(self) -> tuple[int, ...]:
        """Numbers of the colours of the series."""
        return tuple(at if each.colour is None else each.colour for at, each in enumerate(self.series))

    def drawn(self) -> dict[str, Any]:
        """What the script draws, as JSON can hold it."""
        series = [
            {"label": each.label, "values": list(map(_finite, each.values)), "colour": colour}
            for each, colour in zip(self.series, self.colours, strict=True)
        ]
        return {
            "x": list(self.x),
            "xUnit": self.x_unit,
            "xLabel": self.x_label,
            "unit": self.unit,
            "series": series,
            "stacked": self.is_stacked,
            "mark": self.mark,
            "limit": self.limit,
            "limitLabel": self.limit_label,
            "xLog": self.x_is_log,
            "bands": [list(band) for band in self.bands],
            "details": list(self.details),
        }

    @property
    def heading(self) -> tuple[str, ...]:
        """Heads of the columns of the table."""
        details = ("what",) if self.details else ()
        return (self.x_label, *(each.label for each in self.series), *details)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table, one for each point."""
        rows = []
        for point, x in enumerate(self.x):
            values = (each.values[point] for each in self.series)
            details = (self.details[point],) if self.details else ()
            shown = (_shown(self.unit, value) for value in values)
            rows.append((_shown(self.x_unit, x), *shown, *details))
        return rows


def curve(
    title: str,
    x_label: str,
    x: Sequence[float],
    unit: Unit,
    values: Mapping[str, Sequence[float | None]],
    *,
    of_peak: bool = False,
) -> Chart:
    """Curves over steps; where there are too many, each point is the mean of some that follow one another.

    With `of_peak` it is the highest of them, and the highest of all is marked.
    """
    size = -(-len(x) // POINTS) or 1
    kind, joined = ("highest", _highest) if of_peak else ("mean", _mean)
    thinned = {label: [joined(part) for part in _parts(each, size)] for label, each in values.items()}
    ends = [
        f"{label} {_shown(unit, known[0])} at first, {_shown(unit, known[-1])} at last"
        for label, each in thinned.items()
        if (known := [value for value in each if _finite(value) is not None])
    ]
    means = f"; each point is the {kind} of {size} {x_label}s" if size > 1 else ""
    mark = None
    if of_peak:
        (heights,) = ([value or 0.0 for value in each] for each in thinned.values())
        mark = max(range(len(heights)), key=heights.__getitem__)
        ends.insert(0, f"peak {_shown(unit, heights[mark])}, marked")
    return Chart(
        title=title,
        summary="; ".join(ends) + means,
        x_label=x_label,
        x=tuple(part[0] for part in _parts(x, size)),
        unit=unit,
        series=tuple(Series(label=label, values=tuple(each)) for label, each in thinned.items()),
        mark=mark,
    )


def _parts(values: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shown(unit: Unit, value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else _FORMATS[unit](value)
