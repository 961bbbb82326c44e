"""Compares the number of batches in an epoch with the number that the data reported."""

from __future__ import annotations

from brimful.errors import DataError
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.setup import RunContext
from brimful.trainer.step.schedules import Schedule


class EpochLengthCheck:
    """Notes an epoch whose number of batches differs from what the data reported.

    It also updates the total number of steps that progress shows.
    """

    def __init__(self, run: RunContext, logger: RunLogger) -> None:
        self._run = run
        self._logger = logger
        self._shown_steps = run.total_steps
        """The total that progress shows."""
        self._noted_batches: int | None = None
        """The length in the latest note; further epochs of that length are not noted."""

    def check(self) -> None:
        """Check the epoch that has ended; raise DataError if it had no batch."""
        place, expected = self._run.state.stream.position, self._run.batches.steps_per_epoch
        if place.batches == 0:
            raise DataError(f"the training data gave no batch in epoch {place.epoch}.")
        if expected is None:
            return
        if self._total_steps() != self._shown_steps:
            self._shown_steps = self._total_steps()
            self._logger.progress.set_total(self._shown_steps)
        if place.batches in (expected, self._noted_batches):
            return
        self._noted_batches = place.batches
        note = f"epoch {place.epoch} ended after {place.batches} of {expected} batches; the data gave no more"
        if place.batches > expected:
            note = f"epoch {place.epoch} had {place.batches} batches; {expected} were expected"
        if isinstance(self._run.config.options.schedule, Schedule):
            note += f". The schedule is for {self._run.total_steps} steps"
        self._logger.add_note(note)

    def _total_steps(self) -> int | None:
        """Steps of the run if its other epochs are as long as this one; None if that is not known."""
        options, place = self._run.config.options, self._run.state.stream.position
        if options.last_epoch is None:
            return options.steps
        return options.at_most_steps(self._run.state.step + (options.last_epoch - place.epoch) * place.batches)
