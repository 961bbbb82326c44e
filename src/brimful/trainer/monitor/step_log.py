"""The records of the steps of a run, in a third of the memory that they would take as objects."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, overload

from brimful.results import StepRecord

_COLUMNS = {
    "step": "q", "epoch": "q", "loss": "d", "gradient_norm": "d", "seconds": "d", "samples": "q",
    "updated": "b", "data_seconds": "d", "memory_measured": "b",
    "terms": "d", "mfu": "d", "learning_rate": "d",
}  # fmt: skip
"""The fields of a record, and their type codes in `array`."""

_TRUTH_VALUES = ("updated", "memory_measured")
_MAY_BE_NONE = ("mfu", "learning_rate")  # arrays have no None, but NaN


class StepLog(Sequence[StepRecord]):
    """A growing sequence of step records, which makes each record on access."""

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
