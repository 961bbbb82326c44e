"""Saves a run and restores it: checkpoints and weights, in which all parameters are finite."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from brimful.errors import SaveError, UsageError
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import check_rates
from brimful.trainer.state import TrainState, whole_model
from brimful.trainer.step.not_finite import is_finite_on_all_ranks, update_not_finite
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.restore import Save
from brimful.trainer.storage.weights import AVERAGE


@dataclass(slots=True, kw_only=True, eq=False)
class Checkpointer:
    """Saves the state of a run after its latest step, and restores it."""

    config: RunConfig
    state: TrainState
    logger: RunLogger
    _requested_step: int | None = None
    """The step of the latest save requested; None before the first, and after one failed."""

    def restore(self, saved: Save) -> None:
        """Load a checkpoint into the state; the model already has its weights."""
        optimizer_state = saved.optimizer_state_for(self.state.optimizer)
        self.state.load_state_dict(replace(saved.checkpoint, optimizer=optimizer_state))
        saved.release()
        check_rates(self.config, self.state.rates, saved)
        self._requested_step = saved.step

    def save_if_due(self) -> None:
        """Save a checkpoint every `save_every` steps."""
        every = self.config.options.save_every
        if every is not None and self.state.step % every == 0:
            self.save()

    def save(self) -> None:
        """Save a checkpoint while training continues, unless this step has one or the weights are not finite.

        If a save fails, this shows it and training continues with the saves before it; only the first save
        raises SaveError. Raises UsageError if the state cannot be loaded without running code.
        """
        state, run_dir = self.state, self.config.run_dir
        if run_dir is None:
            return
        needs_save = state.ranks.any(self._requested_step != state.step)
        if not needs_save or not is_finite_on_all_ranks(state.model, state.ranks):
            return
        checkpoint = state.state_dict(self.config)
        model = state.model if state.parallel.saves_parts else whole_model(state, run_dir)
        self._write(model, checkpoint)
        self._requested_step = state.step

    def _write(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Write a checkpoint with the records so far, after the save under way."""
        if self.logger.saves is None:
            return
        try:
            self.wait_for_save()
        except SaveError as error:
            self.logger.progress.show_note(str(error))
            with suppress(SaveError):  # the disk may be full
                self.logger.append("failed save", str(error))
        validations = tuple(self.logger.history.validations)
        metrics_bytes = self.logger.flush_metrics()
        self.logger.saves.write(
            model, replace(checkpoint, validations=validations, metrics_bytes=metrics_bytes)
        )

    def wait_for_save(self) -> None:
        """Wait until the save under way is on the disk."""
        if self.logger.saves is not None:
            try:
                self.logger.saves.wait()
            except (SaveError, UsageError):
                self._requested_step = None
                raise

    @property
    def saved_step(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none, or if other ranks write them."""
        return None if self.logger.saves is None else self.logger.saves.saved_step

    def save_weights(self) -> None:
        """Write the weights, and their average."""
        state = self.state
        state.ranks.broadcast_buffers(state.model)
        if not is_finite_on_all_ranks(state.model, state.ranks):
            raise update_not_finite(state.step, state.settings, self.earlier_weights())
        self.write_weights()
        if state.average is not None:
            with state.average.in_place():
                self.logger.write_weights(state.model, AVERAGE, state.step)

    def write_weights(self) -> Path | None:
        """Write the weights, unchecked, and return their path; None without a run directory."""
        run_dir = self.config.run_dir
        if run_dir is not None:
            self.logger.write_latest_weights(whole_model(self.state, run_dir), self.state.step)
        return self.logger.weights_path

    def earlier_weights(self) -> str:
        """Describe where the latest weights written are."""
        logger = self.logger
        if logger.weights_step is None:
            return "none were saved before"
        return f"after step {logger.weights_step}, {logger.weights_path}"
