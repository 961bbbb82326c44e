"""Callbacks: the events of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, get_args

from brimful.errors import UsageError
from brimful.results import EpochRecord, StepRecord, TrainingResult, ValidationRecord

if TYPE_CHECKING:
    from brimful.trainer.trainer import Trainer


Hook = Literal["on_step", "on_epoch", "on_validation", "on_end"]
"""Name of a method of `Callback`."""


class Callback:
    """Base class of callbacks: override the methods for the events you need. They run on every rank.

    `trainer.model` and `trainer.optimizer` are those in training; `trainer.stop()` ends the run. If a callback
    raises, the run is saved and ends; `TensorBoard` and `WandB` warn instead.
    """

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        """Called after each optimizer step."""

    def on_epoch(self, trainer: Trainer, record: EpochRecord) -> None:
        """Called at the end of each epoch, before it is saved and validated."""

    def on_validation(self, trainer: Trainer, record: ValidationRecord) -> None:
        """Called after each pass over the validation data."""

    def on_end(self, trainer: Trainer, result: TrainingResult | None) -> None:
        """Called after the run; the result is None if an error ended it."""


_HOOKS = get_args(Hook)


def check_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Check that every callback has all methods of `Callback`; return them."""
    try:
        given = tuple(callbacks)
    except TypeError:  # a tensor of no dimensions has `__iter__`, and nothing to iterate over
        raise UsageError(f"callbacks is a {type(callbacks).__name__}; give a list of callbacks.") from None
    for callback in given:
        missing = [name for name in _HOOKS if not callable(getattr(callback, name, None))]
        if missing or isinstance(callback, type):
            lack = "is not an instance" if isinstance(callback, type) else f"has no {missing[0]}"
            raise UsageError(
                f"callbacks has a {type(callback).__name__}, which {lack}. Derive from "
                "brimful.trainer.Callback, override on_step(trainer, record), on_epoch(trainer, record), "
                "on_validation(trainer, record), or on_end(trainer, result), and give an instance."
            )
    return given
