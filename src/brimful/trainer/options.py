"""What a user says of a run, in records that nothing changes any more."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brimful.job import Data, Job
from brimful.planner import Plan
from brimful.settings import Settings
from brimful.trainer.step.schedules import MakeSchedule, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a run goes on."""

    epochs: int | None
    """Most passes over the training data."""
    steps: int | None
    """Most optimizer steps."""
    patience: int | None
    """Most validations in a row without a lower loss."""

    def total_steps(self, steps_per_epoch: int | None) -> int | None:
        """Steps of the whole run.

        Args:
            steps_per_epoch: None if the data do not say; then the epochs may end the run before its last step.

        Returns:
            None if neither the data nor the user say.
        """
        if self.epochs is None or steps_per_epoch is None:
            return self.steps
        by_epochs = self.epochs * steps_per_epoch
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def has_enough(self, steps: int) -> bool:
        """Whether as many steps are taken as were asked for."""
        return self.steps is not None and steps >= self.steps

    def is_past(self, epoch: int) -> bool:
        """Whether an epoch, from 1, is one too many."""
        return self.epochs is not None and epoch > self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where a run is saved, and how often."""

    run_dir: Path | None
    """None writes nothing."""
    resumes: bool
    every: int | None
    """Steps, beside the end of each epoch and of the run."""
    keep: int
    """Saves, the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updating:
    """What is made of the gradients, beside what the job's optimizer does."""

    max_gradient_norm: float | None
    schedule: Schedule | MakeSchedule | None
    ema_decay: float | None
    corrects_batch_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything that is said of a run before it begins."""

    job: Job
    about: Any
    """What the job says about itself, as it is in a file."""
    plan: Plan | None
    settings: Settings
    """The plan's, or those given without one."""
    data: Data | None
    """None means the job's own."""
    seed: int
    device: torch.device
    """This rank's."""
    length: Length
    saving: Saving
    updating: Updating
    certifies: bool
    shows_progress: bool
    """On this rank."""

    @property
    def loss_unit(self) -> str | None:
        """What the job counts, for a reader; None if it counts nothing."""
        return None if self.job.count is None else self.job.counted
