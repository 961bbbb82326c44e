import pickle
from dataclasses import fields

from brimful.results import StepRecord
from brimful.trainer.monitor.history import _COLUMNS, StepLog

RECORDS = [
    StepRecord(
        step=step, epoch=1, loss=0.1 * step, gradient_norm=float("nan") if step == 2 else 1 / 3, seconds=1e-3,
        samples=7, updated=step != 2, data_seconds=1e-9, memory_measured=step == 3, terms=0.5,
        mfu=None if step == 4 else 0.3,
    )
    for step in range(1, 6)
]  # fmt: skip


def test_records_come_back_as_they_were():
    log = pickle.loads(pickle.dumps(StepLog(RECORDS)))
    assert [repr(record) for record in log] == [repr(record) for record in RECORDS]
    assert [record.step for record in log[1:3]] == [2, 3]
    assert log[-1] == RECORDS[-1]
    assert len(log) == 5


def test_every_field_is_kept():
    assert list(_COLUMNS) == [field.name for field in fields(StepRecord)]
