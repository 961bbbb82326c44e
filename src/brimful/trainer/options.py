"""What is asked of a training run, declared once; and what it is asked for: a job, a plan, a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.planner import Plan
from brimful.results import LARGEST_SEED
from brimful.settings import Settings
from brimful.trainer.monitor.callbacks import Callback, check_callbacks
from brimful.trainer.step.schedules import MakeSchedule, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is asked of a training run: `Trainer` takes each of these by keyword.

    Raises:
        UsageError: An option is out of range, or needs another one.
    """

    data: Data | None = None
    """What to train on; None means the job's own."""
    run_dir: Path | str | None = None
    """A new or empty directory for weights, records and saves; None writes nothing."""
    resume: bool = False
    """Resume from the newest whole save in `run_dir`, exactly where it was made; start if there is none yet, so
    that a scheduler can give the same command each time. Nothing that was trained is deleted: weights without
    saves are refused."""
    save_every: int | None = None
    """Save every this many steps, besides the end of each epoch and of the run. A run that is killed loses the
    steps since the last save."""
    keep_saves: int = 2
    """How many saves to keep, the newest."""
    epochs: int | None = None
    """Passes over the training data; 1 if neither this nor `steps` is given."""
    steps: int | None = None
    """Maximum total optimizer steps."""
    seed: int = 0
    """From 0 to 2**64 - 1; decides weights, order of samples and dropout."""
    device: torch.device | str | None = None
    """A torch device; None means the GPU if there is one, unless the plan is for a CPU."""
    max_gradient_norm: float | None = None
    """Clip gradients to this norm; None leaves them."""
    schedule: Schedule | MakeSchedule | None = None
    """A `Schedule` over the steps of the run, which its data or `steps` must say; or what makes one from the
    optimizer. It is stepped once per optimizer step, and not when fp16 gradients overflowed and the step was
    skipped."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the parameters with this decay, such as 0.999. It is what is
    validated, and written to `average.safetensors`. It takes as much memory as the parameters, which a plan
    does not count; None keeps none."""
    correct_batch_norm: bool = False
    """Under accumulation, let running statistics go as far in a step as with one micro-batch; what they are
    over, a micro-batch, stays as it is."""
    patience: int | None = None
    """Early stopping: end after this many validations without a lower loss; None ends it at no loss."""
    callbacks: Sequence[Callback] = ()
    """Called after each step and each validation, and at the end."""
    verify: bool = True
    """Before the first step, compare loss, gradients and buffers of a few samples under the plan with those of
    plain training, if the plan recomputes or splits anything."""
    show_progress: bool = True
    """Show how far the run is, on standard error."""

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "save_every", "keep_saves", "patience"):
            self._check_count(name, least=1)
        self._check_count("seed", least=0)
        if self.seed > LARGEST_SEED:
            raise UsageError(f"seed is {self.seed}; it must be at most {LARGEST_SEED}.")
        for name, is_asked in (("resume", self.resume), ("save_every", self.save_every is not None)):
            if is_asked and self.run_dir is None:
                raise UsageError(f"{name} needs a run_dir, in which saves are.")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise UsageError(f"max_gradient_norm is {self.max_gradient_norm}; it must be positive.")
        object.__setattr__(self, "callbacks", check_callbacks(self.callbacks))

    def _check_count(self, name: str, *, least: int) -> None:
        count = getattr(self, name)
        if count is not None and count < least:
            raise UsageError(f"{name} is {count}; it must be at least {least}.")


class TrainKeywords(TypedDict, total=False):
    """The options of `TrainOptions` for type checkers."""

    data: Data | None
    run_dir: Path | str | None
    resume: bool
    save_every: int | None
    keep_saves: int
    epochs: int | None
    steps: int | None
    seed: int
    device: torch.device | str | None
    max_gradient_norm: float | None
    schedule: Schedule | MakeSchedule | None
    ema_decay: float | None
    correct_batch_norm: bool
    patience: int | None
    callbacks: Sequence[Callback]
    verify: bool
    show_progress: bool


Function = TypeVar("Function", bound=Callable[..., Any])


def takes_train_options(function: Function) -> Function:
    """Show the options in the signature of a function whose last parameter is `**options`; a decorator."""
    *named, _options = inspect.signature(function).parameters.values()
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in fields(TrainOptions)
    ]
    function.__signature__ = inspect.Signature([*named, *options])  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a run."""

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
class RunConfig:
    """Everything that is known of a run before it begins."""

    job: Job
    about: Any
    """What the job says about itself, as it is in a file."""
    plan: Plan | None
    settings: Settings
    """The plan's, or those given without one."""
    device: torch.device
    """This rank's."""
    options: TrainOptions
    shows_progress: bool
    """On this rank."""

    @property
    def length(self) -> Length:
        """One epoch, unless epochs or steps were asked for."""
        options = self.options
        epochs = 1 if options.epochs is None and options.steps is None else options.epochs
        return Length(epochs=epochs, steps=options.steps, patience=options.patience)

    @property
    def run_dir(self) -> Path | None:
        """None writes nothing."""
        return None if self.options.run_dir is None else Path(self.options.run_dir)

    @property
    def loss_unit(self) -> str | None:
        """What the job counts, for a reader; None if it counts nothing."""
        return None if self.job.count is None else self.job.counted
