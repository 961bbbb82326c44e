"""What `metrics.jsonl` has of a run that is resumed. Nothing is decided by it: what decides is in the save."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.codec import from_builtins, from_json_document, parse_json
from brimful.errors import FileFormatError
from brimful.results import Recovery, StepRecord
from brimful.trainer.monitor.step_log import StepLog
from brimful.trainer.storage.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The records of a run up to a save."""

    lines: bytes
    """Those of `metrics.jsonl` that could be read."""
    steps: StepLog
    recoveries: list[Recovery]
    notes: list[str]
    is_damaged: bool
    """Whether there are other lines than were written before the save."""


def read_history(content: bytes, checkpoint: Checkpoint) -> History:
    """What was recorded before a save; the steps after it are taken again.

    Args:
        content: All of `metrics.jsonl`.
        checkpoint: Of the save.

    Returns:
        The lines up to there that can be read.
    """
    before = content[: checkpoint.metrics_bytes]
    is_damaged = len(before) < checkpoint.metrics_bytes
    lines: list[bytes] = []
    steps = StepLog()
    recoveries: list[Recovery] = []
    notes: list[str] = []
    for line in before.splitlines(keepends=True):
        try:
            record = _record(line)
        except (FileFormatError, KeyError, TypeError, ValueError):
            is_damaged = True
            continue
        if isinstance(record, StepRecord):
            if record.step > checkpoint.state.step:
                is_damaged = True
                continue
            steps.append(record)
        elif isinstance(record, Recovery):
            recoveries.append(record)
        elif record is not None:
            notes.append(record)
        lines.append(line)
    return History(
        lines=b"".join(lines), steps=steps, recoveries=recoveries, notes=notes, is_damaged=is_damaged
    )


def _record(line: bytes) -> StepRecord | Recovery | str | None:
    """A step, a recovery or a note; None of another kind, such as a validation, which the save has."""
    if not line.endswith(b"\n"):
        raise FileFormatError("a line has no end.")
    document = parse_json(line, where="a line")
    if not isinstance(document, dict):
        raise FileFormatError("a line is not a JSON object.")
    kind = document.pop("kind", None)
    if kind == "step":
        return from_json_document(document, StepRecord, where="a step")
    if kind == "recovery":
        return from_json_document(document, Recovery, where="a recovery")
    if kind == "note":
        return from_builtins(document.get("message"), str, where="a note")
    if not isinstance(kind, str):
        raise FileFormatError("a line has no kind.")
    return None
