"""Names of units, with runs of siblings folded."""

from __future__ import annotations

from collections.abc import Iterable

from brimful.settings.units import Span

_LONGEST_NUMBER = 18
"""Digits of a number that is folded; Python refuses to read thousands of them. A choice."""


def folded(units: Iterable[str]) -> str:
    """Unit paths with runs of numbered siblings folded: "layer.0–5, layer.9, [0..9]–[90..99]"."""
    texts: list[str] = []
    follows: tuple[str, int] | None = None
    begin = ""
    for unit in units:
        numbers = _numbers(unit)
        if numbers is None:
            texts.append(unit or "the model itself")
            follows = None
            continue
        parent, first, last, shown = numbers
        if follows == (parent, first):
            texts[-1] = f"{begin}–{shown}"
        else:
            begin = unit
            texts.append(unit)
        follows = parent, last + 1
    return ", ".join(texts)


def _numbers(unit: str) -> tuple[str, int, int, str] | None:
    """The parent of a numbered unit, its first and last number and how they are written; None of another."""
    span = Span.parse(unit)
    parent, _, number = unit.rpartition(".")
    first, last = (number, number) if span is None else (span.first, span.last)
    if not all(each.isdecimal() and len(each) <= _LONGEST_NUMBER for each in (first, last)):
        return None
    if span is None:
        return parent, int(first), int(last), number
    return unit.partition("[")[0] + "[", int(first), int(last), f"[{first}..{last}]"
