"""What a run keeps of itself: saves to go on from, and its weights; nothing that is NaN or infinite."""

from __future__ import annotations

from contextlib import suppress

from brimful.errors import NonFiniteError, SaveError, UsageError
from brimful.results import StepRecord
from brimful.trainer.data.rng import random_state_now
from brimful.trainer.data.stream import Feed
from brimful.trainer.learner import Learner
from brimful.trainer.monitor.logger import Journal
from brimful.trainer.options import Options
from brimful.trainer.resume import asked_run
from brimful.trainer.step.not_finite import step_not_finite, update_not_finite
from brimful.trainer.step.transaction import Steps
from brimful.trainer.storage.checkpoint import Checkpoint


class Keeper:
    """Saves a run as its last step left it.

    Args:
        options: What was asked.
        learner: Its model and average.
        feed: Its place in the data.
        steps: The optimizer's state, and all else that the next step depends on.
        journal: Writes, where there is a run directory.
    """

    def __init__(
        self, *, options: Options, learner: Learner, feed: Feed, steps: Steps, journal: Journal
    ) -> None:
        self._options = options
        self._run_dir = options.saving.run_dir
        self._ranks = learner.ranks
        self._learner = learner
        self._feed = feed
        self._steps = steps
        self._journal = journal

    def save(self) -> None:
        """Save all that the run needs to go on, unless NaN or infinity is in it."""
        if self._run_dir is None:
            return
        needs_save = self._ranks.any(self._journal.needs_save(self._steps.taken))
        if not needs_save or not self._learner.is_finite():
            return
        checkpoint = Checkpoint(
            asked=asked_run(self._options, self._learner.rates),
            steps=self._ranks.with_room(self._steps.state, during="the optimizer's state is read"),
            data=self._feed.state(),
            random=tuple(self._ranks.gather(random_state_now(self._options.device))),
        )
        in_parts = self._learner.parallel.saves_parts
        model = self._learner.model if in_parts else self._learner.whole_model(self._run_dir)
        self._journal.save(model, checkpoint)

    def save_weights(self) -> None:
        """Write the weights, and their average, unless the last step left NaN or infinity in them.

        Raises:
            NonFiniteError: It did.
            SaveError: They could not be written; those written before stay.
        """
        learner, taken = self._learner, self._steps.taken
        learner.take_buffers_of_first()
        if not learner.is_finite():
            raise update_not_finite(taken, self._options.settings, self._weights_before())
        self._write_weights()
        if learner.average is not None:
            with learner.averaged():
                self._journal.save_average(learner.model, taken)

    def save_after(self, error: Exception) -> None:
        """Save what there is before an error ends the run, and add to the error where it is."""
        if self._steps.taken == 0 or self._run_dir is None or self._ranks.are_several:
            return  # of several ranks one may not answer any more
        try:
            self._save_now()
            self.save_weights()
        except Exception as failure:  # not to take the place of the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        error.add_note(self._where_saved())

    def note_save_before(self, error: Exception) -> None:
        """Add to an error, after which nothing is saved, from where the run can be resumed."""
        if self._run_dir is None or self._ranks.are_several:
            return
        with suppress(SaveError, UsageError):
            self._journal.wait_for_save()
        error.add_note(self._where_saved())

    def _save_now(self) -> None:
        """Save, and wait for it; once more if a save of this step was under way and fails."""
        self.save()
        try:
            self._journal.wait_for_save()
        except SaveError:
            self.save()
            self._journal.wait_for_save()

    def _where_saved(self) -> str:
        step = self._journal.saved_run_step
        if step is None:
            return f"The run has no save; resuming {self._run_dir} starts from the beginning."
        return f"The run is saved after step {step}; resuming {self._run_dir} goes on there."

    def not_finite(self, record: StepRecord) -> NonFiniteError:
        """Write the weights from before a step that was not taken, as it came to no number.

        Args:
            record: The step.

        Returns:
            The error for it, which says where the weights are.
        """
        if self._learner.is_finite():
            self._write_weights()
            path = self._journal.weights_path
            written = path or "in the model (Trainer.model); without run_dir nothing is written"
            where = f"after step {self._steps.taken}, {written}"
        else:
            where = self._weights_before()
        of_first = self._ranks.of_first(where)  # which alone has written
        return step_not_finite(record, self._options.settings, of_first)

    def _write_weights(self) -> None:
        if self._run_dir is not None:
            self._journal.save_weights(self._learner.whole_model(self._run_dir), self._steps.taken)

    def _weights_before(self) -> str:
        """Where those of an earlier step are."""
        if self._journal.saved_step is None:
            return "none were saved before"
        return f"after step {self._journal.saved_step}, {self._journal.weights_path}"
