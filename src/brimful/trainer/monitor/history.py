"""The records of a run, in memory, and how a resumed run reads them from `metrics.jsonl`.

A resumed run only reports these records; everything that determines how it continues is in the save.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, overload

from brimful.codec import from_json_document, parse_json
from brimful.errors import FileFormatError
from brimful.results import EpochRecord, Recovery, StepRecord, ValidationRecord
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.run_directory import METRICS, RunDirectory

_COLUMNS = {
    "step": "q", "epoch": "q", "loss": "d", "gradient_norm": "d", "seconds": "d", "samples": "q",
    "updated": "b", "data_seconds": "d", "memory_measured": "b",
    "terms": "d", "mfu": "d", "learning_rate": "d",
}  # fmt: skip
"""The fields of a record, and their type codes in `array`."""

_TRUTH_VALUES = ("updated", "memory_measured")
_MAY_BE_NONE = ("mfu", "learning_rate")  # arrays have no None, but NaN


class StepLog(Sequence[StepRecord]):
    """A growing sequence of step records, made on access: they take a third of the memory of objects."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._columns: dict[str, array[Any]] = {name: array(kind) for name, kind in _COLUMNS.items()}
        for record in records:
            self.append(record)

    def append(self, record: StepRecord) -> None:
        """Append a record."""
        for name, column in self._columns.items():
            value = getattr(record, name)
            column.append(math.nan if value is None else value)

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | Sequence[StepRecord]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        values: dict[str, Any] = {name: column[index] for name, column in self._columns.items()}
        values |= {name: bool(values[name]) for name in _TRUTH_VALUES}
        values |= {name: None for name in _MAY_BE_NONE if math.isnan(values[name])}
        return StepRecord(**values)


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """The records of a run so far."""

    steps: StepLog = field(default_factory=StepLog)
    epochs: list[EpochRecord] = field(default_factory=list)
    validations: list[ValidationRecord] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Append a record to those of its kind."""
        match record:
            case StepRecord():
                self.steps.append(record)
            case EpochRecord():
                self.epochs.append(record)
            case ValidationRecord():
                self.validations.append(record)
            case Recovery():
                self.recoveries.append(record)
            case str():
                self.notes.append(record)

    def is_best(self, record: ValidationRecord) -> bool:
        """Whether a validation has a finite loss, lower than all before it."""
        return _ranked(record) < min(map(_ranked, self.validations), default=math.inf)

    def epoch_seconds(self, epoch: int, steps: int) -> float | None:
        """Time of an epoch of a number of steps, which are the latest; None if records of some are lost."""
        seconds, count = 0.0, 0
        for index in range(len(self.steps) - 1, -1, -1):
            record = self.steps[index]
            if record.epoch != epoch:
                break
            seconds, count = seconds + record.total_seconds, count + 1
        return seconds if count == steps else None

    @property
    def validations_without_improvement(self) -> int:
        """Number of validations since the one with the lowest loss; NaN and infinity rank last."""
        losses = [_ranked(record) for record in self.validations]
        return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def restored_history(directory: RunDirectory, checkpoint: Checkpoint) -> RunHistory:
    """Read the records up to a save, and cut `metrics.jsonl` there: the run continues from there.

    Later steps are skipped: the resumed run takes them again. The validations are those of the checkpoint.
    """
    before = directory.read_metrics()[: checkpoint.metrics_bytes]
    is_damaged = len(before) < checkpoint.metrics_bytes
    lines: list[bytes] = []
    history = RunHistory(validations=list(checkpoint.validations))
    for line in before.splitlines(keepends=True):
        try:
            record = _record(line)
        except (FileFormatError, KeyError, TypeError, ValueError):
            is_damaged = True
            continue
        if isinstance(record, StepRecord) and record.step > checkpoint.step:
            is_damaged = True
            continue
        if record is not None and not isinstance(record, ValidationRecord):
            history.add(record)
        lines.append(line)
    aside = directory.cut_metrics(b"".join(lines), keeps_copy=is_damaged)
    if is_damaged or len(history.steps) < checkpoint.step:
        kept = "" if aside is None else f" What was there is kept as {aside.name}."
        warnings.warn(
            f"{directory.path / METRICS} is damaged: it has {len(history.steps)} of the {checkpoint.step} "
            f"steps before the save. Training resumes exactly; the record of those steps is lost.{kept}",
            stacklevel=2,
        )
    return history


def history_so_far(lines: bytes) -> RunHistory:
    """The records in `metrics.jsonl` of a run that may still be training.

    Lines that are damaged or not yet whole are skipped.
    """
    history = RunHistory()
    for line in lines.splitlines(keepends=True):
        with suppress(FileFormatError, KeyError, TypeError, ValueError):
            if (record := _record(line)) is not None:
                history.add(record)
    return history


def _ranked(record: ValidationRecord) -> float:
    """The loss of a validation, to compare it with others; infinite if it is NaN or infinite."""
    return record.loss if math.isfinite(record.loss) else math.inf


Record = StepRecord | EpochRecord | ValidationRecord | Recovery | str
"""A line of `metrics.jsonl`; a note is a text."""


def _record(line: bytes) -> Record | None:
    """Decode a line; None for other kinds of lines."""
    if not line.endswith(b"\n"):
        raise FileFormatError("a line has no end.")
    document = parse_json(line, where="a line")
    if not isinstance(document, dict):
        raise FileFormatError("a line is not a JSON object.")
    kind = document.pop("kind", None)
    if kind == "step":
        return from_json_document(document, StepRecord, where="a step")
    if kind == "epoch":
        return from_json_document(document, EpochRecord, where="an epoch")
    if kind == "validation":
        return from_json_document(document, ValidationRecord, where="a validation")
    if kind == "recovery":
        return from_json_document(document, Recovery, where="a recovery")
    if kind == "note":
        return from_json_document(document.get("message"), str, where="a note")
    if not isinstance(kind, str):
        raise FileFormatError("a line has no kind.")
    return None
