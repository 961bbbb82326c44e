"""Shows the progress of a run: a bar on a terminal, elsewhere a line every few seconds.

If standard error cannot be written to, the run continues; see `display`.
"""

from __future__ import annotations

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from brimful.results import EpochRecord, Recovery, StepRecord, ValidationRecord
from brimful.utils.display import make_console
from brimful.utils.quantities import format_bytes, format_rates, format_seconds

SECONDS_BETWEEN_LINES = 10.0
_RECENT_STEPS = 20


class ProgressDisplay:
    """Shows the progress of a run; by itself nothing."""

    def start(self) -> None:
        """Start; called before the first step."""

    def show_step(self, record: StepRecord, memory: str) -> None:
        """Show a step, and the peak memory as text; empty if it is not known."""

    def show_epoch(self, record: EpochRecord) -> None:
        """Show the time and the peak memory of an epoch that has ended."""

    def show_validating(self, samples: int) -> None:
        """Show the number of samples validated in this pass; called after each micro-batch."""

    def show_validation(self, record: ValidationRecord) -> None:
        """Show a validation."""

    def show_note(self, note: str) -> None:
        """Show a line of text."""

    def set_total(self, total_steps: int | None) -> None:
        """Change the length of the run in optimizer steps; None if it is not known."""

    def stop(self) -> None:
        """Stop; called after the last step and when the run fails. Further calls do nothing."""


def make_progress(
    total_steps: int | None, *, show: bool, loss_unit: str | None = None, console: Console | None = None
) -> ProgressDisplay:
    """Make the display of a run on standard error: a bar on a terminal, else lines; nothing unless `show`.

    `loss_unit` names what the job counts, to show its rate beside samples per second.
    """
    if not show:
        return ProgressDisplay()
    console = console or make_console()
    pace = _Pace(total_steps, loss_unit)
    return _Bar(total_steps, pace, console) if console.is_terminal else _Lines(pace, console)


def show_title(title: str, console: Console | None = None) -> None:
    """Say on standard error which run follows, where a command trains more than once."""
    (console or make_console()).print(title, highlight=False, markup=False, soft_wrap=True)


def memory_text(peak_bytes: int | None, budget_bytes: int | None, *, predicted: bool = False) -> str:
    """Peak memory as text: "312 MiB of 640 MiB", with a "~" before a prediction."""
    if peak_bytes is None:
        return ""
    peak = f"{'~' if predicted else ''}{format_bytes(peak_bytes)}"
    return peak if budget_bytes is None else f"{peak} of {format_bytes(budget_bytes)}"


class _Pace:
    """The speed of the recent steps, including waiting for data, and the time left at that speed."""

    def __init__(self, total_steps: int | None, loss_unit: str | None) -> None:
        self.total_steps = total_steps
        self._loss_unit = loss_unit
        self._latest: StepRecord | None = None
        self._recent: deque[StepRecord] = deque(maxlen=_RECENT_STEPS)

    def add(self, record: StepRecord) -> None:
        self._latest = record
        if not record.memory_measured:  # measuring slows a step down
            self._recent.append(record)

    def of_total(self, step: int) -> str:
        """ "/60" for a step of 60; empty if the total is not known or exceeded."""
        return "" if self.total_steps is None or step > self.total_steps else f"/{self.total_steps}"

    def describe(self, memory: str) -> str:
        """Describe the latest step: "loss 1.23  154 samples/s  MFU 41%  312 MiB of 640 MiB  12 s left"."""
        assert self._latest is not None
        parts = [f"loss {self._latest.loss:.4g}"]
        seconds = sum(record.total_seconds for record in self._recent)
        if seconds:
            samples = sum(record.samples for record in self._recent) / seconds
            counted = sum(record.terms for record in self._recent) / seconds
            parts += format_rates(samples, counted, self._loss_unit)
        if seconds and all(record.mfu is not None for record in self._recent):
            useful_seconds = sum((record.mfu or 0.0) * record.total_seconds for record in self._recent)
            parts.append(f"MFU {useful_seconds / seconds:.0%}")
        parts.append(memory)
        if seconds and self.total_steps is not None and self._latest.step < self.total_steps:
            seconds_left = (self.total_steps - self._latest.step) * seconds / len(self._recent)
            parts.append(f"{format_seconds(seconds_left)} left")
        return "  ".join(part for part in parts if part)


class _Bar(ProgressDisplay):
    def __init__(self, total_steps: int | None, pace: _Pace, console: Console) -> None:
        self._pace = pace
        columns = (TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=total_steps, step=f"0{pace.of_total(0)}")

    def start(self) -> None:
        self._progress.start()

    def show_step(self, record: StepRecord, memory: str) -> None:
        self._pace.add(record)
        self._progress.update(
            self._task,
            completed=record.step,
            step=f"{record.step}{self._pace.of_total(record.step)}",
            description=self._pace.describe(memory),
        )

    def show_epoch(self, record: EpochRecord) -> None:
        self._progress.console.print(_epoch_line(record), highlight=False, markup=False)

    def show_validating(self, samples: int) -> None:
        self._progress.update(self._task, description=_validating(samples))

    def show_validation(self, record: ValidationRecord) -> None:
        self._progress.console.print(_validation_line(record), highlight=False, markup=False)

    def show_note(self, note: str) -> None:
        self._progress.console.print(note, highlight=False, markup=False)

    def set_total(self, total_steps: int | None) -> None:
        self._pace.total_steps = total_steps
        self._progress.update(self._task, total=total_steps)

    def stop(self) -> None:
        self._progress.stop()


class _Lines(ProgressDisplay):
    def __init__(self, pace: _Pace, console: Console) -> None:
        self._pace = pace
        self._console = console
        self._latest: tuple[StepRecord, str] | None = None
        self._printed_seconds = -SECONDS_BETWEEN_LINES
        self._printed_step = 0

    def show_step(self, record: StepRecord, memory: str) -> None:
        self._pace.add(record)
        self._latest = record, memory
        if time.monotonic() - self._printed_seconds >= SECONDS_BETWEEN_LINES:
            self._print_latest()

    def show_epoch(self, record: EpochRecord) -> None:
        self._print_latest()
        self._print(_epoch_line(record))

    def show_validating(self, samples: int) -> None:
        if time.monotonic() - self._printed_seconds >= SECONDS_BETWEEN_LINES:
            self._print_latest()
            self._print(_validating(samples))
            self._printed_seconds = time.monotonic()

    def show_validation(self, record: ValidationRecord) -> None:
        self._print_latest()
        self._print(_validation_line(record))

    def show_note(self, note: str) -> None:
        self._print_latest()
        self._print(note)

    def set_total(self, total_steps: int | None) -> None:
        self._print_latest()
        self._pace.total_steps = total_steps

    def stop(self) -> None:
        self._print_latest()

    def _print_latest(self) -> None:
        if self._latest is None or self._latest[0].step == self._printed_step:
            return
        record, memory = self._latest
        self._print(f"step {record.step}{self._pace.of_total(record.step)}  {self._pace.describe(memory)}")
        self._printed_seconds, self._printed_step = time.monotonic(), record.step

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _epoch_line(record: EpochRecord) -> str:
    """ "epoch 2, step 94  trained in 11.8 s  peak 312 MiB", as far as it is known."""
    parts = [f"epoch {record.epoch}, step {record.step}"]
    parts.append("trained" if record.seconds is None else f"trained in {format_seconds(record.seconds)}")
    peak_bytes = record.measured_peak_device_bytes or record.measured_peak_reserved_bytes
    return "  ".join(parts if peak_bytes is None else [*parts, f"peak {format_bytes(peak_bytes)}"])


def _validating(samples: int) -> str:
    return f"validating, {samples} samples so far"


def _validation_line(record: ValidationRecord) -> str:
    metrics = "".join(f"  {name} {value:.4g}" for name, value in record.metrics.items())
    return f"epoch {record.epoch}, step {record.step}  validation loss {record.loss:.4g}{metrics}"


def recovery_text(recovery: Recovery, *, lost: str) -> str:
    """Describe in one line that memory ran out and how training continues; `lost` says what is lost."""
    where = f"step {recovery.step}" if recovery.during == "step" else f"{recovery.during}, step {recovery.step}"
    how = "again as before" if recovery.after == recovery.before else f"on with {recovery.after}"
    return f"{where}  {recovery.message}: {how}; {lost}"
