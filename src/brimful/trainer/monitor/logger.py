"""Logs a run: keeps its records in memory, writes them to the run directory and shows them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from torch import nn

from brimful.results import Recovery, StepRecord, ValidationRecord
from brimful.trainer.monitor.history import RunHistory
from brimful.trainer.monitor.progress import ProgressDisplay, recovery_text
from brimful.trainer.monitor.run_files import RunFiles
from brimful.trainer.storage.weights import BEST


class RunLogger:
    """Logs each record of a run to `history`, `files` and `progress`; a context manager that opens them.

    A method that cannot write a file raises SaveError.
    """

    def __init__(self, files: RunFiles, progress: ProgressDisplay) -> None:
        self.files = files
        """Writes the files."""
        self.progress = progress
        """Shows the progress."""
        self.history = RunHistory()
        """The records so far."""

    def __enter__(self) -> Self:
        self.history = self.files.open_directory()
        self.progress.start()
        if self.files.set_aside is not None:
            run_dir, aside = self.files.run_dir, self.files.set_aside
            self.progress.show_note(
                f"the run in {run_dir} ended before its first save, so it starts from the beginning; "
                f"what it left is in {aside}"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.files.close(failed=kind is not None, has_steps=bool(self.history.steps))

    def add_step(self, record: StepRecord, memory: str) -> None:
        """Log a step, with the peak memory as text."""
        self.history.steps.append(record)
        self.files.append_record("step", record)
        self.progress.show_step(record, memory)

    def add_recovery(self, recovery: Recovery, *, lost: str = "nothing is lost") -> None:
        """Log that memory ran out, and how training continues.

        `lost` says what is lost; the default is right for a recovery inside a launch.
        """
        self.history.recoveries.append(recovery)
        self.files.append_record("recovery", recovery)
        self.progress.show_note(recovery_text(recovery, lost=lost))

    def add_validation(self, record: ValidationRecord, model: nn.Module) -> None:
        """Log a validation; write the model's weights as the best ones if its loss is the lowest so far."""
        is_best = self.history.is_best(record)
        self.history.validations.append(record)
        self.files.append_record("validation", record)
        if is_best:
            self.files.write_weights(model, BEST, record.step, validation_loss=repr(record.loss))
        self.progress.show_validation(record)

    def add_note(self, note: str) -> None:
        """Log a difference from what was announced, unless this run, or the one it resumes, has logged it.

        `note` is one line.
        """
        if note in self.history.notes:
            return
        self.history.notes.append(note)
        self.files.append_message("note", note)
        self.progress.show_note(note)
