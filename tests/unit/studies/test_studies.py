"""Studies: their small scales learn, and show what their conclusions say."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from brimful.api import estimate, fit
from brimful.devices import find_device
from brimful.errors import InterruptedRunError, UnknownNameError, UsageError
from brimful.models import find_architecture
from brimful.results import (
    Published,
    StopReason,
    StudyFigure,
    StudyPrediction,
    StudyResult,
    StudyRow,
)
from brimful.studies import STUDIES, Study, find_study, jobs, run_study
from brimful.studies.jobs import deep_mlp_job
from brimful.studies.published_loops import (
    Recipe,
    checkpoint_attention_and_gelu,
    checkpoint_layers,
    job_as_published,
    sales_recipe,
    text_recipe,
    tweets_recipe,
    unet_recipe,
)

pytest.importorskip("sklearn")


def small_scale(study: Study, *labels: str) -> Study:
    """A study, or its rows of some labels, without predictions."""
    chosen = [case for case in study.cases if not labels or case.label in labels]
    return replace(study, cases=tuple(replace(case, job=None, as_published=None) for case in chosen))


def by_label(result: StudyResult) -> dict[str, StudyRow]:
    assert [row.why_not for row in result.rows] == [""] * len(result.rows)
    return {row.label: row for row in result.rows}


@pytest.fixture(scope="module")
def vgg16() -> StudyResult:
    return run_study(STUDIES["vgg16"])


def test_accumulation_loses_accuracy_under_batch_norm_and_not_under_group_norm() -> None:
    labels = ("BatchNorm, 32", "BatchNorm, 2 × 16", "GroupNorm, 32", "GroupNorm, 2 × 16")
    rows = by_label(run_study(small_scale(STUDIES["batch-norm"], *labels), runs_small=True))
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
@pytest.mark.parametrize("name", ["bert-large", "balanced-loss", "moe", "dataloader", "zero", "memory-format"])
def test_the_small_scale_learns(name: str) -> None:
    """The first row that trains and the last one, which has the options of those between."""
    study = small_scale(STUDIES[name])
    first, *_others, last = (case for case in study.cases if case.small_job is not None)
    rows = by_label(run_study(replace(study, cases=(first, last)), runs_small=True))
    ran = [row.small for row in rows.values() if row.small is not None]
    assert ran
    for small in ran:
        assert small.validation_loss < small.first_training_loss
        assert small.accuracy > 0.2  # of eight topics, ten digits or 128 bytes


def test_processes_and_micro_batches_train_as_the_whole_batch_does() -> None:
    alone, together = run_study(small_scale(STUDIES["distributed"], "1 GPU", "2 GPUs"), runs_small=True).rows
    whole, parts = run_study(small_scale(STUDIES["accumulation"], "32", "16 × 2"), runs_small=True).rows
    for one, other in ((alone, together), (whole, parts)):
        assert one.small is not None
        assert other.small is not None
        assert other.small.validation_loss == pytest.approx(one.small.validation_loss, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STUDIES.keys() - {"bert-large", "xlm-r", "deep-mlp", "optimizers"}))
def test_each_row_is_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another GPU, so that loops of articles are not captured; benchmarks/studies.py predicts all.

    Two layers take the options of a row as all of them do.
    """
    monkeypatch.setattr(jobs, "find_architecture", partial(find_architecture, num_hidden_layers=2))
    result = run_study(STUDIES[name], "A100 80GB SXM")
    assert [row.why_not for row in result.rows] == [""] * len(result.rows)
    assert STUDIES[name].conclusion in str(result)


def test_predictions_stand_beside_published_figures(vgg16: StudyResult) -> None:
    result = vgg16
    whole, segments = result.rows
    assert whole.today is not None
    assert whole.as_published is not None
    assert segments.today is not None
    assert segments.today.predicted_peak_device_bytes < whole.today.predicted_peak_device_bytes
    assert result.peak_errors()[0] == whole.as_published.predicted_peak_device_bytes / (14222 * 2**20) - 1
    assert result.speed_errors()[0] is None  # the others are relative to it
    assert result.speed_errors()[1] is not None
    document = json.loads(json.dumps(result.to_json()))
    assert document["rows"][1]["speed_error"] == result.speed_errors()[1]
    assert "13.9 GiB" in str(result)
    assert str(result).endswith(STUDIES["vgg16"].conclusion)


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_study_concludes_in_one_sentence(study: Study) -> None:
    assert len(re.findall(r"[.!?](?= |$)", study.conclusion)) == 1


def test_a_small_scale_that_its_labels_do_not_describe_is_described_in_a_note() -> None:
    assert any("hidden layers are 63 and 64 wide" in note for note in STUDIES["sizes"].notes)
    assert any("of one seed" in note for note in STUDIES["memory-format"].notes)


def test_the_loop_of_the_article_is_predicted_for_its_device_alone() -> None:
    study = STUDIES["vgg16"]
    result = run_study(replace(study, cases=study.cases[:1]), "T4")
    assert result.rows[0].today is not None
    assert result.rows[0].as_published is None
    assert result.peak_errors() == (None,)


def test_bert_large_takes_the_memory_that_was_published() -> None:
    study = STUDIES["bert-large"]
    result = run_study(replace(study, cases=study.cases[:1]))
    (error,) = result.peak_errors()
    assert error == pytest.approx(0, abs=0.01)


def test_a_loop_that_cannot_be_predicted_is_not_replaced_by_another_prediction() -> None:
    study = STUDIES["vgg16"]

    def fails() -> nn.Module:
        raise UsageError("cannot be made")

    (case, *_others) = study.cases
    assert case.as_published is not None
    recipe = replace(case.as_published, model=fails)
    result = run_study(replace(study, cases=(replace(case, as_published=recipe),)))
    assert result.rows[0].today is not None
    assert "cannot be made" in result.rows[0].why_not
    assert result.peak_errors() == (None,)


def test_a_device_that_is_given_is_used_as_it_is(vgg16: StudyResult) -> None:
    study = STUDIES["vgg16"]
    own = replace(find_device(study.device), context_bytes=10 * 2**20)
    result = run_study(replace(study, cases=study.cases[:1]), own)
    assert result.rows[0].today is not None
    assert vgg16.rows[0].today is not None
    difference = (
        vgg16.rows[0].today.predicted_peak_device_bytes - result.rows[0].today.predicted_peak_device_bytes
    )
    assert difference == find_device(study.device).context_bytes - own.context_bytes


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        (unet_recipe(fp16=True), 7_703_497),  # as the article has it
        (sales_recipe(), None),
        (tweets_recipe(prepare=checkpoint_layers), None),
        (text_recipe("bert-base", 32, prepare=checkpoint_attention_and_gelu), None),
        (text_recipe("xlm-roberta-base", 32, fp16=True, accumulation=2), None),
    ],
    ids=["unet", "sales", "tweets", "bert", "xlm-r"],
)
def test_the_loops_of_articles_are_captured(recipe: Recipe, parameters: int | None) -> None:
    found = estimate(job_as_published(recipe), "T4", micro_batch_size=2)
    assert found.breakdown
    assert parameters in (None, found.parameter_count)


def test_the_command_names_every_study() -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    (line,) = (line for line in reference.splitlines() if line.startswith("| `--study`"))
    assert [name for name in STUDIES if f" {name}" not in line] == []


def predicted(peak_bytes: int, speed: float, *, fits: bool = True) -> StudyPrediction:
    return StudyPrediction(
        predicted_peak_device_bytes=peak_bytes, predicted_fits=fits, predicted_samples_per_second=speed
    )


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
                today=predicted(50, 20.0),
                as_published=predicted(90, 10.0),
                is_compared_as_published=True,
            ),
            StudyRow(label="b", published=Published(relative_speed=2.0), today=predicted(90, 15.0)),
            StudyRow(
                label="c",
                published=Published(is_out_of_memory=True),
                today=predicted(900, 15.0, fits=False),
            ),
            StudyRow(
                label="d",
                group="another",
                published=Published(relative_speed=1.0),
                today=predicted(90, 1.0),
                figures=(
                    StudyFigure(name="weights", unit="bytes", predicted=3 * 2**20, published=2 * 2**20),
                    StudyFigure(name="state", unit="bytes per parameter", predicted=8.01),
                ),
            ),
        ),
    )
    assert result.peak_errors() == (pytest.approx(-0.1), None, None, None)
    assert result.speed_errors() == (None, pytest.approx(-0.25), None, None)
    text = str(result)
    assert "over" in text
    assert "3 MiB" in text
    assert "8.01" in text
    elsewhere = replace(result, is_published_device=False)
    assert elsewhere.peak_errors() == elsewhere.speed_errors() == (None,) * 4


def test_an_unknown_study_names_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match="vgg16"):
        find_study("vgg")


def test_a_run_that_is_interrupted_ends_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> Any:
        result, plain = fit(*given, **options)
        return replace(result, stopped_because=StopReason.INTERRUPTED), plain

    monkeypatch.setattr("brimful.studies.study.fit", interrupted)
    with pytest.raises(InterruptedRunError):
        run_study(replace(small_scale(STUDIES["vgg16"]), epochs=1), runs_small=True)


def test_an_unknown_device_is_an_error_of_the_study() -> None:
    with pytest.raises(UnknownNameError):
        run_study(STUDIES["vgg16"], "nosuch")


def test_the_guide_to_techniques_names_studies_and_rows_that_exist() -> None:
    """The last column of its table: `study`: row; `study`, `study`."""
    page = (Path(__file__).parents[3] / "docs" / "howto" / "choose.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\|(?:[^|]*\|){5} (.+) \|$", page, re.MULTILINE)
    named = re.findall(r"`([a-z0-9-]+)`(?:: ([^;|]+))?", "; ".join(cells))
    assert len(named) > 10
    for name, row in named:
        labels = [case.label for case in find_study(name).cases]
        assert any(row in label for label in labels), (name, row, labels)
