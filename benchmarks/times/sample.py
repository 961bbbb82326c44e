"""The rows of a file of measurements, of all models or of a sample of them."""

from __future__ import annotations

import csv
import random
from pathlib import Path


def rows_of(path: Path, models: int | None = None, **only: str) -> list[dict[str, str]]:
    """All rows of some models.

    Args:
        path: A CSV file with a column `model`.
        models: This many, drawn at random, the same ones each time; None takes all.
        only: Columns, and the value that they have in each row.
    """
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in only.items())]
    names = sorted({row["model"] for row in rows})
    if models is not None:
        names = sorted(random.Random(0).sample(names, min(models, len(names))))
    chosen = set(names)
    return [row for row in rows if row["model"] in chosen]
