"""The options of a training run, and its configuration: options, job, plan and device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch

from brimful.arguments import check_fields
from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.options import LARGEST_SEED, LoopOptions
from brimful.planner import Plan
from brimful.settings import Settings
from brimful.trainer.monitor.callbacks import Callback, check_callbacks
from brimful.trainer.step.schedules import MakeSchedule, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions(LoopOptions):
    """The options of a training run; `Trainer` and `fit` take each of them by keyword.

    Raises:
        UsageError: An option is out of range, or needs another one.
    """

    data: Data | None = None
    """What to train on. Default: the job's own."""
    run_dir: Path | str | None = None
    """A new or empty directory for weights, records and checkpoints. Default: nothing is written."""
    resume: bool = False
    """Resume from the newest complete checkpoint in `run_dir`, exactly where it was saved; start if there is
    none yet, so that a scheduler can give the same command each time. Weights without checkpoints are refused,
    not deleted."""
    device: torch.device | str | None = None
    """A torch device. Default: the GPU if there is one, unless the plan is for a CPU."""
    schedule: Schedule | MakeSchedule | None = None
    """A learning rate `Schedule` over the steps of the run, whose number the data or `steps` must give; or a
    function that makes a scheduler from the optimizer. It is stepped once per optimizer step, but not when fp16
    gradients overflowed and the step was skipped."""
    callbacks: Iterable[Callback] = ()
    """Called after each step, epoch and validation, and at the end."""
    verify: bool = True
    """Before the first step, compare loss, gradients and buffers of a few samples under the plan with those of
    the baseline, if the plan recomputes or splits anything, or has a memory format."""
    show_progress: bool = True
    """Show progress on standard error."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.seed <= LARGEST_SEED:
            least = self.seed < 0
            raise UsageError(
                f"seed is {self.seed}; it must be at {'least 0' if least else f'most {LARGEST_SEED}'}."
            )
        for name, is_asked in (("resume", self.resume), ("save_every", self.save_every is not None)):
            if is_asked and self.run_dir is None:
                raise UsageError(f"{name} needs a run_dir: checkpoints are written there.")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise UsageError(f"max_gradient_norm is {self.max_gradient_norm}; it must be positive.")
        decay = self.ema_decay
        if decay is not None and not 0 <= decay < 1:
            raise UsageError(f"ema_decay is {decay!r}; it must be at least 0 and less than 1, such as 0.999.")
        object.__setattr__(self, "callbacks", check_callbacks(self.callbacks))

    @property
    def last_epoch(self) -> int | None:
        """Number of the last epoch: 1 unless epochs or steps are given; None without a limit."""
        return 1 if self.epochs is None and self.steps is None else self.epochs

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Optimizer steps of the whole run; None if neither the data nor the options have them.

        If `steps_per_epoch` is None, as the data do not report it, the run may end with its epochs, before this
        number of steps.
        """
        if self.last_epoch is None or steps_per_epoch is None:
            return self.steps
        return self.at_most_steps(self.last_epoch * steps_per_epoch)

    def at_most_steps(self, steps: int) -> int:
        """A number of steps, or the requested one if that is smaller."""
        return steps if self.steps is None else min(steps, self.steps)

    def has_enough(self, steps: int) -> bool:
        """Whether the requested number of steps is taken."""
        return self.steps is not None and steps >= self.steps

    def is_out_of_patience(self, validations_without_improvement: int) -> bool:
        """Whether early stopping ends the run."""
        return self.patience is not None and validations_without_improvement >= self.patience

    def is_past(self, epoch: int) -> bool:
        """Whether an epoch, counted from 1, comes after the last."""
        return self.last_epoch is not None and epoch > self.last_epoch


class TrainKeywords(TypedDict, total=False):
    """The options of `Trainer` and `fit`, for type checkers."""

    epochs: int | None
    steps: int | None
    seed: int
    max_gradient_norm: float | None
    ema_decay: float | None
    correct_batch_norm: bool
    patience: int | None
    validate_every: int | None
    save_every: int | None
    keep_saves: int
    data: Data | None
    run_dir: Path | str | None
    resume: bool
    device: torch.device | str | None
    schedule: Schedule | MakeSchedule | None
    callbacks: Iterable[Callback]
    verify: bool
    show_progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The configuration of a run."""

    job: Job
    about: Any
    """`Job.about` as it is when read back from JSON."""
    plan: Plan | None
    settings: Settings
    """The settings of the plan, or those given without a plan."""
    device: torch.device
    """The device of this rank."""
    options: TrainOptions
    shows_progress: bool
    """Whether this rank shows progress."""

    @property
    def run_dir(self) -> Path | None:
        """The run directory; None writes nothing."""
        return None if self.options.run_dir is None else Path(self.options.run_dir)

    @property
    def schedule_name(self) -> str | None:
        """The `Schedule` as text; None without one, and for a scheduler made by a function."""
        schedule = self.options.schedule
        return str(schedule) if isinstance(schedule, Schedule) else None

    @property
    def loss_unit(self) -> str | None:
        """The unit that the job counts, as text; None if it counts nothing."""
        return None if self.job.count is None else self.job.counted
