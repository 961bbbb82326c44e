"""The files of a run: its records, weights, settings and result."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path

from torch import nn

from brimful.codec import to_json_document
from brimful.errors import SaveError, UsageError
from brimful.job import Job
from brimful.planner import Plan
from brimful.results import Recovery, SelfCorrection, StepRecord, TrainingResult, ValidationRecord
from brimful.settings import Settings
from brimful.trainer.monitor.history import RunHistory, read_history
from brimful.trainer.storage.restore import Save
from brimful.trainer.storage.run_directory import JOB, METRICS, PLAN, RESULT, SETTINGS, RunDirectory
from brimful.trainer.storage.saves import Saves
from brimful.trainer.storage.unsaved import set_unsaved_run_aside
from brimful.trainer.storage.weights import WEIGHTS

Record = StepRecord | Recovery | ValidationRecord | SelfCorrection
"""A record that `metrics.jsonl` has a line for."""


class RunFiles:
    """Writes the files of a run, from `open_directory` to `close`. Without a run directory nothing is written.

    `run_dir` is None on every rank but the first. It is a new or empty directory; with `may_resume` it may
    contain a run, and one without a save is set aside. `resumed` is the save to resume from; None starts a new
    run. A method that cannot write a file raises SaveError; the file before it stays.
    """

    def __init__(
        self,
        run_dir: Path | None,
        *,
        plan: Plan | Settings,
        job: Job,
        may_resume: bool,
        resumed: Save | None,
        saves: Saves | None,
    ) -> None:
        self.saves = saves
        """Writes the checkpoints; None on a rank that writes none."""
        self.set_aside: Path | None = None
        """The directory with the files of an earlier run without a save; None if there was none."""
        self.weights_step: int | None = None
        """The step of the latest weights written; None before that."""
        self.run_dir = run_dir
        """The directory that this rank writes to; None writes nothing."""
        self._plan = plan
        self._job = job
        self._may_resume = may_resume
        self._resumed = resumed
        self._directory: RunDirectory | None = None

    def open_directory(self) -> RunHistory:
        """Open the run directory, write how the run is trained, and return the records of the resumed run.

        A new run has none. Raises RunDirectoryError if the directory is not empty, in use, or cannot be written
        to.
        """
        history = RunHistory()
        if self._resumed is not None:
            history.validations += self._resumed.checkpoint.validations
        if self.run_dir is None:
            return history
        if self._may_resume and self._resumed is None:
            self.set_aside = set_unsaved_run_aside(self.run_dir)
        self._directory = RunDirectory(self.run_dir, resumes=self._may_resume)
        if self._resumed is not None:
            assert self.saves is not None
            self.saves.set_aside_after(self._resumed.step)
            history = _restored_history(self._directory, self._resumed)
        if isinstance(self._plan, Plan):
            self._directory.write_json(PLAN, self._plan.to_json())
        else:
            self._directory.write_json(SETTINGS, to_json_document(self._plan))
        if self._job.about is not None:
            self._directory.write_json(JOB, dict(self._job.about))
        return history

    def close(self, *, failed: bool, has_steps: bool) -> None:
        """Close the run directory; leave it empty if the run failed before its first step.

        If an error ended the run (`failed`), this waits for the save under way.
        """
        if self.saves is not None and failed:
            with suppress(SaveError, UsageError):  # there is an error already
                self.saves.wait()
        if self._directory is not None:
            if failed and not has_steps and self._resumed is None:
                self._directory.discard()
            self._directory.close()

    @property
    def weights_path(self) -> Path | None:
        """Path of the latest weights, written or not yet; None without a run directory."""
        return None if self.run_dir is None else self.run_dir / WEIGHTS

    def append_record(self, kind: str, record: Record) -> None:
        """Append a record to `metrics.jsonl`, with its `kind`."""
        if self._directory is not None:
            self._directory.append_metrics({"kind": kind} | to_json_document(record))

    def append_message(self, kind: str, message: str) -> None:
        """Append a message of one line to `metrics.jsonl`, with its `kind`."""
        if self._directory is not None:
            self._directory.append_metrics({"kind": kind, "message": message})

    def flush_metrics(self) -> int:
        """Flush `metrics.jsonl` to the disk; return its length in bytes, 0 without a run directory."""
        if self._directory is None:
            return 0
        self._directory.bring_metrics_to_disk()
        return self._directory.metrics_bytes

    def write_latest_weights(self, model: nn.Module, step: int) -> None:
        """Write the latest weights, unless those of the same step are written."""
        if self._directory is not None and self.weights_step != step:
            self.write_weights(model, WEIGHTS, step)
            self.weights_step = step

    def write_weights(self, model: nn.Module, name: str, step: int, **metadata: str) -> None:
        """Write parameters and buffers to the file `name`, with the job's name, the step and the metadata."""
        if self._directory is not None:
            of_run = {"job": self._job.name, "step": str(step)}
            self._directory.save_weights(model, name, of_run | metadata)

    def write_result(self, result: TrainingResult) -> None:
        """Write the result of the run."""
        if self._directory is not None:
            self._directory.write_json(RESULT, result.to_json())


def _restored_history(directory: RunDirectory, resumed: Save) -> RunHistory:
    """Read the records up to the save, and cut `metrics.jsonl` there: the run continues from there."""
    saved = read_history(directory.read_metrics(), resumed.checkpoint)
    aside = directory.cut_metrics(saved.lines, keeps_copy=saved.is_damaged)
    steps = len(saved.history.steps)
    if saved.is_damaged or steps < resumed.step:
        kept = "" if aside is None else f" What was there is kept as {aside.name}."
        warnings.warn(
            f"{directory.path / METRICS} is damaged: it has {steps} of the {resumed.step} "
            f"steps before the save. Training resumes exactly; the record of those steps is lost.{kept}",
            stacklevel=2,
        )
    return saved.history
