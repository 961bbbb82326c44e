"""Rows of the tables in `data/`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from importlib import resources


def read_rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table, each as a dict of cells by column."""
    text = resources.files("brimful").joinpath("data", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


def listed(cell: str) -> tuple[str, ...]:
    """The entries of a cell, separated by semicolons."""
    aliases: Iterable[str] = (alias.strip() for alias in cell.split(";"))
    return tuple(alias for alias in aliases if alias)
