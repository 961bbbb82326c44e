"""A run in progress: set up, train epoch after epoch, validate, save, and end well."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from brimful.batches import layout_of
from brimful.execution.label_watch import LabelWatch
from brimful.execution.length_watch import LengthWatch
from brimful.execution.precision import matmul_precision
from brimful.execution.random_state import RandomState
from brimful.job import Batch
from brimful.profiling import check_labels
from brimful.report.data_loading import feeding_lines
from brimful.results import EpochRecord, StepRecord, StopReason, TrainingResult
from brimful.trainer.checkpointer import Checkpointer
from brimful.trainer.data.stream import worker_errors
from brimful.trainer.monitor.callbacks import Hook
from brimful.trainer.monitor.mfu import Utilisation
from brimful.trainer.run.epoch_length import EpochLengthCheck
from brimful.trainer.run.result import result_of
from brimful.trainer.run.save_on_error import SaveOnError
from brimful.trainer.run.stop import Stop, stops_on_signals
from brimful.trainer.run.validation import Validator
from brimful.trainer.setup import RunContext, make_logger, make_runner
from brimful.trainer.step.memory import MemoryMeter
from brimful.trainer.step.self_correction import SelfCorrecting
from brimful.utils.display import write_from_signal

_COPIES_NOTE = (
    "the run is too short for a steady step to be measured: in this one, as in the first two of every launch, "
    "parameters and optimizer state are on the host a second time"
)

STEPS_BEFORE_ADVICE = 50
"""The step after which a note reports, once, how long training waits for its data: late enough to know, early
enough to act."""


class Run:
    """Trains from the start of a run to its end; `call` calls a method of the callbacks with a record."""

    def __init__(self, run: RunContext, *, stop: Stop, call: Callable[[Hook, Any], None]) -> None:
        self._run = run
        self._config = run.config
        self._state = run.state
        self._stop = stop
        self._call = call
        self._utilisation = Utilisation(run.config.plan, run.config.job)
        self._logger = make_logger(run)
        self._runner = make_runner(run, self._logger)
        self._checkpointer = Checkpointer(config=run.config, state=run.state, logger=self._logger)
        self._memory = MemoryMeter(
            run.config, run.state, run.start, self._runner, batches=run.batches, total_steps=run.total_steps
        )
        layout = layout_of(run.config.job, whole=run.config.settings.global_batch_size)
        self._lengths = LengthWatch(() if run.config.plan is None else run.config.plan.sample_sizes, layout)
        checks = run.config.options.verify and not run.state.parallel.is_sharded  # a capture could meet shards
        refuse = partial(check_labels, run.config.job) if checks else None
        self._labels = LabelWatch.of_job(run.config.job, layout, refuse)
        self._epoch_length = EpochLengthCheck(run, self._logger)
        self._self_correction = SelfCorrecting(run.config, run.state, self._runner, self._logger)

    def train(self) -> TrainingResult:
        """Train to the end; afterwards the model has its own forward again, even after an error.

        `Trainer.fit` lists the errors.
        """
        result: TrainingResult | None = None
        try:
            if self._run.start.saved is not None:
                self._checkpointer.restore(self._run.start.saved)
            result = self._train()
            return result
        finally:
            self._runner.close()
            self._call("on_end", result)

    def _train(self) -> TrainingResult:
        precision = self._state.settings.precision
        save_on_error = SaveOnError(
            config=self._config,
            state=self._state,
            logger=self._logger,
            checkpointer=self._checkpointer,
            memory=self._memory,
        )
        with self._logger, matmul_precision(precision), stops_on_signals(self._handle_signal):
            self._log_start()
            self._dry_run()
            stopped_because = save_on_error.run(self._run_epochs)
            self._checkpointer.wait_for_save()
            result = result_of(
                self._run, self._logger.history, peak=self._runner.peak, stopped_because=stopped_because
            )
            self._logger.write_result(result)
        return result

    def _log_start(self) -> None:
        """Note how the run starts, and give every rank the records of the run that it resumes."""
        start = self._run.start
        if start.saved is not None:
            self._logger.history = self._state.ranks.broadcast(self._logger.history)
            self._logger.progress.show_note(f"resumed after step {start.saved.step} from {start.saved.path}")
        if start.fallback is not None:
            lost = "started from the beginning" if start.saved is None else "resumed from the last save"
            self._logger.add_recovery(start.fallback, lost=lost)
        decay = self._config.options.ema_decay
        if decay is not None and self._run.data.validation is not None:
            self._logger.progress.show_note(
                "validation, the best weights and early stopping are of the average of weights: begun at the "
                f"initial ones, with a decay of {decay:g} it follows in some {1 / (1 - decay):.0f} steps"
            )

    @worker_errors()
    def _dry_run(self, *, measure_memory: bool = False) -> Batch | None:
        """Check that the longest batch fits in memory, and return it, if the data know which one it is."""
        longest = self._run.data.longest
        if longest is None:
            return None
        with RandomState.kept():
            batch = longest(self._state.settings.global_batch_size) if callable(longest) else longest
        self._runner.dry_run(batch, measure_memory=measure_memory)
        return batch

    def _measure_larger(self, measured: Batch, *, is_first: bool) -> None:
        """After a measured step, measure the batches that take more: a large one before it, and the longest."""
        longest = self._dry_run(measure_memory=True) if is_first else None
        for batch in (measured, longest):
            early = None if batch is None else self._memory.note_measured(batch)
            if early is not None:
                self._runner.dry_run(early, measure_memory=True)
        self._runner.peak_is_as_planned = self._memory.is_as_planned

    @worker_errors()
    def _run_epochs(self) -> StopReason:
        """Train epoch after epoch, and write the weights after each."""
        stream, options = self._state.stream, self._config.options
        validator = None
        if self._run.data.validation is not None:
            validator = Validator(self._config, self._state, self._run.data, self._logger)
        stopped_because = None
        if options.has_enough(self._state.step):  # a resumed run, which may have ended before it validated
            stream.restore_random()
            stopped_because = self._validate(validator)
        while not (options.has_enough(self._state.step) or options.is_past(stream.position.epoch)):
            stopped_because = self._run_epoch(validator)
            if stopped_because is not None:
                break
            self._checkpointer.save_weights()
            stream.begin_next_epoch()
        self._checkpointer.save_weights()
        return stopped_because or StopReason.FINISHED

    def _run_epoch(self, validator: Validator | None) -> StopReason | None:
        """Train on the rest of an epoch, save and validate when due; return why the run stops, if it does."""
        ranks, stop = self._state.ranks, self._stop
        has_ended, stopped_because = False, None
        on_out_of_memory = self._runner.recovery.record_reading
        rest = self._state.stream.rest_of_epoch(stop.is_requested, on_out_of_memory)
        if self._state.step and self._is_validation_due():  # a resumed run, which ended before this one
            stopped_because = self._validate(validator)
            if stopped_because is not None:
                return stopped_because
        self._runner.epoch_peak.begin(is_whole=self._state.stream.position.batches == 0)
        for batch, data_seconds in rest:
            self._take_step(batch, data_seconds)
            stopped_because = stop.synced(ranks)
            if stopped_because is None and self._is_validation_due():
                stopped_because = self._validate(validator)  # before a save, which has its result
            self._checkpointer.save_if_due()
            if stopped_because is not None or self._config.options.has_enough(self._state.step):
                break
        else:
            has_ended = True
        stopped_because = stopped_because or stop.synced(ranks)
        if has_ended and stopped_because is None:
            self._epoch_length.check()
            self._log_epoch()
        self._checkpointer.save()
        return stopped_because or self._validate(validator)

    def _log_epoch(self) -> None:
        """Log the epoch that has ended, unless that was before this run was resumed."""
        place, epochs = self._state.stream.position, self._logger.history.epochs
        if epochs and epochs[-1].epoch == place.epoch:
            return
        peak = self._runner.epoch_peak.found()
        record = EpochRecord(
            epoch=place.epoch,
            step=self._state.step,
            seconds=self._logger.history.epoch_seconds(place.epoch, place.batches),
            measured_peak_allocated_bytes=None if peak is None else peak.allocated_bytes,
            measured_peak_reserved_bytes=None if peak is None else peak.reserved_bytes,
            measured_peak_device_bytes=None if peak is None else peak.device_bytes,
            average_bytes=0 if self._state.average is None else self._state.average.held_bytes,
        )
        self._logger.add_epoch(record)
        self._call("on_epoch", record)

    def _is_validation_due(self) -> bool:
        every = self._config.options.validate_every
        return every is not None and self._state.step % every == 0

    def _validate(self, validator: Validator | None) -> StopReason | None:
        """Validate unless this step was validated; return why the run stops, if it does."""
        validations = self._logger.history.validations
        if validator is None:
            return None
        if not validations or validations[-1].step != self._state.step:
            record = validator.run(is_stopped=self._stop.is_requested)
            if record is not None:
                self._call("on_validation", record)
        stopped_because = self._stop.synced(self._state.ranks)
        without = self._logger.history.validations_without_improvement
        if stopped_because is None and self._config.options.is_out_of_patience(without):
            return StopReason.NOT_IMPROVING
        return stopped_because

    def _take_step(self, batch: Batch, data_seconds: float) -> None:
        """Take a step on a batch and log it."""
        record = self._run_step(batch, data_seconds)
        self._logger.add_step(record, self._memory.peak_text())
        steps = self._logger.history.steps
        if len(steps) == STEPS_BEFORE_ADVICE:
            on_gpu = self._config.device.type == "cuda"
            for label, line in feeding_lines(steps, self._run.data_loading, on_gpu=on_gpu):
                self._logger.progress.show_note(f"{label}  {line}")
        self._call("on_step", record)
        self._self_correction.after_step(record)

    def _run_step(self, batch: Batch, data_seconds: float) -> StepRecord:
        """Run a step, and advance in the data once it is taken, even if an error follows."""
        before = self._state.step
        if (larger := self._lengths.larger(batch)) is not None:
            self._logger.add_note(f"step {before + 1}: {larger}")
        if (ignored := self._labels.ignored(batch, self._state.settings)) is not None:
            self._logger.add_note(f"step {before + 1}: {ignored}")
        is_first, is_measured = self._runner.peak is None, self._memory.measures(batch)
        if is_measured and self._memory.includes_copies:
            self._logger.progress.show_note(_COPIES_NOTE)
        try:
            record = self._runner.run(
                batch,
                epoch=self._state.stream.position.epoch,
                data_seconds=data_seconds,
                measure_memory=is_measured,
            )
            if is_measured and record.updated:
                self._measure_larger(batch, is_first=is_first)
            return replace(record, mfu=self._utilisation.of(record, batch))
        finally:
            if self._state.step > before:
                self._state.stream.advance()

    def _handle_signal(self, number: signal.Signals) -> None:
        self._stop.handle(number)
        saved = "" if self._config.run_dir is None else "; the weights are saved"
        write_from_signal(f"\n{number.name}: ending after this step{saved}. Once more to stop at once.\n")
