import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from brimful.codec import from_json_document, to_json_document
from brimful.errors import FileFormatError
from brimful.results import (
    Comparison,
    DataLoading,
    EquivalenceReport,
    OpTemporary,
    Recovery,
    StepRecord,
    StopReason,
    TrainingResult,
    ValidationRecord,
)
from brimful.settings import Settings

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
    loss_unit="tokens",
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
        ([], "not a brimful training result"),
        ({}, "not a brimful training result"),
        ({"brimful_training": 99}, "this is version 99; this brimful reads version 3"),
        ({"brimful_training": True}, "this is version True"),
        ({"brimful_training": 3}, "missing field `job`"),
        (RESULT.to_json() | {"steps": 3}, "field `steps`: expected `array`"),
        (RESULT.to_json() | {"run_dir": 3}, "field `run_dir`: expected `path`, got `int`"),
        (RESULT.to_json() | {"budget_bytes": -1}, "field `budget_bytes`: expected `int` >= 0"),
        (RESULT.to_json() | {"losses": []}, "field `losses`: unknown"),
        (RESULT.to_json() | {"certificate": {"holds": True}}, "missing field `certificate.job`"),
        ({name: value for name, value in RESULT.to_json().items() if name != "recoveries"}, "`recoveries`"),
    ],
)
def test_documents_that_are_not_a_result_are_refused_by_their_field(document, said):
    with pytest.raises(FileFormatError, match=said) as caught:
        TrainingResult.from_json(document)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"step": 0}, "field `step`: expected `int` >= 1"),
        ({"step": 1.5}, "field `step`: expected `int`"),
        ({"updated": 1}, "field `updated`: expected `bool`"),
        ({"loss": "much"}, "field `loss`: expected `float`"),
        ({"loss": None}, "field `loss`: expected `float`"),
        ({"seconds": "nan"}, "field `seconds`: expected `float`"),
        ({"lost": 1.0}, "field `lost`: unknown"),
    ],
)
def test_a_damaged_step_is_refused_by_its_field(damage, said):
    with pytest.raises(FileFormatError, match=said):
        from_json_document(
            to_json_document(RESULT.steps[0]) | damage, StepRecord, where="metrics.jsonl, line 3"
        )


def test_a_validation_and_a_recovery_are_refused_by_their_field():
    with pytest.raises(FileFormatError, match=r"line 4: field `metrics\[\.\.\.\]`: expected `float`"):
        from_json_document(
            to_json_document(RESULT.validations[0]) | {"metrics": {"accuracy": "high"}},
            ValidationRecord,
            where="line 4",
        )
    with pytest.raises(FileFormatError, match="line 5: missing field `during`"):
        from_json_document({"step": 1}, Recovery, where="line 5")


def test_a_difference_without_bound_is_valid_json_and_read_back():
    beyond = EquivalenceReport(
        job="a",
        device="cpu",
        samples=2,
        comparisons=(Comparison(name="recomputing", largest_difference=math.inf, where="the loss"),),
    )
    assert EquivalenceReport.from_json(json.loads(json.dumps(beyond.to_json(), allow_nan=False))) == beyond
