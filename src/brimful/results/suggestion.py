"""A change that would help and is not made unasked: what it gains, what it changes, how to ask for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from brimful.codec import PositiveFloat, PositiveInt
from brimful.settings import Settings

Probability = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change of what is computed, which is made only if it is asked for, and what it would gain."""

    change: str
    """Name of the change: "bf16 autocast"."""
    effect: str
    """What it changes in the computation."""
    option: str
    """What asks for it in Python: 'precision="bf16"'."""
    flag: str
    """What asks for it on the command line: "--precision bf16"."""
    settings: Settings
    """The settings that are predicted; a plan with the change may find faster ones."""
    predicted_peak_device_bytes: PositiveInt
    predicted_exceedance_probability: Probability
    """Probability that the peak exceeds the budget, or without one what the device has."""
    predicted_step_seconds: PositiveFloat
    predicted_difference_interval_seconds: tuple[float, float] | None = None
    """Interval of its step time − the plan's, which covers the measured difference with 90 % probability; None
    where there is no plan."""
    uncertain: tuple[str, ...] = ()
    """What is uncertain about its prediction."""
