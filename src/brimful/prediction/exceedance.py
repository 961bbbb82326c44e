"""A predicted peak and a limit → the probability that the measured peak exceeds it.

The distribution is that of past predictions, `data/peak_excess.csv`: how far measured peaks exceeded what was
predicted. On a GPU the excess is relative to the distance from the prediction to the upper end of its interval,
on a CPU to the prediction. Above the largest excess of the table an exponential tail with the mean of the
excesses beyond it continues (peaks over threshold).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from brimful.devices.data_rows import read_rows
from brimful.prediction.estimate import DevicePeak

DEFAULT_PROBABILITY = 0.01
"""Probability of exceeding the budget that a plan may have, unless asked otherwise. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessDistribution:
    """The probability of an excess above a value."""

    points: tuple[tuple[float, float], ...]
    """Excesses from 0 up, each with the fraction of cases above it."""
    tail_mean: float
    """Mean of the excesses beyond the last point, less that point."""
    cases: int

    def above(self, excess: float) -> float:
        """The probability of more than an excess; below 0 it rises to 1 as the tail falls above."""
        first = self.points[0][1]
        if excess < 0:
            return 1 - (1 - first) * math.exp(excess / self.tail_mean)
        for (low, at_low), (high, at_high) in pairwise(self.points):
            if excess <= high:
                return at_low + (at_high - at_low) * (excess - low) / (high - low)
        last, at_last = self.points[-1]
        return at_last * math.exp((last - excess) / self.tail_mean)

    def exceeded_with(self, probability: float) -> float:
        """The least excess, at least 0, that is exceeded with at most a probability."""
        if probability >= self.points[0][1]:
            return 0.0
        for (low, at_low), (high, at_high) in pairwise(self.points):
            if probability >= at_high:
                return low + (high - low) * (at_low - probability) / (at_low - at_high)
        last, at_last = self.points[-1]
        return last + self.tail_mean * math.log(at_last / probability)


def exceedance_probability(peak: DevicePeak, kind: Literal["cuda", "cpu"], limit_bytes: int) -> float:
    """The probability that the peak of a step on its device exceeds a limit, CUDA context included."""
    distribution, scale_bytes = _of(peak, kind)
    over_bytes = limit_bytes - peak.likely_bytes
    return distribution.above(over_bytes / scale_bytes)


def bytes_at_probability(peak: DevicePeak, kind: Literal["cuda", "cpu"], probability: float) -> int:
    """The least limit, CUDA context included, that a step exceeds with at most a probability above 0."""
    distribution, scale_bytes = _of(peak, kind)
    excess_bytes = math.ceil(distribution.exceeded_with(probability) * scale_bytes)
    return peak.likely_bytes + excess_bytes


def _of(peak: DevicePeak, kind: Literal["cuda", "cpu"]) -> tuple[ExcessDistribution, int]:
    """The distribution of a predicted peak's excess, and the bytes of an excess of 1."""
    if kind == "cuda":
        return excess_distribution("cuda"), max(peak.most_bytes - peak.likely_bytes, 1)
    return excess_distribution("cpu uncertain" if peak.is_uncertain else "cpu"), max(peak.likely_bytes, 1)


@cache
def excess_distribution(kind: str) -> ExcessDistribution:
    """The distribution of a kind of prediction: "cuda", "cpu", or "cpu uncertain" where ops are uncertain."""
    rows = [cells for cells in read_rows("peak_excess.csv") if cells["kind"] == kind]
    return ExcessDistribution(
        points=tuple((float(cells["excess"]), float(cells["probability"])) for cells in rows),
        tail_mean=float(rows[0]["tail_mean"]),
        cases=int(rows[0]["cases"]),
    )
