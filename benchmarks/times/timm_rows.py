"""The rows of timm's files of measurements, and whether the model that is built today is the one measured."""

from __future__ import annotations

import csv
import random
from pathlib import Path

ROUNDING_MILLIONS = 0.005 + 1e-9
"""Half a unit in the last digit of `parameters_millions` in timm's files, and an allowance for float64."""


def rows_of(path: Path, models: int | None = None) -> list[dict[str, str]]:
    """All rows of some models.

    Args:
        path: A CSV file with a column `model`.
        models: This many, drawn at random, the same ones each time; None takes all.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = sorted({row["model"] for row in rows})
    if models is not None:
        names = sorted(random.Random(0).sample(names, min(models, len(names))))
    chosen = set(names)
    return [row for row in rows if row["model"] in chosen]


def differs(parameter_count: int, measured_millions: str) -> str | None:
    """Why a model is not the one that was measured, by its number of parameters.

    Args:
        parameter_count: Of the model that is built today.
        measured_millions: Of the one that was measured, in millions with two decimals.

    Returns:
        Both numbers in words; None if they are the same.
    """
    today, measured = parameter_count / 1e6, float(measured_millions)
    if abs(today - measured) <= ROUNDING_MILLIONS:
        return None
    return f"today's timm builds a model of {today:.2f}M parameters; {measured:.2f}M were measured"
