"""Studies: their small scales learn, and show what their conclusions say."""

import json
from dataclasses import replace
from typing import Any

import pytest

from brimful.api import estimate, fit
from brimful.errors import InterruptedRunError, UnknownNameError
from brimful.report import study_document
from brimful.results import Published, StopReason, StudyResult, StudyRow
from brimful.studies import STUDIES, Study, find_study, run_study
from brimful.studies.jobs import deep_mlp_job

pytest.importorskip("sklearn")


def small_scale(study: Study) -> Study:
    return replace(study, cases=tuple(replace(case, job=None) for case in study.cases))


def by_label(result: StudyResult) -> dict[str, StudyRow]:
    assert [row.why_not for row in result.rows] == [""] * len(result.rows)
    return {row.label: row for row in result.rows}


def test_accumulation_loses_accuracy_under_batch_norm_and_not_under_group_norm() -> None:
    rows = by_label(run_study(STUDIES["batch-norm"], runs_small=True))
    accuracy = {label: row.small.accuracy for label, row in rows.items() if row.small}
    assert accuracy["GroupNorm, 32"] > 0.95
    assert accuracy["GroupNorm, 2 × 16"] == pytest.approx(accuracy["GroupNorm, 32"], abs=0.01)
    assert accuracy["BatchNorm, 32"] > 0.95
    assert accuracy["BatchNorm, 2 × 16"] < accuracy["BatchNorm, 32"] - 0.1


def test_checkpointing_takes_less_memory_and_trains_to_the_same_loss() -> None:
    whole, segments = run_study(small_scale(STUDIES["vgg16"]), runs_small=True).rows
    assert whole.small is not None
    assert segments.small is not None
    assert segments.small.validation_loss == whole.small.validation_loss
    assert whole.small.validation_loss < 0.7 * whole.small.first_training_loss
    assert whole.small.measured_peak_allocated_bytes is not None
    assert segments.small.measured_peak_allocated_bytes is not None
    assert segments.small.measured_peak_allocated_bytes < 0.8 * whole.small.measured_peak_allocated_bytes


def test_the_square_root_of_the_layers_is_about_the_best_number_of_segments() -> None:
    sizes = (0, 4, 16, 64)
    peaks = [
        estimate(deep_mlp_job(64, 64, count), "T4", micro_batch_size=4096).predicted_peak_allocated_bytes
        for count in sizes
    ]
    whole, few, about, many = peaks
    assert min(few, about) < many < whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-large", "xlm-r"])
def test_the_small_scale_of_text_learns(name: str) -> None:
    rows = by_label(run_study(small_scale(STUDIES[name]), runs_small=True))
    ran = [row.small for row in rows.values() if row.small is not None]
    assert len(ran) >= len(rows) - 2  # 8-bit Adam is for GPUs
    for small in ran:
        assert small.validation_loss < small.first_training_loss
        assert small.accuracy > 0.2  # of eight topics


def test_predictions_stand_beside_published_figures() -> None:
    result = run_study(STUDIES["vgg16"])
    whole, segments = result.rows
    assert whole.predicted_peak_device_bytes is not None
    assert segments.predicted_peak_device_bytes is not None
    assert segments.predicted_peak_device_bytes < whole.predicted_peak_device_bytes
    assert result.peak_errors()[0] == whole.predicted_peak_device_bytes / (14222 * 2**20) - 1
    assert result.speed_errors()[0] is None  # the others are relative to it
    assert result.speed_errors()[1] is not None
    document = json.loads(json.dumps(study_document(result)))
    assert document["rows"][1]["speed_error"] == result.speed_errors()[1]
    text = str(result)
    assert "13.9 GiB" in text
    assert STUDIES["vgg16"].conclusion in text


def test_errors_are_relative_to_what_is_published() -> None:
    result = StudyResult(
        name="x",
        title="X",
        source="an article",
        device="T4",
        is_published_device=True,
        conclusion="Choose.",
        rows=(
            StudyRow(
                label="a",
                published=Published(relative_speed=1.0, peak_device_bytes=100),
                predicted_peak_device_bytes=90,
                predicted_fits=True,
                predicted_samples_per_second=10.0,
            ),
            StudyRow(
                label="b",
                published=Published(relative_speed=2.0),
                predicted_peak_device_bytes=90,
                predicted_fits=True,
                predicted_samples_per_second=15.0,
            ),
            StudyRow(
                label="c",
                published=Published(is_out_of_memory=True),
                predicted_peak_device_bytes=900,
                predicted_fits=False,
                predicted_samples_per_second=15.0,
            ),
        ),
    )
    assert result.peak_errors() == (pytest.approx(-0.1), None, None)
    assert result.speed_errors() == (None, pytest.approx(-0.25), None)
    assert "over" in str(result)
    elsewhere = replace(result, is_published_device=False)
    assert elsewhere.peak_errors() == elsewhere.speed_errors() == (None, None, None)


def test_an_unknown_study_names_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match="vgg16"):
        find_study("vgg")


def test_a_run_that_is_interrupted_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> Any:
        result, plain = fit(*given, **options)
        return replace(result, stopped_because=StopReason.INTERRUPTED), plain

    monkeypatch.setattr("brimful.studies.study.fit", interrupted)
    with pytest.raises(InterruptedRunError):
        run_study(small_scale(STUDIES["vgg16"]), runs_small=True)


def test_an_unknown_device_is_an_error_of_the_study() -> None:
    with pytest.raises(UnknownNameError):
        run_study(STUDIES["vgg16"], "nosuch")
