"""Learning rate schedules by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from brimful.arguments import check_fields
from brimful.errors import UnknownNameError, UsageError

MakeSchedule = Callable[[Optimizer], LRScheduler]
"""Makes a scheduler from an optimizer. It is stepped after each update, so its unit is the optimizer step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate schedule: linear warmup to the optimizer's rate, then decay to zero at the end.

    Args:
        name: The decay: "constant" (none), "linear" or "cosine" (Loshchilov & Hutter 2016, SGDR, equation 5,
            one cycle).
        warmup: Fraction of the run for the warmup (Goyal et al. 2017, section 2.2).

    Raises:
        UnknownNameError: No schedule has the name.
        UsageError: `warmup` is not at least 0 and less than 1.
    """

    name: str = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name not in _FALLS:
            raise UnknownNameError("schedule", self.name, _FALLS)
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup is {self.warmup}; it is a part of the run, at least 0 and below 1.")

    def make(self, optimizer: Optimizer, steps: int) -> LambdaLR:
        """Make a scheduler.

        Args:
            optimizer: Its learning rates are the maximum.
            steps: Optimizer steps of the whole run.

        Returns:
            A scheduler to step once per optimizer step.
        """
        return LambdaLR(optimizer, lambda step: self.factor(step, steps))

    def factor(self, step: int, steps: int) -> float:
        """The factor of the learning rate in a step.

        Args:
            step: Number of steps taken before.
            steps: Optimizer steps of the whole run.

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
"""The factor by the fraction of the decay that is done."""


def make_scheduler(
    schedule: Schedule | MakeSchedule | None, optimizer: Optimizer, total_steps: int | None
) -> LRScheduler | None:
    """Make the scheduler of a run; None without a schedule.

    `total_steps` is the length of the run in optimizer steps; None if it is not known. Raises UsageError if the
    schedule needs the number of steps, which is not known, or a metric.
    """
    if isinstance(schedule, Schedule):
        if total_steps is None:
            raise UsageError(
                f"the schedule {schedule.name!r} is over the steps of the run, and the data do not say how "
                "many batches an epoch has. Set `steps`."
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
    """The learning rate of the first group; None without one, or if reading it would synchronize with a GPU."""
    rate = optimizer.param_groups[0].get("lr")
    is_elsewhere = isinstance(rate, Tensor) and not rate.is_cpu
    return None if rate is None or is_elsewhere else float(rate)
