"""The records of a run, kept in memory, shown, and written to the run directory if there is one."""

from __future__ import annotations

import math
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from brimful.codec import to_json_document
from brimful.errors import SaveError, UsageError
from brimful.job import Job
from brimful.planner import Plan
from brimful.results import (
    Recovery,
    StepRecord,
    TrainingResult,
    ValidationRecord,
)
from brimful.settings import Settings
from brimful.trainer.monitor.history import read_history
from brimful.trainer.monitor.progress import ProgressDisplay, recovery_text
from brimful.trainer.monitor.step_log import StepLog
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.restore import Save
from brimful.trainer.storage.run_directory import JOB, METRICS, PLAN, RESULT, SETTINGS, RunDirectory
from brimful.trainer.storage.saves import Saves
from brimful.trainer.storage.unsaved import set_unsaved_run_aside
from brimful.trainer.storage.weights import AVERAGE, BEST, WEIGHTS


class RunLogger:
    """Everything a run tells and leaves behind; a context that opens it and closes it.

    A run that fails before its first step leaves the run directory empty.

    Args:
        run_dir: A new or empty directory; None writes nothing.
        plan: The plan, or plain settings.
        job: What is trained.
        progress: Shows the run.
        keep_saves: How many saves to keep, the newest.
        may_resume: `run_dir` may have a run in it; one without a save is set aside.
        resumed: The save that the run goes on from; None begins it.
        saves: Writes them where every rank has a part of it; None where one writes them whole.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None,
        plan: Plan | Settings,
        job: Job,
        progress: ProgressDisplay,
        keep_saves: int = 2,
        may_resume: bool = False,
        resumed: Save | None = None,
        saves: Saves | None = None,
    ) -> None:
        self.steps = StepLog()
        self.validations = [] if resumed is None else list(resumed.checkpoint.validations)
        self.recoveries: list[Recovery] = []
        self.notes: list[str] = []
        self.saved_step: int | None = None
        """After how many steps the weights were saved last; None before that."""
        self._run_dir = run_dir
        self._plan = plan
        self._job = job
        self._progress = progress
        self._may_resume = may_resume
        self._resumed = resumed
        resumed_step = None if resumed is None else resumed.step
        self._requested_step = resumed_step
        self._saves = saves
        if saves is None and run_dir is not None:
            self._saves = Saves(run_dir, keep=keep_saves, saved_step=resumed_step)
        self._directory: RunDirectory | None = None

    def __enter__(self) -> Self:
        aside = None
        if self._run_dir is not None:
            if self._may_resume and self._resumed is None:
                aside = set_unsaved_run_aside(self._run_dir)
            self._directory = RunDirectory(self._run_dir, resumes=self._may_resume)
            if self._resumed is not None:
                assert self._saves is not None
                self._saves.set_aside_after(self._resumed.step)
                self._read_history(self._directory, self._resumed)
            if isinstance(self._plan, Plan):
                self._directory.write_json(PLAN, self._plan.to_json())
            else:
                self._directory.write_json(SETTINGS, to_json_document(self._plan))
            if self._job.about is not None:
                self._directory.write_json(JOB, dict(self._job.about))
        self._progress.start()
        if aside is not None:
            self.note(
                f"the run in {self._run_dir} ended before its first save, so it starts from the beginning; "
                f"what it left is in {aside}"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._saves is not None and kind is not None:
            with suppress(SaveError, UsageError):  # there is an error already
                self._saves.wait()
        if self._directory is not None:
            if kind is not None and not self.steps and self._resumed is None:
                self._directory.discard()
            self._directory.close()

    @property
    def weights_path(self) -> Path | None:
        """Where the latest weights are or will be; None without a run directory."""
        return None if self._run_dir is None else self._run_dir / WEIGHTS

    def add_step(self, record: StepRecord, memory: str) -> None:
        """Keep, write and show a step.

        Args:
            record: The step.
            memory: How much is in use, for a reader.

        Raises:
            SaveError: It could not be written.
        """
        self.steps.append(record)
        if self._directory is not None:
            self._directory.append_metrics({"kind": "step"} | to_json_document(record))
        self._progress.show_step(record, memory)

    def add_recovery(self, recovery: Recovery) -> None:
        """Keep, write and show that memory ran out.

        Args:
            recovery: How training goes on.

        Raises:
            SaveError: It could not be written.
        """
        self.recoveries.append(recovery)
        if self._directory is not None:
            self._directory.append_metrics({"kind": "recovery"} | to_json_document(recovery))
        self._progress.show_note(recovery_text(recovery))

    def show_validating(self, samples: int) -> None:
        """Show how far a validation is.

        Args:
            samples: Validated so far.
        """
        self._progress.show_validating(samples)

    def add_validation(self, record: ValidationRecord, model: nn.Module) -> None:
        """Keep, write and show a validation; keep the weights apart if none had a lower loss.

        Args:
            record: The validation.
            model: What was validated.

        Raises:
            SaveError: It, or the weights, could not be written.
        """
        is_best = self.is_best(record)
        self.validations.append(record)
        if self._directory is not None:
            self._directory.append_metrics({"kind": "validation"} | to_json_document(record))
            if is_best:
                metadata = self._metadata(record.step) | {"validation_loss": repr(record.loss)}
                self._directory.save_weights(model, BEST, metadata)
        self._progress.show_validation(record)

    def is_best(self, record: ValidationRecord) -> bool:
        """Whether no validation before it had a loss as low."""
        return record.loss < min((earlier.loss for earlier in self.validations), default=math.inf)

    def save_weights(self, model: nn.Module, step: int) -> None:
        """Write the latest weights, unless they were written after the same step.

        Args:
            model: Its parameters and buffers.
            step: Steps taken.

        Raises:
            SaveError: They could not be written; those saved before stay.
        """
        if self._directory is not None and self.saved_step != step:
            self._directory.save_weights(model, WEIGHTS, self._metadata(step))
            self.saved_step = step

    def save_average(self, model: nn.Module, step: int) -> None:
        """Write the average of the weights, which the model has for its own meanwhile.

        Args:
            model: Its parameters are the average.
            step: Steps taken.

        Raises:
            SaveError: It could not be written; the one saved before stays.
        """
        if self._directory is not None:
            self._directory.save_weights(model, AVERAGE, self._metadata(step))

    @property
    def validations_without_improvement(self) -> int:
        """How many validations there were since the one with the lowest loss."""
        losses = [record.loss for record in self.validations]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0

    @property
    def saved_run_step(self) -> int | None:
        """Of the newest save that is known to be whole; None if there is none, or another rank writes them."""
        return None if self._saves is None else self._saves.saved_step

    def needs_save(self, step: int) -> bool:
        """Whether the run is neither saved after a step nor being saved.

        Args:
            step: Steps taken.

        Returns:
            False as well while the save is being written; `wait_for_save` tells how that ends.
        """
        return self._requested_step != step

    def save(self, model: nn.Module, checkpoint: Checkpoint) -> None:
        """Write what the run is resumed from, while training continues.

        A later save that fails is noted, and training continues with those before it.

        Args:
            model: Its parameters and buffers.
            checkpoint: All else, but what is recorded here.

        Raises:
            SaveError: The first save could not be written.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        if self._saves is not None:
            try:
                self.wait_for_save()
            except SaveError as error:
                self._note_failure(error)
            recorded = replace(checkpoint, validations=tuple(self.validations))
            if self._directory is not None:
                self._directory.bring_metrics_to_disk()
                recorded = replace(recorded, metrics_bytes=self._directory.metrics_bytes)
            self._saves.write(model, recorded)
        self._requested_step = checkpoint.state.step

    def wait_for_save(self) -> None:
        """Wait until the save under way is on the disk.

        Raises:
            SaveError: It could not be written; those before it are whole.
        """
        if self._saves is not None:
            try:
                self._saves.wait()
            except (SaveError, UsageError):
                self._requested_step = None
                raise

    def history(self) -> tuple[StepLog, list[Recovery], list[str]]:
        """What was read from `metrics.jsonl` of a run that is resumed, and recorded since."""
        return self.steps, self.recoveries, self.notes

    def load_history(self, steps: StepLog, recoveries: list[Recovery], notes: list[str]) -> None:
        """Take over what the first rank has read."""
        self.steps, self.recoveries, self.notes = steps, recoveries, notes

    def note(self, note: str) -> None:
        """Show a line."""
        self._progress.show_note(note)

    def add_note(self, note: str) -> None:
        """Keep, write and show what was not as it was promised; once, also if the run is resumed.

        Args:
            note: A line.

        Raises:
            SaveError: It could not be written.
        """
        if note in self.notes:
            return
        self.notes.append(note)
        if self._directory is not None:
            self._directory.append_metrics({"kind": "note", "message": note})
        self._progress.show_note(note)

    def show_total(self, total_steps: int | None) -> None:
        """Show how long the run is, as the data turn out to have other lengths than they said."""
        self._progress.set_total(total_steps)

    def _note_failure(self, error: SaveError) -> None:
        if self._directory is None:  # the first rank tells
            return
        self._progress.show_note(str(error))
        with suppress(SaveError):  # the disk may be full
            self._directory.append_metrics({"kind": "failed save", "message": str(error)})

    def _read_history(self, directory: RunDirectory, resumed: Save) -> None:
        """Take over what was recorded before the save that the run is resumed from."""
        history = read_history(directory.read_metrics(), resumed.checkpoint)
        aside = directory.cut_metrics(history.lines, keeps_copy=history.is_damaged)
        self.load_history(history.steps, history.recoveries, history.notes)
        if history.is_damaged or len(history.steps) < resumed.step:
            kept = "" if aside is None else f" What was there is kept as {aside.name}."
            warnings.warn(
                f"{directory.path / METRICS} is damaged: it has {len(history.steps)} of the {resumed.step} "
                f"steps before the save. Training resumes exactly; the record of those steps is lost.{kept}",
                stacklevel=2,
            )

    def write_result(self, result: TrainingResult) -> None:
        """Write the result of the run.

        Args:
            result: What the run came to.

        Raises:
            SaveError: It could not be written.
        """
        if self._directory is not None:
            self._directory.write_json(RESULT, result.to_json())

    def _metadata(self, step: int) -> dict[str, str]:
        return {"job": self._job.name, "step": str(step)}
