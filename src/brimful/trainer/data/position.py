"""The position of a run in its data."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.execution.random_state import RandomState


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """An epoch, and the number of its global batches that the run has trained on."""

    epoch: int
    """Number of the epoch, from 1."""
    batches: int = 0
    """Number of batches of this epoch that the run has trained on."""
    random: RandomState
    """The random state at the start of the epoch, where a DataLoader draws the order of its samples."""

    def __str__(self) -> str:
        return f"{self.batches} batches of epoch {self.epoch}"
