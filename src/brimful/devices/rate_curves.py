"""Measured time by amount of work, for one kind of work on one device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """Time of one op by its amount of work, including the launch; more work never takes less time."""

    kind: str
    """Kind of work, such as "elementwise" or "matmul:float32"; `cost.kinds` maps ops to kinds."""
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

        Other work on the machine can only add time. So if a smaller amount took longer than a larger one, the
        larger one's time is used for both. Arithmetic can also be split: it takes no longer than the sum of its
        parts. (This does not hold for memory traffic, because a larger amount may not fit the cache.)

        Args:
            kind: Kind of work.
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
        """Time of an amount of work, in seconds.

        Between two points, time is a power of the amount: both logarithms are interpolated linearly. Below the
        first point, its time is used, which is mostly the launch; beyond the last one, its rate.

        Args:
            amount: Amount in the unit of the kind.

        Returns:
            Seconds, greater than 0.
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
