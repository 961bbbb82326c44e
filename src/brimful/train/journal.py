"""The records of a run, kept in memory, shown, and written to the run directory if there is one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from brimful.errors import SaveError, UsageError
from brimful.job import Job
from brimful.planning import Plan
from brimful.settings import Settings, settings_to_json
from brimful.train.progress import ProgressDisplay, recovery_text
from brimful.train.run_directory import AVERAGE, BEST, JOB, PLAN, RESULT, SETTINGS, WEIGHTS, RunDirectory
from brimful.train.saves import Save, Saves
from brimful.train.step_log import StepLog
from brimful.training import (
    Recovery,
    StepRecord,
    TrainingResult,
    ValidationRecord,
    step_from_json,
    step_to_json,
    validation_from_json,
    validation_to_json,
)


class Journal:
    """Everything a run tells and leaves behind; a context that opens it and closes it.

    A run that fails before its first step leaves the run directory empty.

    Args:
        run_dir: A new or empty directory; None writes nothing.
        plan: The plan, or plain settings.
        job: What is trained.
        progress: Shows the run.
        keep_saves: How many saves to keep, the newest.
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
        resumed: Save | None = None,
        saves: Saves | None = None,
    ) -> None:
        self.steps = StepLog()
        self.validations: list[ValidationRecord] = []
        self.recoveries: list[Recovery] = []
        self.saved_step: int | None = None
        """After how many steps the weights were saved last; None before that."""
        self.saved_run_step: int | None = None if resumed is None else resumed.step
        """After how many steps the run was saved last; None before that."""
        self._run_dir = run_dir
        self._plan = plan
        self._job = job
        self._progress = progress
        self._resumed = resumed
        self._saves = saves or (None if run_dir is None else Saves(run_dir, keep=keep_saves))
        self._directory: RunDirectory | None = None

    def __enter__(self) -> Self:
        if self._run_dir is not None:
            self._directory = RunDirectory(self._run_dir, resumes=self._resumed is not None)
            if self._resumed is not None:
                assert self._saves is not None
                self._saves.set_aside_after(self._resumed.step)
                self._read(self._directory.cut_metrics(self._resumed.state["metrics_bytes"]))
            if isinstance(self._plan, Plan):
                self._directory.write_json(PLAN, self._plan.to_json())
            else:
                self._directory.write_json(SETTINGS, settings_to_json(self._plan))
            if self._job.about is not None:
                self._directory.write_json(JOB, dict(self._job.about))
        self._progress.start()
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
            self._directory.append_metrics({"kind": "step"} | step_to_json(record))
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
            self._directory.append_metrics({"kind": "recovery"} | asdict(recovery))
        self._progress.show_note(recovery_text(recovery))

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
            self._directory.append_metrics({"kind": "validation"} | validation_to_json(record))
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

    def save(self, model: nn.Module, step: int, state: dict[str, Any]) -> None:
        """Write what the run needs to go on, while it goes on.

        A later save that fails is told, and training goes on with those before it.

        Args:
            model: Its parameters and buffers.
            step: Steps taken.
            state: All else.

        Raises:
            SaveError: The first save could not be written.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        self.saved_run_step = step
        if self._saves is None:
            return
        try:
            self._saves.wait()
        except SaveError as error:
            self._note_failure(error)
        if self._directory is not None:
            self._directory.bring_metrics_to_disk()
            state = state | {"metrics_bytes": self._directory.metrics_bytes}
        self._saves.write(step, model, state)

    def wait_for_save(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            SaveError: It could not be written; those before it are whole.
        """
        if self._saves is not None:
            self._saves.wait()

    def known(self) -> tuple[StepLog, list[ValidationRecord], list[Recovery]]:
        """Everything that was told so far."""
        return self.steps, self.validations, self.recoveries

    def know(self, steps: StepLog, validations: list[ValidationRecord], recoveries: list[Recovery]) -> None:
        """Take over what another rank has read of a run that goes on."""
        self.steps, self.validations, self.recoveries = steps, validations, recoveries

    def note(self, note: str) -> None:
        """Show a line."""
        self._progress.show_note(note)

    def _note_failure(self, error: SaveError) -> None:
        if self._directory is None:  # the first rank tells
            return
        self._progress.show_note(str(error))
        with suppress(SaveError):  # the disk may be full
            self._directory.append_metrics({"kind": "failed save", "message": str(error)})

    def _read(self, lines: Iterable[dict[str, Any]]) -> None:
        """Take over what was told before the save that the run goes on from."""
        for line in lines:
            kind = line.pop("kind")
            if kind == "step":
                self.steps.append(step_from_json(line))
            elif kind == "validation":
                self.validations.append(validation_from_json(line))
            elif kind == "recovery":
                self.recoveries.append(Recovery(**line))

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
