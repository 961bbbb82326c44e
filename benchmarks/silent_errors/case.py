"""One program: what brimful is asked, and whether its answer is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """How a program ended, where nothing was silently wrong."""

    RIGHT = "right"
    """The figures or weights are those of the oracle."""
    REFUSED = "refused"
    """An error of brimful's says why not, and what to do."""
    STATED = "stated"
    """The difference is stated in words beside the number that it concerns."""


class WrongError(Exception):
    """The answer is wrong, and nothing says so."""


@dataclass(frozen=True, slots=True)
class Case:
    """One program of a kind, written with public names alone, so that earlier code can run it too."""

    kind: str
    """Name of the kind, such as "state written by forward"."""
    name: str
    """Unique in its kind."""
    run: Callable[[], Verdict]
    """Raises `WrongError` with the figures; anything else that it raises is a raw error."""
