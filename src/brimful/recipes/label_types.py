"""Labels of one type: a row whose label is a text where others are numbers, or the reverse, is refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from brimful.recipes.bad_samples import BadSample

Records = Iterator[tuple[str, dict[str, Any] | BadSample]]
"""Pairs of where a record is, and the record or why it cannot be used."""


def of_one_type(records: Records, column: str | None) -> Records:
    """The records, with a `BadSample` in place of each whose label is of another type than most.

    As class names 1 and "1" are the same, and 3 beside "good" is a class that nobody meant. `column` is that of
    labels, or of lists of labels; None replaces nothing.
    """
    if column is None:
        yield from records
        return
    listed = list(records)
    rows = Counter(
        kind for _, record in listed if isinstance(record, dict) for kind in _kinds(record.get(column))
    )
    usual = max(rows, key=rows.__getitem__, default="")
    for where, record in listed:
        others = {} if isinstance(record, BadSample) else _kinds(record.get(column))
        others.pop(usual, None)
        for kind, label in others.items():
            why = (
                f"{column!r}: {label!r} is a {kind}, and of {rows[usual]} rows it is a {usual}; "
                "give all labels one type"
            )
            yield where, BadSample(where=where, why=why)
            break
        else:
            yield where, record


def _kinds(value: Any) -> dict[str, Any]:
    """The types of a label, or of the labels in a list, each with its first label; other values have none."""
    found: dict[str, Any] = {}
    for label in value if isinstance(value, list) else [value]:
        kind = _kind(label)
        if kind is not None:
            found.setdefault(kind, label)
    return found


def _kind(label: Any) -> str | None:
    if isinstance(label, bool):
        return "boolean"
    if isinstance(label, int | float):
        return "number" if math.isfinite(label) else None  # pandas writes a missing text as NaN
    return "text" if isinstance(label, str) else None
