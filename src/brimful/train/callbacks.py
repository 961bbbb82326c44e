"""What a run tells while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from brimful.training import StepRecord, TrainingResult, ValidationRecord

if TYPE_CHECKING:
    from brimful.train.trainer import Trainer


class Callback:
    """Told of what happens in a run, between steps, on every rank; override what is of interest.

    `trainer.model` and `trainer.optimizer` are those in training, `trainer.stop()` ends the run.
    """

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """After each optimizer step."""

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """After each pass over the validation data."""

    def on_end(self, trainer: Trainer, result: TrainingResult | None) -> None:
        """After the run; the result is None if an error ended it."""
