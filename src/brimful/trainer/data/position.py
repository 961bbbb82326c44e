"""The position of a run in its data."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.execution.random_state import RandomState


@dataclass(slots=True, kw_only=True)
class DataPosition:
    """An epoch and the global batches of it that were trained on; it advances with each step."""

    epoch: int
    """From 1."""
    batches: int = 0
    """Those of this epoch that were trained on."""
    random: RandomState
    """As the epoch began: a DataLoader draws the order of its samples then."""

    def __str__(self) -> str:
        return f"{self.batches} batches of epoch {self.epoch}"
