"""Rows with labels: which can be used, and the classes that they name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from brimful.errors import UsageError
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.rows import Row

_NUMBER = re.compile(r"-?[0-9]+")

LabelsOf = Callable[[Row], Sequence[str]]
"""The labels of a row."""


def good_rows(
    rows: Iterable[Row | BadSample], path: Path, asked: BadSamples, *, labels_of: LabelsOf | None = None
) -> list[Row]:
    """The rows of a file that can be used, at least one; lists the others, and refuses or skips them.

    With `labels_of`, rows with a label NaN are bad too, as pandas and NumPy write a missing label. Raises
    `UsageError` if there are no rows, and `DataError` if bad rows are refused.
    """
    every = [row if labels_of is None else _with_labels(row, labels_of) for row in rows]
    check_bad_samples((row for row in every if isinstance(row, BadSample)), of=len(every), asked=asked)
    good = [row for row in every if isinstance(row, Row)]
    if not good:
        raise UsageError(f"{path} has no rows.")
    return good


def class_names(labels: Iterable[str], file: Path | str) -> tuple[str, ...]:
    """The different labels as names of classes, in numeric order if all are numbers.

    Raises `UsageError` if there are fewer than two; the message names `file`.
    """
    names = set(labels)
    if len(names) < 2:
        found = f"labels of one class only, {min(names)!r}" if names else "no labels"
        raise UsageError(
            f"{file} has {found}; at least 2 classes are needed. Check the column (--label-column, "
            "--tags-column). A single label that some texts lack makes two classes without --multi-label: give "
            "those texts a label too."
        )
    are_numbers = all(_NUMBER.fullmatch(name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))


def rows_of_known_classes(
    rows: Sequence[Row], classes: Sequence[str], asked: BadSamples, *, labels_of: LabelsOf
) -> list[Row]:
    """The validation rows whose classes the training data have; refuses or skips the others.

    Raises `DataError` if they are refused.
    """
    unknown = {row.where: sorted(set(labels_of(row)) - set(classes)) for row in rows}
    bad = (
        BadSample(where=where, why=f"class {names[0]!r} is not in the training data")
        for where, names in unknown.items()
        if names
    )
    check_bad_samples(bad, of=len(rows), asked=asked)
    return [row for row in rows if not unknown[row.where]]


def contents(rows: Iterable[Row]) -> Iterator[str]:
    """Texts that identify the data in rows, for a digest."""
    for row in rows:
        yield from row.values
        for several in row.lists:
            yield str(len(several))
            yield from several


def _with_labels(row: Row | BadSample, labels_of: LabelsOf) -> Row | BadSample:
    if isinstance(row, BadSample) or all(label.lower() != "nan" for label in labels_of(row)):
        return row
    return BadSample(where=row.where, why="the label is NaN; rename the class if it is one")
