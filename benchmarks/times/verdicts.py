"""Verdicts on whether a batch fits a GPU: what a search for the largest batch measured, and which were right.

A search tried `BATCH_SIZES` from the largest on and kept the first that ran. So a row says that its batch fits
and that the next larger one, which ran out of memory, does not.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from brimful.quantities import GIB

BATCH_SIZES = (512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Batch sizes in the order that timm's search for its file of measurements tried them."""
SCALES = (0.9, 0.95, 1.0, 1.05, 1.1)
"""Factors on predictions, to show how many verdicts depend on errors of 5 and 10 %."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch of the search."""

    batch_size: int
    fits: bool
    """Whether it ran."""


def trials_of(batch_size: int) -> tuple[Trial, ...]:
    """The trials that a row reports.

    Args:
        batch_size: The largest batch that ran.

    Returns:
        That one and the next larger one, which failed; only the first if no larger one was tried.

    Raises:
        ValueError: The search does not try this batch size.
    """
    if batch_size not in BATCH_SIZES:
        raise ValueError(f"the batch size is {batch_size}; the search tries {BATCH_SIZES}.")
    index = BATCH_SIZES.index(batch_size)
    larger = (Trial(BATCH_SIZES[index - 1], fits=False),) if index else ()
    return (Trial(batch_size, fits=True), *larger)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A trial beside its prediction."""

    model: str
    family: str
    layout: str
    trial: Trial
    predicted_bytes: int
    """Least capacity of a device for the batch."""
    capacity_bytes: int

    @property
    def is_right(self) -> bool:
        """Whether the batch is predicted to fit exactly if it did."""
        return self.is_right_if_scaled(1.0)

    def is_right_if_scaled(self, scale: float) -> bool:
        """The same with the prediction times a factor."""
        return (scale * self.predicted_bytes <= self.capacity_bytes) == self.trial.fits

    @property
    def excess_gib(self) -> float:
        """By how much the prediction exceeds the capacity; negative if it fits."""
        return (self.predicted_bytes - self.capacity_bytes) / GIB


def tally(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """How many verdicts there are and how many are right, by what was measured.

    A wrong verdict on a batch that ran is too cautious; one on a batch that failed is a promise not kept.
    """
    counts = Counter((verdict.trial.fits, verdict.is_right) for verdict in verdicts)
    right = counts[True, True] + counts[False, True]
    return {
        "verdicts": len(verdicts),
        "right": right,
        "right_fraction": round(right / len(verdicts), 4) if verdicts else None,
        "fits": counts[True, True] + counts[True, False],
        "fits_right": counts[True, True],
        "does_not_fit": counts[False, True] + counts[False, False],
        "does_not_fit_right": counts[False, True],
    }


def tally_by(verdicts: Iterable[Verdict], key: Callable[[Verdict], str]) -> dict[str, dict[str, Any]]:
    """The same for each group, those with most verdicts first."""
    groups = defaultdict(list)
    for verdict in verdicts:
        groups[key(verdict)].append(verdict)
    return {name: tally(group) for name, group in sorted(groups.items(), key=lambda each: -len(each[1]))}


def right_if_scaled(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Right verdicts if all predictions were smaller or larger by a factor."""
    return {str(scale): sum(each.is_right_if_scaled(scale) for each in verdicts) for scale in SCALES}


def wrong(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """The wrong verdicts, those furthest from the capacity first."""
    found = [verdict for verdict in verdicts if not verdict.is_right]
    return [
        {
            "model": verdict.model,
            "layout": verdict.layout,
            "batch_size": verdict.trial.batch_size,
            "measured": "fits" if verdict.trial.fits else "does not fit",
            "predicted_gib": round(verdict.predicted_bytes / GIB, 3),
            "excess_gib": round(verdict.excess_gib, 3),
        }
        for verdict in sorted(found, key=lambda verdict: -abs(verdict.excess_gib))
    ]


def medians_of_capacity(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """Median of predicted bytes as a fraction of the capacity, of batches that ran and of those that failed."""
    fractions = defaultdict(list)
    for verdict in verdicts:
        name = "fits" if verdict.trial.fits else "does_not_fit"
        fractions[name].append(verdict.predicted_bytes / verdict.capacity_bytes)
    return {name: round(statistics.median(each), 4) for name, each in fractions.items()}
