import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from brimful.errors import UsageError
from brimful.measurement import OpTemporary
from brimful.settings import Settings
from brimful.training import DataLoading, StepRecord, StopReason, TrainingResult, ValidationRecord

RESULT = TrainingResult(
    job="tiny",
    device="cpu",
    settings=Settings(micro_batch_size=2),
    stopped_because=StopReason.INTERRUPTED,
    steps=(
        StepRecord(step=1, epoch=1, loss=1.5, gradient_norm=math.inf, seconds=0.1, samples=4, updated=False),
        StepRecord(
            step=2,
            epoch=1,
            loss=0.1 + 0.2,
            gradient_norm=2.0,
            seconds=0.1,
            samples=4,
            updated=True,
            terms=9.0,
            mfu=0.5,
        ),
    ),
    validations=(
        ValidationRecord(step=2, epoch=1, loss=math.inf, metrics={"accuracy": 0.5}, samples=3, seconds=0.2),
    ),
    budget_bytes=100,
    predicted_peak_allocated_bytes=90,
    measured_peak_allocated_bytes=91,
    predicted_peak_reserved_bytes=92,
    measured_peak_reserved_bytes=93,
    predicted_peak_device_bytes=None,
    measured_peak_device_bytes=None,
    predicted_step_seconds=0.1,
    measured_step_seconds=None,
    temporaries_at_peak=(OpTemporary(op="aten::conv", size_bytes=7),),
    run_dir=Path("runs/a"),
    counted="tokens",
    predicted_mfu=0.25,
    data_loading=DataLoading(workers=2, persistent_workers=True, pins_memory=False, processors=4),
)


def test_a_result_survives_json_that_every_reader_accepts():
    text = json.dumps(RESULT.to_json(), allow_nan=False)
    assert TrainingResult.from_json(json.loads(text)) == RESULT
    assert RESULT.losses == (1.5, 0.1 + 0.2)
    assert [step.is_finite for step in RESULT.steps] == [False, True]


def test_nan_survives_json():
    steps = (replace(RESULT.steps[0], loss=math.nan),)
    read = TrainingResult.from_json(
        json.loads(json.dumps(replace(RESULT, steps=steps).to_json(), allow_nan=False))
    )
    assert math.isnan(read.losses[0])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({}, "no training result"),
        ({"brimful_training": 99}, "version 99"),
        ({"brimful_training": 3}, "damaged"),
    ],
)
def test_documents_that_are_no_result_are_refused(document, said):
    with pytest.raises(UsageError, match=said):
        TrainingResult.from_json(document)
