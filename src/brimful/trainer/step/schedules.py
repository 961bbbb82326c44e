"""Learning rates over a run, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from brimful.errors import UnknownNameError, UsageError

MakeSchedule = Callable[[Optimizer], LRScheduler]
"""Makes the learning rate's schedule; it is stepped after each update, so its unit is the optimizer step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate that rises to what the optimizer has, then falls to nothing at the end of the run.

    Args:
        name: "constant", "linear" or "cosine" (Loshchilov & Hutter 2016, SGDR, equation 5, one cycle): how it
            falls.
        warmup: Over which part of the run it first rises, in a straight line (Goyal et al. 2017, section 2.2).

    Raises:
        UnknownNameError: No schedule has the name.
        UsageError: `warmup` is no part.
    """

    name: str = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in _FALLS:
            raise UnknownNameError("schedule", self.name, _FALLS)
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup is {self.warmup}; it is a part of the run, at least 0 and below 1.")

    def make(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """The schedule of an optimizer.

        Args:
            optimizer: Its rates are the highest.
            steps: Of the whole run.

        Returns:
            It is stepped once per optimizer step.
        """
        return LambdaLR(optimizer, lambda step: self.factor(step, steps))

    def factor(self, step: int, steps: int) -> float:
        """What the rate is multiplied by.

        Args:
            step: Taken before.
            steps: Of the whole run.

        Returns:
            From 0 to 1; above 0 in every step of the run.
        """
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1)
        return _FALLS[self.name](min((step - rising) / max(steps - rising, 1), 1.0))


_FALLS: dict[str, Callable[[float], float]] = {
    "constant": lambda _part: 1.0,
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: (1.0 + math.cos(math.pi * part)) / 2,
}
"""By which part of the way is gone."""


def make_scheduler(
    schedule: Schedule | MakeSchedule | None, optimizer: Optimizer, total_steps: int | None
) -> LRScheduler | None:
    """The schedule of an optimizer over a run.

    Args:
        schedule: What was asked for.
        optimizer: Its rates are the highest.
        total_steps: Of the whole run; None if that is not known.

    Returns:
        None leaves the rates.

    Raises:
        UsageError: It needs to know the steps, or a metric.
    """
    if isinstance(schedule, Schedule):
        if total_steps is None:
            raise UsageError(
                f"the schedule {schedule.name!r} is over the steps of the run, and the data do not say how "
                "many batches an epoch has. Say `steps`."
            )
        return schedule.make(optimizer, total_steps)
    scheduler = None if schedule is None else schedule(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau is stepped with a metric, not once per optimizer step. "
            "Step it yourself in a Callback's on_validation."
        )
    return scheduler


def learning_rate(optimizer: Optimizer) -> float | None:
    """That of an optimizer's first group; None if it has none, or a GPU has it, which one would wait for."""
    rate = optimizer.param_groups[0].get("lr")
    is_elsewhere = isinstance(rate, Tensor) and not rate.is_cpu
    return None if rate is None or is_elsewhere else float(rate)
