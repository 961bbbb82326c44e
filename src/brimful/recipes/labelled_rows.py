"""Rows with labels: which can be used, and the classes that they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from brimful.errors import UsageError
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.rows import Row

_NUMBER = re.compile(r"-?[0-9]+")


def good_rows(rows: Iterable[Row | BadSample], path: Path, asked: BadSamples) -> list[Row]:
    """The rows of a file that can be used, at least one; lists the others, and refuses or skips them.

    Raises `UsageError` if there are no rows, and `DataError` if bad rows are refused.
    """
    every = list(rows)
    check_bad_samples((row for row in every if isinstance(row, BadSample)), of=len(every), asked=asked)
    good = [row for row in every if isinstance(row, Row)]
    if not good:
        raise UsageError(f"{path} has no rows.")
    return good


def class_names(rows: Iterable[Row], file: Path | str) -> tuple[str, ...]:
    """The different labels of rows as names of classes, in numeric order if all are numbers.

    Raises `UsageError` if there are fewer than two; the message names `file`.
    """
    names = {label for row in rows for label in row.labels}
    if len(names) < 2:
        found = f"labels of one class only, {min(names)!r}" if names else "no labels"
        raise UsageError(
            f"{file} has {found}; at least 2 classes are needed. Check the column (--label-column). A single "
            "label that some texts lack makes two classes without --multi-label: give those texts a label too."
        )
    are_numbers = all(_NUMBER.fullmatch(name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))


def rows_of_known_classes(rows: Sequence[Row], classes: Sequence[str], asked: BadSamples) -> list[Row]:
    """The validation rows whose classes the training data have; refuses or skips the others.

    Raises `DataError` if they are refused.
    """
    unknown = {row.where: sorted(set(row.labels) - set(classes)) for row in rows}
    bad = (
        BadSample(where=where, why=f"class {names[0]!r} is not in the training data")
        for where, names in unknown.items()
        if names
    )
    check_bad_samples(bad, of=len(rows), asked=asked)
    return [row for row in rows if not unknown[row.where]]


def contents(rows: Iterable[Row], *, multi_label: bool) -> Iterator[str]:
    """Texts that identify the data in rows, for a digest; a single label is among the values of its row."""
    for row in rows:
        yield from row.values
        if multi_label:
            yield str(len(row.labels))
            yield from row.labels
