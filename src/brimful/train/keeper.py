"""What a run keeps of itself: saves to go on from, and its weights; nothing that is NaN or infinite."""

from __future__ import annotations

from brimful.errors import NonFiniteError
from brimful.train.feed import Feed
from brimful.train.journal import Journal
from brimful.train.learner import Learner
from brimful.train.not_finite import step_not_finite, update_not_finite
from brimful.train.options import Options
from brimful.train.randomness import RandomState
from brimful.train.resuming import identity
from brimful.train.steps import Steps
from brimful.training import StepRecord


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
        is_saved = self._run_dir is None or self._journal.saved_run_step == self._steps.taken
        if is_saved or not self._learner.is_finite():
            return
        randoms = self._ranks.gather(RandomState.now(self._options.device).to_save())
        state = self._steps.state() | self._feed.to_save() | identity(self._options, self._learner.rates)
        in_parts = self._learner.parallel.saves_parts
        model = self._learner.model if in_parts else self._learner.whole_model(self._run_dir)
        self._journal.save(model, self._steps.taken, state | {"random": randoms})

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
            self.save()
            self._journal.wait_for_save()
            self.save_weights()
        except Exception as failure:  # not to take the place of the error that ends the run
            error.add_note(f"Saving after it failed as well: {type(failure).__name__}: {failure}")
        else:
            error.add_note(
                f"The run is saved after step {self._steps.taken}; resuming {self._run_dir} goes on there."
            )

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
