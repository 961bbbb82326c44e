"""The records of a run: which validation is the best, how long ago that was, and all fields of steps."""

import math
import pickle
from dataclasses import fields

import pytest

from brimful.results import StepRecord, ValidationRecord
from brimful.trainer.monitor.history import _COLUMNS, RunHistory, StepLog
from brimful.trainer.options import TrainOptions


def validation(loss: float) -> ValidationRecord:
    return ValidationRecord(step=1, epoch=1, loss=loss, metrics={}, samples=1, seconds=0.1)


@pytest.mark.parametrize(
    ("losses", "expected"), [([], 0), ([2.0], 0), ([2.0, 1.0], 0), ([1.0, 2.0, 1.0], 2), ([3.0, 1.0, 2.0], 1)]
)
def test_validations_without_improvement_are_those_since_the_first_lowest_loss(losses, expected):
    history = RunHistory(validations=[validation(loss) for loss in losses])
    assert history.validations_without_improvement == expected


def test_only_a_lower_loss_is_the_best():
    history = RunHistory()
    assert history.is_best(validation(2.0))
    history.validations.append(validation(2.0))
    assert not history.is_best(validation(2.0))
    assert history.is_best(validation(1.9))


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_never_the_best_and_hides_no_improvement(odd):
    history, options = RunHistory(), TrainOptions(epochs=9, patience=2)
    best = []
    for loss in (odd, 0.029, 0.027, odd):
        best.append(history.is_best(validation(loss)))
        history.validations.append(validation(loss))
        assert not options.is_out_of_patience(history.validations_without_improvement)
    assert best == [False, True, True, False]
    history.validations.append(validation(odd))
    assert history.validations_without_improvement == 2


def test_losses_that_are_all_nan_use_up_the_patience():
    history = RunHistory(validations=[validation(math.nan)] * 3)
    assert history.validations_without_improvement == 2


RECORDS = [
    StepRecord(
        step=step, epoch=1, loss=0.1 * step, gradient_norm=float("nan") if step == 2 else 1 / 3, seconds=1e-3,
        samples=7, updated=step != 2, data_seconds=1e-9, memory_measured=step == 3, terms=0.5,
        mfu=None if step == 4 else 0.3,
    )
    for step in range(1, 6)
]  # fmt: skip


def test_steps_come_back_as_they_were():
    log = pickle.loads(pickle.dumps(StepLog(RECORDS)))
    assert [repr(record) for record in log] == [repr(record) for record in RECORDS]
    assert [record.step for record in log[1:3]] == [2, 3]
    assert log[-1] == RECORDS[-1]
    assert len(log) == 5


def test_every_field_of_a_step_is_kept():
    assert list(_COLUMNS) == [field.name for field in fields(StepRecord)]
