"""Samples that cannot be used: they are listed by name, then refused or skipped, as the user chooses."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from brimful.errors import DataError, UnknownNameError

_MOST_NAMED = 20


class BadSamples(StrEnum):
    """How to handle samples that cannot be used."""

    REFUSE = "refuse"
    SKIP = "skip"

    @classmethod
    def parse(cls, text: str) -> BadSamples:
        """The member named `text`; raises `UnknownNameError` if there is none."""
        if text not in tuple(cls):
            raise UnknownNameError("way with bad samples", text, tuple(cls))
        return cls(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSample:
    """A sample that cannot be used."""

    where: str
    """A file, or a file and a line."""
    why: str


def check_bad_samples(bad: Iterable[BadSample], of: int, asked: BadSamples) -> None:
    """List samples that cannot be used, and refuse them, or skip them with a warning.

    Raises `DataError` if they are refused, or if none of the `of` samples can be used.
    """
    found = list(bad)
    if not found:
        return
    listed = "\n".join(_lines(found))
    if asked is BadSamples.SKIP and len(found) < of:
        warnings.warn(f"{len(found)} of {of} samples cannot be used and are skipped:\n{listed}", stacklevel=3)
        return
    way_out = (
        "None is left to train on."
        if asked is BadSamples.SKIP
        else 'Mend or remove them; or leave them out: bad_samples="skip", --bad-samples skip.'
    )
    raise DataError(f"{len(found)} of {of} samples cannot be used:\n{listed}\n{way_out}")


def _lines(bad: Sequence[BadSample]) -> list[str]:
    lines = [f"  {sample.where}: {sample.why}" for sample in bad[:_MOST_NAMED]]
    more = len(bad) - _MOST_NAMED
    return lines if more <= 0 else [*lines, f"  … and {more} more"]
