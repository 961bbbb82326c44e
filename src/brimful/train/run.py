"""A run in progress: epochs, validation, saving, and ending well."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace

import torch

from brimful.batches import count_samples
from brimful.errors import HalfUpdatedError, NonFiniteError
from brimful.job import Batch
from brimful.report.feeding import feeding_lines
from brimful.step import matmul_precision
from brimful.train.beginning import Beginning, make_journal, make_steps
from brimful.train.callbacks import Callbacks
from brimful.train.data import data_loading
from brimful.train.feed import dead_workers_told
from brimful.train.interrupts import Stop, stops_on_signals
from brimful.train.keeper import Keeper
from brimful.train.outcome import result_of
from brimful.train.progress import memory_text
from brimful.train.resuming import check_rates
from brimful.train.steps import NotFiniteStep
from brimful.train.validation import Validator
from brimful.training import StepRecord, StopReason, TrainingResult

MEASURED_UPDATE = 3
"""The update whose memory is measured: the first makes the optimizer's state, the second may still warm up."""

_COPIES_NOTE = (
    "the run is too short for a steady step to be measured: in this one, as in the first two of every launch, "
    "parameters and optimizer state are on the host a second time"
)

STEPS_BEFORE_ADVICE = 50
"""After which is told, once, how much training waits for its data: late enough to know, early enough to act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """How far a run was when it was launched."""

    taken: int = 0
    updates: int = 0


class Run:
    """Takes a run from its beginning to its end.

    Args:
        begun: What it is made of.
        stop: What it is asked; heeded after each step.
        callbacks: Told of each step, each validation and the end.
    """

    def __init__(self, begun: Beginning, *, stop: Stop, callbacks: Callbacks) -> None:
        self._begun = begun
        self._options = begun.options
        self._ranks = begun.ranks
        self._learner = begun.learner
        self._feed = begun.feed
        self._stop = stop
        self._callbacks = callbacks
        self._data_loading = data_loading(begun.data.train)
        self._start = _Counts()
        self._journal = make_journal(begun)
        self._steps = make_steps(begun, self._journal)
        self._keeper = Keeper(
            options=begun.options,
            learner=begun.learner,
            feed=begun.feed,
            steps=self._steps,
            journal=self._journal,
        )

    def train(self) -> TrainingResult:
        """Train to the end; the model has its own forward again afterwards, whatever happened.

        Returns:
            Every step, every validation, and predicted beside measured.

        Raises:
            TrainingError: As `Trainer.fit` says.
        """
        result: TrainingResult | None = None
        try:
            self._load_state()
            result = self._trained()
            return result
        finally:
            self._steps.close()
            self._callbacks.on_end(result)

    def _load_state(self) -> None:
        saved = self._begun.start.saved
        if saved is not None:
            with self._steps.loading():
                self._steps.load_state(saved.state_for(self._learner.optimizer))
            check_rates(self._options, self._learner.rates, saved)
            self._start = _Counts(taken=self._steps.taken, updates=self._steps.updates)

    def _trained(self) -> TrainingResult:
        precision = self._steps.settings.precision
        with self._journal, matmul_precision(precision), stops_on_signals(self._heed_signal):
            self._tell_start()
            self._rehearse()
            stopped_because = self._run_epochs_and_save()
            self._journal.wait_for_save()
            result = result_of(
                self._options,
                self._steps,
                self._journal,
                certificate=self._begun.certificate,
                data_loading=self._data_loading,
                stopped_because=stopped_because,
            )
            self._journal.write_result(result)
        return result

    def _tell_start(self) -> None:
        """Tell from where the run goes on, and all ranks what was told before."""
        start = self._begun.start
        if start.saved is not None:
            self._journal.know(*self._ranks.of_first(self._journal.known()))
            self._journal.note(f"resumed after step {start.saved.step} from {start.saved.path}")
        if start.lowered is not None:
            self._journal.add_recovery(start.lowered)
        decay = self._options.updating.ema_decay
        if decay is not None and self._begun.data.validation is not None:
            self._journal.note(
                "validation, the best weights and early stopping are of the average of weights: begun at the "
                f"initial ones, with a decay of {decay:g} it follows in some {1 / (1 - decay):.0f} steps"
            )

    @dead_workers_told()
    def _rehearse(self) -> None:
        """See that the longest batch fits, if the data know it."""
        longest = self._begun.data.longest
        if longest is not None:
            samples = self._steps.settings.global_batch_size
            self._steps.rehearse(longest(samples) if callable(longest) else longest)

    def _run_epochs_and_save(self) -> StopReason:
        """Run the epochs and write the weights; before an error ends that, save what can be saved."""
        try:
            with dead_workers_told():
                stopped_because = self._run_epochs()
                self._keeper.save_weights()
                return stopped_because
        except NotFiniteStep as step:
            raise self._not_finite(step.record) from None
        except HalfUpdatedError:
            raise  # what is in the model is not to be saved
        except Exception as error:
            self._keeper.save_after(error)
            raise

    def _not_finite(self, record: StepRecord) -> NonFiniteError:
        if self._steps.taken:
            self._keeper.save()  # before the step is told, which a resumed run takes anew
        self._journal.add_step(record, self._memory_text())
        return self._keeper.not_finite(record)

    def _run_epochs(self) -> StopReason:
        validator = self._validator()
        patience = self._options.length.patience
        while not (self._has_enough() or self._options.length.is_past(self._feed.place.epoch)):
            stopped_because = self._run_epoch(validator)
            if stopped_because is not None:
                return stopped_because
            self._keeper.save_weights()
            if patience is not None and self._journal.validations_without_improvement >= patience:
                return StopReason.NOT_IMPROVING
            self._feed.begin_next_epoch()
        return StopReason.FINISHED

    def _run_epoch(self, validator: Validator | None) -> StopReason | None:
        """Train on the rest of an epoch, save the run and validate; tell why it is to stop, if it is."""
        for batch, data_seconds in self._feed.rest_of_epoch(self._stop.is_requested):
            self._take_step(batch, data_seconds)
            stopped_because = self._stop.agreed(self._ranks)
            if self._is_to_be_saved():
                self._keeper.save()
            if stopped_because is not None or self._has_enough():
                break
        stopped_because = self._stop.agreed(self._ranks)
        self._keeper.save()
        if stopped_because is None and validator is not None:
            self._validate(validator)
            stopped_because = self._stop.agreed(self._ranks)
        return stopped_because

    def _take_step(self, batch: Batch, data_seconds: float) -> None:
        """Take a step on a batch, and tell of it."""
        record = self._taken(batch, data_seconds)
        self._journal.add_step(record, self._memory_text())
        if len(self._journal.steps) == STEPS_BEFORE_ADVICE:
            self._advise_on_data()
        self._callbacks.on_step(record)

    def _taken(self, batch: Batch, data_seconds: float) -> StepRecord:
        """Take a step, and move on in the data if it was taken, even where an error comes after it."""
        before = self._steps.taken
        is_measured = self._is_to_be_measured(batch)
        if is_measured and self._holds_copies():
            self._journal.note(_COPIES_NOTE)
        try:
            record = self._steps.take(
                batch,
                epoch=self._feed.place.epoch,
                data_seconds=data_seconds,
                measure_memory=is_measured,
            )
            return replace(record, mfu=self._begun.utilisation.of(record, batch))
        finally:
            if self._steps.taken > before:
                self._feed.move_on()

    def _has_enough(self) -> bool:
        return self._options.length.has_enough(self._steps.taken)

    def _is_to_be_saved(self) -> bool:
        every = self._options.saving.every
        return every is not None and self._steps.taken % every == 0

    def _is_to_be_measured(self, batch: Batch) -> bool:
        """Whether the memory of the next step is measured: once, in a steady step on a full batch.

        A resumed run counts anew: what its first updates hold on the host besides is not what a step takes.
        """
        total_steps, before = self._begun.total_steps, self._start
        measured_update = MEASURED_UPDATE
        if total_steps is not None:
            measured_update = min(MEASURED_UPDATE, total_steps - before.taken)
        is_steady = self._steps.updates - before.updates >= max(measured_update - 1, 1)
        return self._steps.peak is None and is_steady and count_samples(batch) >= self._full_samples

    def _holds_copies(self) -> bool:
        """Whether copies on the host, by which an update can be taken back, are in the memory of the device."""
        is_early = self._steps.updates - self._start.updates < MEASURED_UPDATE - 1
        shares_memory = self._options.device.type == "cpu" and not self._learner.parallel.is_sharded
        return is_early and shares_memory

    @property
    def _full_samples(self) -> int:
        """Samples that bring a step to its peak: a second micro-batch, run beside the gradients of a first; all
        where the loss couples them."""
        settings = self._options.settings
        of_rank = settings.rank_batch_size
        if self._options.job.embed is None:
            of_rank = min(of_rank, 2 * settings.micro_batch_size)
        return of_rank * self._ranks.count

    def _validator(self) -> Validator | None:
        """What validates under the settings as they are now; None without validation data."""
        if self._begun.data.validation is None:
            return None
        return Validator(
            self._learner.model,
            self._options.job,
            self._begun.data.validation,
            micro_batch_size=self._steps.settings.micro_batch_size,
            global_batch_size=self._steps.settings.global_batch_size,
            device=self._options.device,
            on_recovery=self._journal.add_recovery,
            ranks=self._ranks,
            parallel=self._learner.parallel,
            fetching=self._feed.drawn_from,
        )

    def _validate(self, validator: Validator) -> None:
        """Validate the model, or its average, and tell of it, unless a stop is requested meanwhile."""
        self._learner.take_buffers_of_first()
        with self._learner.averaged():
            record = validator.run(
                self._steps.settings.precision,
                step=self._steps.taken,
                epoch=self._feed.place.epoch,
                is_stopped=self._stop.is_requested,
            )
            if record is None:
                return
            run_dir = self._options.saving.run_dir
            is_written = run_dir is not None and self._journal.is_best(record)
            model = self._learner.whole_model(run_dir) if is_written else self._learner.model
            self._journal.add_validation(record, model)
        self._callbacks.on_validation(record)

    def _memory_text(self) -> str:
        """How much memory is in use, or will be, for a reader."""
        plan, device, peak = self._options.plan, self._options.device, self._steps.peak
        budget_bytes = None if plan is None else plan.budget_bytes
        if device.type == "cuda":
            # what the process holds of the device, as the budget means it, but for the context
            return memory_text(torch.cuda.max_memory_reserved(device), budget_bytes)
        if peak is not None:
            return memory_text(peak.allocated_bytes, budget_bytes)
        predicted_bytes = None if plan is None else plan.predicted_peak_allocated_bytes
        return memory_text(predicted_bytes, budget_bytes, predicted=True)

    def _advise_on_data(self) -> None:
        on_gpu = self._options.device.type == "cuda"
        for label, line in feeding_lines(self._journal.steps, self._data_loading, on_gpu=on_gpu):
            self._journal.note(f"{label}  {line}")

    def _heed_signal(self, number: signal.Signals) -> None:
        self._stop.heed(number)
        if self._options.shows_progress:
            # not print: a signal may come in the middle of one
            os.write(2, b"\nEnding after this step; the weights are saved. Once more to stop at once.\n")
