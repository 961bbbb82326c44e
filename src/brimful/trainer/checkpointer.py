"""Saves a run and restores it: checkpoints and weights, none of which contain NaN or infinity."""

from __future__ import annotations

from contextlib import suppress

from brimful.errors import NonFiniteError, SaveError, UsageError
from brimful.results import StepRecord
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import check_rates, run_identity
from brimful.trainer.state import TrainState
from brimful.trainer.step.not_finite import step_not_finite, update_not_finite
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.restore import Save


class Checkpointer:
    """Saves the state of a run as its last step left it, and restores it.

    Args:
        config: Of the run.
        state: What is saved.
        logger: Writes, where there is a run directory.
    """

    def __init__(self, *, config: RunConfig, state: TrainState, logger: RunLogger) -> None:
        self._config = config
        self._run_dir = config.run_dir
        self._ranks = state.ranks
        self._state = state
        self._logger = logger

    def restore(self, saved: Save) -> None:
        """Load a checkpoint into the state; the model has its weights already.

        Args:
            saved: Of this run.

        Raises:
            ResumeError: It does not match this optimizer, schedule or loss scaler, or has other rates.
        """
        optimizer_state = saved.optimizer_state_for(self._state.optimizer)
        self._state.load_state_dict(saved.checkpoint.with_optimizer(optimizer_state).state)
        saved.release()
        check_rates(self._config, self._state.rates, saved)

    def save(self) -> None:
        """Save a checkpoint, unless there is one of this step, or NaN or infinity in the weights."""
        if self._run_dir is None:
            return
        needs_save = self._ranks.any(self._logger.needs_save(self._state.step))
        if not needs_save or not self._state.is_finite():
            return
        checkpoint = Checkpoint(
            run=run_identity(self._config, self._state.rates), state=self._state.state_dict()
        )
        in_parts = self._state.parallel.saves_parts
        model = self._state.model if in_parts else self._state.whole_model(self._run_dir)
        self._logger.save(model, checkpoint)

    def save_weights(self) -> None:
        """Write the weights, and their average, unless the last step left NaN or infinity in them.

        Raises:
            NonFiniteError: It did.
            SaveError: They could not be written; those written before stay.
        """
        state = self._state
        state.broadcast_buffers()
        if not state.is_finite():
            raise update_not_finite(state.step, self._config.settings, self._weights_before())
        self._write_weights()
        if state.average is not None:
            with state.averaged():
                self._logger.save_average(state.model, state.step)

    def save_after(self, error: Exception) -> None:
        """Save what there is before an error ends the run, and add to the error where it is."""
        if self._state.step == 0 or self._run_dir is None or self._ranks.is_distributed:
            return  # of several ranks one may not answer any more
        try:
            self._save_now()
            self.save_weights()
        except Exception as failure:  # not to take the place of the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        error.add_note(self._where_saved())

    def note_save_before(self, error: Exception) -> None:
        """Add to an error, after which nothing is saved, from where the run can be resumed."""
        if self._run_dir is None or self._ranks.is_distributed:
            return
        with suppress(SaveError, UsageError):
            self._logger.wait_for_save()
        error.add_note(self._where_saved())

    def _save_now(self) -> None:
        """Save, and wait for it; once more if a save of this step was under way and fails."""
        self.save()
        try:
            self._logger.wait_for_save()
        except SaveError:
            self.save()
            self._logger.wait_for_save()

    def _where_saved(self) -> str:
        step = self._logger.saved_run_step
        if step is None:
            return f"The run has no save; resuming {self._run_dir} starts from the beginning."
        return f"The run is saved after step {step}; resuming {self._run_dir} continues there."

    def not_finite(self, record: StepRecord) -> NonFiniteError:
        """Write the weights from before a step that was not taken, as it came to no number.

        Args:
            record: The step.

        Returns:
            The error for it, which says where the weights are.
        """
        if self._state.is_finite():
            self._write_weights()
            path = self._logger.weights_path
            written = path or "in the model (Trainer.model); without run_dir nothing is written"
            where = f"after step {self._state.step}, {written}"
        else:
            where = self._weights_before()
        of_first = self._ranks.broadcast(where)  # which alone has written
        return step_not_finite(record, self._config.settings, of_first)

    def _write_weights(self) -> None:
        if self._run_dir is not None:
            self._logger.save_weights(self._state.whole_model(self._run_dir), self._state.step)

    def _weights_before(self) -> str:
        """Where those of an earlier step are."""
        if self._logger.saved_step is None:
            return "none were saved before"
        return f"after step {self._logger.saved_step}, {self._logger.weights_path}"
