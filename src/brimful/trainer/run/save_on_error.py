"""Ends a run that raised: saves what can be saved, and adds to the error where the save is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from brimful.errors import NonFiniteError, OutOfMemoryError, PartialUpdateError, SaveError, UsageError
from brimful.execution.explained import Expected
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.results import StepRecord, StopReason
from brimful.trainer.checkpointer import Checkpointer
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.trainer.step.memory import MemoryMeter
from brimful.trainer.step.not_finite import NotFiniteStep, is_finite_on_all_ranks, step_not_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOnError:
    """Saves a run before an error ends it."""

    config: RunConfig
    state: TrainState
    logger: RunLogger
    checkpointer: Checkpointer
    memory: MemoryMeter

    def run(self, train: Callable[[], StopReason]) -> StopReason:
        """Call `train`, which takes the steps of the run and writes its weights; save the run if it raises."""
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
        make_room(self.config.device)
        ran_out = OutOfMemoryError(f"memory ran out outside of a step ({found.place}): {found.message}.")
        found.explained(ran_out, Expected.of(self.config.plan))
        self._save_after(ran_out)
        raise ran_out

    def _save_after(self, error: Exception) -> None:
        """Save the run after an error, and add to the error where the save is."""
        if self.state.step == 0 or self.config.run_dir is None or self.state.ranks.is_distributed:
            return  # the other ranks may not answer any more
        try:
            self._save_now()
            self.checkpointer.save_weights()
        except Exception as failure:  # it must not replace the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        error.add_note(self._where_saved())

    def _save_now(self) -> None:
        """Save and wait for it; once more if a save of this step was under way and fails."""
        self.checkpointer.save()
        try:
            self.checkpointer.wait_for_save()
            return
        except SaveError:
            pass  # its copies of all weights are freed before there are others
        self.checkpointer.save()
        self.checkpointer.wait_for_save()

    def _add_earlier_save(self, error: PartialUpdateError) -> None:
        """Add to an error from which save the run can be resumed; the model is not saved."""
        if self.config.run_dir is None or self.state.ranks.is_distributed:
            return
        with suppress(SaveError, UsageError):
            self.checkpointer.wait_for_save()
        error.add_note(self._where_saved())

    def _where_saved(self) -> str:
        step, run_dir = self.checkpointer.saved_step, self.config.run_dir
        if step is None:
            return f"The run has no save; resuming {run_dir} starts from the beginning."
        return f"The run is saved after step {step}; resuming {run_dir} continues there."

    def _not_finite(self, record: StepRecord) -> NonFiniteError:
        """Save the state before a step that was undone, log the step, and write the weights."""
        state = self.state
        if state.step:
            self.checkpointer.save()  # before the step is logged: a resumed run takes it again
        self.logger.add_step(record, self.memory.peak_text())
        if is_finite_on_all_ranks(state.model, state.ranks):
            path = self.checkpointer.write_weights()
            written = path or "in the model (Trainer.model); without run_dir nothing is written"
            where = f"after step {state.step}, {written}"
        else:
            where = self.checkpointer.earlier_weights()
        return step_not_finite(record, state.settings, state.ranks.broadcast(where))
