"""All programs, by kind."""

from __future__ import annotations

from silent_errors import (
    arguments,
    lengths,
    losses,
    predictions,
    steps,
    surroundings,
    trainers,
    words,
)
from silent_errors.case import Case

CASES: tuple[Case, ...] = (
    *arguments.CASES,
    *lengths.CASES,
    *losses.CASES,
    *predictions.CASES,
    *steps.CASES,
    *surroundings.CASES,
    *trainers.CASES,
    *words.CASES,
)
