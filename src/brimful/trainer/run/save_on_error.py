"""Ends a run that raised: saves what can be saved, and adds to the error where the save is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from brimful.errors import NonFiniteError, OutOfMemoryError, PartialUpdateError, SaveError, UsageError
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.results import StepRecord, StopReason
from brimful.trainer.checkpointer import Checkpointer
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.trainer.step.memory import MemoryMeter
from brimful.trainer.step.not_finite import NotFiniteStep, is_finite_on_all_ranks, step_not_finite


class SaveOnError:
    """Saves a run before an error ends it."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        *,
        logger: RunLogger,
        checkpointer: Checkpointer,
        memory: MemoryMeter,
    ) -> None:
        self._config = config
        self._state = state
        self._logger = logger
        self._checkpointer = checkpointer
        self._memory = memory

    def run(self, train: Callable[[], StopReason]) -> StopReason:
        """Call `train`, which takes the steps of the run and writes its weights; save the run if that raises.

        Errors of `train` pass on. Raises NonFiniteError if the loss or a gradient was NaN or infinite,
        OutOfMemoryError if memory ran out outside of a step.
        """
        try:
            found = unless_out_of_memory(train)
        except NotFiniteStep as step:
            raise self._not_finite(step.record) from None
        except PartialUpdateError as error:  # the model is neither before nor after a step: it is not saved
            self._add_earlier_save(error)
            raise
        except Exception as error:
            self._save_after(error)
            raise
        if not isinstance(found, RanOut):
            return found
        make_room(self._config.device)
        ran_out = OutOfMemoryError(f"memory ran out outside of a step ({found.place}): {found.message}.")
        self._save_after(ran_out)
        raise ran_out

    def _save_after(self, error: Exception) -> None:
        """Save the run after an error, and add to the error where the save is."""
        if self._state.step == 0 or self._config.run_dir is None or self._state.ranks.is_distributed:
            return  # the other ranks may not answer any more
        try:
            self._save_now()
            self._checkpointer.save_weights()
        except Exception as failure:  # it must not replace the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        error.add_note(self._where_saved())

    def _save_now(self) -> None:
        """Save and wait for it; once more if a save of this step was under way and fails."""
        self._checkpointer.save()
        try:
            self._checkpointer.wait_for_save()
            return
        except SaveError:
            pass  # its copies of all weights are freed before there are others
        self._checkpointer.save()
        self._checkpointer.wait_for_save()

    def _add_earlier_save(self, error: PartialUpdateError) -> None:
        """Add to an error from which save the run can be resumed; the model is not saved."""
        if self._config.run_dir is None or self._state.ranks.is_distributed:
            return
        with suppress(SaveError, UsageError):
            self._checkpointer.wait_for_save()
        error.add_note(self._where_saved())

    def _where_saved(self) -> str:
        step, run_dir = self._checkpointer.saved_step, self._config.run_dir
        if step is None:
            return f"The run has no save; resuming {run_dir} starts from the beginning."
        return f"The run is saved after step {step}; resuming {run_dir} continues there."

    def _not_finite(self, record: StepRecord) -> NonFiniteError:
        """Save the state before a step that was undone, log the step, and write the weights."""
        state = self._state
        if state.step:
            self._checkpointer.save()  # before the step is logged: a resumed run takes it again
        self._logger.add_step(record, self._memory.peak_text())
        if is_finite_on_all_ranks(state.model, state.ranks):
            path = self._checkpointer.write_weights()
            written = path or "in the model (Trainer.model); without run_dir nothing is written"
            where = f"after step {state.step}, {written}"
        else:
            where = self._checkpointer.earlier_weights()
        return step_not_finite(record, state.settings, state.ranks.broadcast(where))
