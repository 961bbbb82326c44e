"""A run in progress: epochs, validation, saving, and ending well."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

import torch

from brimful.batches import layout_of
from brimful.display import write_from_signal
from brimful.errors import DataError, NonFiniteError, OutOfMemoryError, PartialUpdateError
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.execution.precision import matmul_precision
from brimful.job import Batch
from brimful.report.data_loading import feeding_lines
from brimful.results import Recovery, StepRecord, StopReason, TrainingResult
from brimful.trainer.checkpointer import Checkpointer
from brimful.trainer.data.batches import data_loading
from brimful.trainer.data.stream import worker_errors
from brimful.trainer.monitor.callbacks import Callbacks
from brimful.trainer.monitor.progress import memory_text
from brimful.trainer.result import result_of
from brimful.trainer.setup import RunContext, make_logger, make_runner
from brimful.trainer.step.runner import NotFiniteStep
from brimful.trainer.step.schedules import Schedule
from brimful.trainer.stop import Stop, stops_on_signals
from brimful.trainer.validation import Validator

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
        run: What it is made of.
        stop: What it is asked; heeded after each step.
        callbacks: Told of each step, each validation and the end.
    """

    def __init__(self, run: RunContext, *, stop: Stop, callbacks: Callbacks) -> None:
        self._run = run
        self._config = run.config
        self._ranks = run.ranks
        self._state = run.state
        self._stream = run.state.stream
        self._stop = stop
        self._callbacks = callbacks
        self._data_loading = data_loading(run.data.train)
        self._start = _Counts()
        self._batches_noted: int | None = None
        """Of an epoch whose length was not as the data said, so that not each of them is noted."""
        self._logger = make_logger(run)
        self._runner = make_runner(run, self._logger)
        self._checkpointer = Checkpointer(config=run.config, state=run.state, logger=self._logger)

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
            self._runner.close()
            self._callbacks.on_end(result)

    def _load_state(self) -> None:
        saved = self._run.start.saved
        if saved is not None:
            self._checkpointer.restore(saved)
            self._start = _Counts(taken=self._state.step, updates=self._state.updates)

    def _trained(self) -> TrainingResult:
        precision = self._state.settings.precision
        with self._logger, matmul_precision(precision), stops_on_signals(self._handle_signal):
            self._tell_start()
            self._dry_run()
            stopped_because = self._run_epochs_and_save()
            self._logger.wait_for_save()
            result = result_of(
                self._run,
                self._logger,
                peak=self._runner.peak,
                data_loading=self._data_loading,
                stopped_because=stopped_because,
            )
            self._logger.write_result(result)
        return result

    def _tell_start(self) -> None:
        """Tell from where the run goes on, and all ranks what was told before."""
        start = self._run.start
        if start.saved is not None:
            self._logger.load_history(*self._ranks.broadcast(self._logger.history()))
            self._logger.note(f"resumed after step {start.saved.step} from {start.saved.path}")
        if start.fallback is not None:
            self._logger.add_recovery(start.fallback)
        decay = self._config.options.ema_decay
        if decay is not None and self._run.data.validation is not None:
            self._logger.note(
                "validation, the best weights and early stopping are of the average of weights: begun at the "
                f"initial ones, with a decay of {decay:g} it follows in some {1 / (1 - decay):.0f} steps"
            )

    @worker_errors()
    def _dry_run(self) -> None:
        """See that the longest batch fits, if the data know it."""
        longest = self._run.data.longest
        if longest is not None:
            samples = self._state.settings.global_batch_size
            self._runner.dry_run(longest(samples) if callable(longest) else longest)

    def _run_epochs_and_save(self) -> StopReason:
        """Run the epochs and write the weights; before an error ends that, save what can be saved."""
        try:
            found = unless_out_of_memory(self._run_epochs_and_write)
        except NotFiniteStep as step:
            raise self._not_finite(step.record) from None
        except PartialUpdateError as error:
            self._checkpointer.note_save_before(error)  # what is in the model is not to be saved
            raise
        except Exception as error:
            self._checkpointer.save_after(error)
            raise
        if not isinstance(found, RanOut):
            return found
        make_room(self._config.device)
        ran_out = OutOfMemoryError(f"memory ran out outside of a step ({found.place}): {found.message}.")
        self._checkpointer.save_after(ran_out)
        raise ran_out

    @worker_errors()
    def _run_epochs_and_write(self) -> StopReason:
        stopped_because = self._run_epochs()
        self._checkpointer.save_weights()
        return stopped_because

    def _not_finite(self, record: StepRecord) -> NonFiniteError:
        if self._state.step:
            self._checkpointer.save()  # before the step is told, which a resumed run takes anew
        self._logger.add_step(record, self._memory_text())
        return self._checkpointer.not_finite(record)

    def _run_epochs(self) -> StopReason:
        validator = self._validator()
        patience = self._config.length.patience
        while not (self._has_enough() or self._config.length.is_past(self._stream.position.epoch)):
            stopped_because = self._run_epoch(validator)
            if stopped_because is not None:
                return stopped_because
            self._checkpointer.save_weights()
            if patience is not None and self._logger.validations_without_improvement >= patience:
                return StopReason.NOT_IMPROVING
            self._stream.begin_next_epoch()
        return StopReason.FINISHED

    def _run_epoch(self, validator: Validator | None) -> StopReason | None:
        """Train on the rest of an epoch, save the run and validate; tell why it is to stop, if it is."""
        has_ended = False
        for batch, data_seconds in self._stream.rest_of_epoch(self._stop.is_requested, self._add_reading):
            self._take_step(batch, data_seconds)
            stopped_because = self._stop.synced(self._ranks)
            if self._is_to_be_saved():
                self._checkpointer.save()
            if stopped_because is not None or self._has_enough():
                break
        else:
            has_ended = True
        stopped_because = self._stop.synced(self._ranks)
        if has_ended and stopped_because is None:
            self._check_batches()
        self._checkpointer.save()
        if stopped_because is None and validator is not None:
            self._validate(validator)
            stopped_because = self._stop.synced(self._ranks)
        return stopped_because

    def _check_batches(self) -> None:
        """At the end of an epoch, compare its batches with those that the data said they have."""
        place, promised = self._stream.position, self._run.batches.steps_per_epoch
        if place.batches == 0:
            raise DataError(f"the training data gave no batch in epoch {place.epoch}.")
        if promised is None or place.batches == promised:
            return
        length = self._config.length
        total_steps = length.steps
        if length.epochs is not None:
            by_epochs = self._state.step + (length.epochs - place.epoch) * place.batches
            total_steps = by_epochs if total_steps is None else min(by_epochs, total_steps)
        self._logger.show_total(total_steps)
        if place.batches == self._batches_noted:
            return
        self._batches_noted = place.batches
        note = f"epoch {place.epoch} ended after {place.batches} of {promised} batches; the data gave no more"
        if place.batches > promised:
            note = f"epoch {place.epoch} had {place.batches} batches; {promised} were expected"
        if isinstance(self._config.options.schedule, Schedule):
            note += f". The schedule is for {self._run.total_steps} steps"
        self._logger.add_note(note)

    def _add_reading(self, message: str, seconds: float) -> None:
        """Record that memory ran out in reading a batch, which was read again."""
        how = self._state.settings.describe()
        self._logger.add_recovery(
            Recovery(
                step=self._state.step + 1,
                during="reading",
                message=message,
                before=how,
                after=how,
                seconds=seconds,
            )
        )

    def _take_step(self, batch: Batch, data_seconds: float) -> None:
        """Take a step on a batch, and tell of it."""
        record = self._taken(batch, data_seconds)
        self._logger.add_step(record, self._memory_text())
        if len(self._logger.steps) == STEPS_BEFORE_ADVICE:
            self._advise_on_data()
        self._callbacks.on_step(record)

    def _taken(self, batch: Batch, data_seconds: float) -> StepRecord:
        """Take a step, and move on in the data if it was taken, even where an error comes after it."""
        before = self._state.step
        is_measured = self._is_to_be_measured(batch)
        if is_measured and self._holds_copies():
            self._logger.note(_COPIES_NOTE)
        try:
            record = self._runner.run(
                batch,
                epoch=self._stream.position.epoch,
                data_seconds=data_seconds,
                measure_memory=is_measured,
            )
            return replace(record, mfu=self._run.utilisation.of(record, batch))
        finally:
            if self._state.step > before:
                self._stream.advance()

    def _has_enough(self) -> bool:
        return self._config.length.has_enough(self._state.step)

    def _is_to_be_saved(self) -> bool:
        every = self._config.options.save_every
        return every is not None and self._state.step % every == 0

    def _is_to_be_measured(self, batch: Batch) -> bool:
        """Whether the memory of the next step is measured: once, in a steady step on a full batch.

        A resumed run counts anew: what its first updates hold on the host besides is not what a step takes.
        """
        total_steps, before = self._run.total_steps, self._start
        measured_update = MEASURED_UPDATE
        if total_steps is not None:
            measured_update = min(MEASURED_UPDATE, total_steps - before.taken)
        is_steady = self._state.updates - before.updates >= max(measured_update - 1, 1)
        layout = layout_of(self._config.job, whole=self._config.settings.global_batch_size)
        return self._runner.peak is None and is_steady and layout.count(batch) >= self._full_samples

    def _holds_copies(self) -> bool:
        """Whether copies on the host, by which an update can be taken back, are in the memory of the device."""
        is_early = self._state.updates - self._start.updates < MEASURED_UPDATE - 1
        shares_memory = self._config.device.type == "cpu" and not self._state.parallel.is_sharded
        return is_early and shares_memory

    @property
    def _full_samples(self) -> int:
        """Samples that bring a step to its peak: a second micro-batch, run beside the gradients of a first; all
        where the loss couples them."""
        settings = self._config.settings
        of_rank = settings.rank_batch_size
        if self._config.job.embed is None:
            of_rank = min(of_rank, 2 * settings.micro_batch_size)
        return of_rank * self._ranks.count

    def _validator(self) -> Validator | None:
        """What validates under the settings as they are now; None without validation data."""
        if self._run.data.validation is None:
            return None
        return Validator(
            self._state,
            self._config.job,
            self._run.data.validation,
            on_recovery=self._logger.add_recovery,
        )

    def _validate(self, validator: Validator) -> None:
        """Validate the model, or its average, and tell of it, unless a stop is requested meanwhile."""
        self._state.broadcast_buffers()
        with self._state.averaged():
            record = validator.run(is_stopped=self._stop.is_requested, on_samples=self._logger.show_validating)
            if record is None:
                return
            run_dir = self._config.run_dir
            is_written = run_dir is not None and self._logger.is_best(record)
            model = self._state.whole_model(run_dir) if is_written else self._state.model
            self._logger.add_validation(record, model)
        self._callbacks.on_validation(record)

    def _memory_text(self) -> str:
        """How much memory is in use, or will be, for a reader."""
        plan, device, peak = self._config.plan, self._config.device, self._runner.peak
        budget_bytes = None if plan is None else plan.budget_bytes
        if device.type == "cuda":
            # what the process holds of the device, as the budget means it, but for the context
            return memory_text(torch.cuda.max_memory_reserved(device), budget_bytes)
        if peak is not None:
            return memory_text(peak.allocated_bytes, budget_bytes)
        predicted_bytes = None if plan is None else plan.predicted_peak_allocated_bytes
        return memory_text(predicted_bytes, budget_bytes, predicted=True)

    def _advise_on_data(self) -> None:
        on_gpu = self._config.device.type == "cuda"
        for label, line in feeding_lines(self._logger.steps, self._data_loading, on_gpu=on_gpu):
            self._logger.note(f"{label}  {line}")

    def _handle_signal(self, number: signal.Signals) -> None:
        self._stop.handle(number)
        if self._config.shows_progress:
            write_from_signal("\nEnding after this step; the weights are saved. Once more to stop at once.\n")
