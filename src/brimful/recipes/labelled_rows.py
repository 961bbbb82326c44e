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
    """The rows that can be used; list the others, and refuse or skip them.

    Args:
        rows: All rows of a file.
        path: The file.
        asked: Whether to refuse or to skip bad rows.
        labels_of: Rows with a label NaN, as pandas and NumPy write a missing one, are bad.

    Returns:
        Good rows, at least one.

    Raises:
        UsageError: There are none.
        DataError: Rows are bad, and they are refused.
    """
    every = [row if labels_of is None else _with_labels(row, labels_of) for row in rows]
    check_bad_samples((row for row in every if isinstance(row, BadSample)), of=len(every), asked=asked)
    good = [row for row in every if isinstance(row, Row)]
    if not good:
        raise UsageError(f"{path} has no rows.")
    return good


def class_names(labels: Iterable[str], file: Path | str) -> tuple[str, ...]:
    """Names of the classes, in numeric order if all are numbers.

    Args:
        labels: The labels of all rows.
        file: Where they are from.

    Returns:
        The names.

    Raises:
        UsageError: There are fewer than two.
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
    """The validation rows; refuse or skip those with a class that the training data lack.

    Args:
        rows: The rows.
        classes: Classes of the training data.
        asked: Whether to refuse or to skip them.
        labels_of: The labels of a row.

    Returns:
        Rows whose labels are all known.

    Raises:
        DataError: There are others, and they are refused.
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
    """Everything in rows that identifies the data, for a digest.

    Args:
        rows: The rows.

    Yields:
        Texts.
    """
    for row in rows:
        yield from row.values
        for several in row.lists:
            yield str(len(several))
            yield from several


def _with_labels(row: Row | BadSample, labels_of: LabelsOf) -> Row | BadSample:
    if isinstance(row, BadSample) or all(label.lower() != "nan" for label in labels_of(row)):
        return row
    return BadSample(where=row.where, why="the label is NaN; rename the class if it is one")
