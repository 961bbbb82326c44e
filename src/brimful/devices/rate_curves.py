"""Measured time by amount of work, for one kind of work on one device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Seconds of one op by its amount of work, launch included; more work never takes less time."""

    kind: str
    """What work it is, such as "elementwise" or "matmul:float32"; `cost.kinds` says which op is of which."""
    points: tuple[tuple[float, float], ...]
    """(amount, seconds), both positive, amounts ascending, at least one; amounts are bytes or FLOPs by kind."""

    def __post_init__(self) -> None:
        amounts, seconds = [amount for amount, _ in self.points], [taken for _, taken in self.points]
        if not self.points or min(*amounts, *seconds) <= 0 or not all(map(math.isfinite, amounts + seconds)):
            raise ValueError(f"the points of the curve {self.kind!r} must be positive: {self.points}")
        if amounts != sorted(set(amounts)) or seconds != sorted(seconds):
            raise ValueError(f"the points of the curve {self.kind!r} must ascend: {self.points}")

    @classmethod
    def through(
        cls, kind: str, measured: Iterable[tuple[float, float]], *, is_arithmetic: bool = False
    ) -> RateCurve:
        """The curve through measured points.

        Other work on the machine only ever adds time. So where a smaller amount took longer than a larger one,
        the larger one's time stands for both. Arithmetic could also be done in parts: it takes no longer than
        as many smaller amounts. (Of memory traffic that is not so, as a larger amount may leave the cache.)

        Args:
            kind: What work it is.
            measured: (amount, seconds) in any order; amounts differ.
            is_arithmetic: Whether the amounts are FLOPs.

        Returns:
            A curve that never falls.
        """
        ascending = sorted(measured)
        if is_arithmetic:
            slowness = math.inf
            for index, (amount, seconds) in enumerate(ascending):
                slowness = min(slowness, seconds / amount)
                ascending[index] = (amount, slowness * amount)
        least = math.inf
        points = []
        for amount, seconds in reversed(ascending):
            least = min(least, seconds)
            points.append((float(amount), least))
        return cls(kind=kind, points=tuple(reversed(points)))

    def seconds_at(self, amount: float) -> float:
        """Seconds that an amount of work takes.

        Between two points seconds are a power of the amount: both logarithms are interpolated. Below the first
        point its time stands, which is mostly the launch; beyond the last one its rate.

        Args:
            amount: In the kind's unit.

        Returns:
            Seconds, more than 0.
        """
        position = bisect_left(self.points, (amount, 0.0))
        if position == 0:
            return self.points[0][1]
        (low, low_seconds) = self.points[position - 1]
        if position == len(self.points):
            return low_seconds * amount / low
        (high, high_seconds) = self.points[position]
        share = math.log(amount / low) / math.log(high / low)
        return low_seconds * math.pow(high_seconds / low_seconds, share)
