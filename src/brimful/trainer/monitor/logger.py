"""Logs a run: keeps its records in memory, writes them beside its weights and settings, and shows them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from brimful.codec import to_json_document
from brimful.errors import SaveError, UsageError
from brimful.job import Job
from brimful.planner import Plan
from brimful.results import (
    EpochRecord,
    Recovery,
    SelfCorrection,
    StepRecord,
    TrainingResult,
    ValidationRecord,
)
from brimful.settings import Settings
from brimful.trainer.monitor.history import RunHistory, restored_history
from brimful.trainer.monitor.progress import ProgressDisplay, recovery_text
from brimful.trainer.storage.restore import Save
from brimful.trainer.storage.run_directory import (
    JOB,
    PLAN,
    RESULT,
    SETTINGS,
    RunDirectory,
    set_unsaved_run_aside,
)
from brimful.trainer.storage.saves import Saves
from brimful.trainer.storage.weights import BEST, WEIGHTS


@dataclass(slots=True, kw_only=True, eq=False)
class RunLogger:
    """Logs each record of a run to `history`, `metrics.jsonl` and `progress`; a context manager.

    A method that cannot write a file raises SaveError; the file before it stays.
    """

    run_dir: Path | None
    """A new or empty directory, or one with a run if `may_resume`; None writes nothing: on every rank but
    the first."""
    plan: Plan | Settings
    job: Job
    may_resume: bool
    resumed: Save | None
    """The save to resume from; None starts a new run, and sets one without a save aside."""
    saves: Saves | None
    """Writes the checkpoints; None on a rank that writes none."""
    progress: ProgressDisplay
    history: RunHistory = field(default_factory=RunHistory)
    """The records so far."""
    weights_step: int | None = None
    """The step of the latest weights written; None before that."""
    _directory: RunDirectory | None = None

    def __enter__(self) -> Self:
        """Open the run directory, with the records of the resumed run; write how the run is trained."""
        if self.resumed is not None:
            self.history.validations += self.resumed.checkpoint.validations
        aside = None if self.run_dir is None else self._open_directory(self.run_dir)
        self.progress.start()
        if aside is not None:
            self.progress.show_note(
                f"the run in {self.run_dir} ended before its first save, so it starts from the beginning; "
                f"what it left is in {aside}"
            )
        return self

    def _open_directory(self, run_dir: Path) -> Path | None:
        """Open the run directory; return where an earlier run without a save was set aside, if one was."""
        aside = set_unsaved_run_aside(run_dir) if self.may_resume and self.resumed is None else None
        self._directory = RunDirectory(run_dir, resumes=self.may_resume)
        if self.resumed is not None:
            assert self.saves is not None
            self.saves.set_aside_after(self.resumed.step)
            self.history = restored_history(self._directory, self.resumed.checkpoint)
        if isinstance(self.plan, Plan):
            self._directory.write_json(PLAN, self.plan.to_json())
        else:
            self._directory.write_json(SETTINGS, to_json_document(self.plan))
        if self.job.about is not None:
            self._directory.write_json(JOB, dict(self.job.about))
        return aside

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the run directory, and leave it empty if the run failed before its first step."""
        self.progress.stop()
        failed = kind is not None
        if self.saves is not None and failed:
            with suppress(SaveError, UsageError):  # there is an error already
                self.saves.wait()
        if self._directory is not None:
            if failed and not self.history.steps and self.resumed is None:
                self._directory.discard()
            self._directory.close()

    def add_step(self, record: StepRecord, memory: str) -> None:
        """Log a step, with the peak memory as text."""
        self.history.steps.append(record)
        self.append("step", record)
        self.progress.show_step(record, memory)

    def add_epoch(self, record: EpochRecord) -> None:
        """Log an epoch that has ended."""
        self.history.epochs.append(record)
        self.append("epoch", record)
        self.progress.show_epoch(record)

    def add_recovery(self, recovery: Recovery, *, lost: str = "nothing is lost") -> None:
        """Log that memory ran out, and how training continues.

        `lost` says what is lost; the default is right for a recovery inside a launch.
        """
        self.history.recoveries.append(recovery)
        self.append("recovery", recovery)
        self.progress.show_note(recovery_text(recovery, lost=lost))

    def add_validation(self, record: ValidationRecord, model: nn.Module) -> None:
        """Log a validation; write the model's weights as the best ones if its loss is the lowest so far."""
        is_best = self.history.is_best(record)
        self.history.validations.append(record)
        self.append("validation", record)
        if is_best:
            self.write_weights(model, BEST, record.step, validation_loss=repr(record.loss))
        self.progress.show_validation(record)

    def add_note(self, note: str) -> None:
        """Log a difference from what was announced, unless this run, or the one it resumes, has logged it."""
        if note in self.history.notes:
            return
        self.history.notes.append(note)
        self.append("note", note)
        self.progress.show_note(note)

    def append(
        self,
        kind: str,
        what: StepRecord | EpochRecord | Recovery | ValidationRecord | SelfCorrection | str,
    ) -> None:
        """Append a record, or a message of one line, to `metrics.jsonl`, with its `kind`."""
        if self._directory is not None:
            document = {"message": what} if isinstance(what, str) else to_json_document(what)
            self._directory.append_metrics({"kind": kind} | document)

    def flush_metrics(self) -> int:
        """Flush `metrics.jsonl` to the disk; return its length in bytes, 0 without a run directory."""
        return 0 if self._directory is None else self._directory.flush_metrics()

    @property
    def weights_path(self) -> Path | None:
        """Path of the latest weights, written or not yet; None without a run directory."""
        return None if self.run_dir is None else self.run_dir / WEIGHTS

    def write_latest_weights(self, model: nn.Module, step: int) -> None:
        """Write the latest weights, unless those of the same step are written."""
        if self._directory is not None and self.weights_step != step:
            self.write_weights(model, WEIGHTS, step)
            self.weights_step = step

    def write_weights(self, model: nn.Module, name: str, step: int, **metadata: str) -> None:
        """Write parameters and buffers to the file `name`, with the job's name, the step and the metadata."""
        if self._directory is not None:
            of_run = {"job": self.job.name, "step": str(step)}
            self._directory.save_weights(model, name, of_run | metadata)

    def write_result(self, result: TrainingResult) -> None:
        """Write the result of the run."""
        if self._directory is not None:
            self._directory.write_json(RESULT, result.to_json())
