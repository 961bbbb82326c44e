"""What a run tells while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from brimful.errors import UsageError
from brimful.results import StepRecord, TrainingResult, ValidationRecord

if TYPE_CHECKING:
    from brimful.trainer.trainer import Trainer


class Callback:
    """Told of what happens in a run, between steps, on every rank; override what is of interest.

    `trainer.model` and `trainer.optimizer` are those in training, `trainer.stop()` ends the run. An error that
    a callback raises ends the run, which is saved first; `TensorBoard` and `WandB` turn theirs into a warning.
    """

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """After each optimizer step."""

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """After each pass over the validation data."""

    def on_end(self, trainer: Trainer, result: TrainingResult | None) -> None:
        """After the run; the result is None if an error ended it."""


_HOOKS = ("on_step", "on_validation", "on_end")


def check_callbacks(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """Check that each can be told of everything.

    Args:
        callbacks: Of a trainer.

    Returns:
        The same.

    Raises:
        UsageError: One lacks what is called.
    """
    given = tuple(callbacks)
    for callback in given:
        missing = [name for name in _HOOKS if not callable(getattr(callback, name, None))]
        if missing or isinstance(callback, type):
            lack = "is not an instance" if isinstance(callback, type) else f"has no {missing[0]}"
            raise UsageError(
                f"callbacks has a {type(callback).__name__}, which {lack}. Derive from brimful.Callback, "
                "override on_step(trainer, record), on_validation(trainer, record) or on_end(trainer, result), "
                "and give an instance."
            )
    return given


class Callbacks:
    """The callbacks of one trainer, told one after the other.

    Args:
        trainer: What they are given.
        callbacks: In their order.
    """

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._callbacks = tuple(callbacks)

    def on_step(self, record: StepRecord) -> None:
        """Tell them of a step."""
        for callback in self._callbacks:
            callback.on_step(self._trainer, record)

    def on_validation(self, record: ValidationRecord) -> None:
        """Tell them of a validation."""
        for callback in self._callbacks:
            callback.on_validation(self._trainer, record)

    def on_end(self, result: TrainingResult | None) -> None:
        """Tell them that the run has ended."""
        for callback in self._callbacks:
            callback.on_end(self._trainer, result)
