"""Where in its data a run is."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.execution.random_state import RandomState


@dataclass(slots=True, kw_only=True)
class Place:
    """So many global batches into an epoch; it moves on with each step."""

    epoch: int
    """From 1."""
    batches: int = 0
    """Those of this epoch that were trained on."""
    random: RandomState
    """As the epoch began: a DataLoader draws the order of its samples then."""

    def __str__(self) -> str:
        return f"{self.batches} batches of epoch {self.epoch}"
