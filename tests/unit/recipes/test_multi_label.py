"""Texts with several labels, or none."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import brimful as bf
from brimful.errors import DataError, UsageError
from brimful.recipes import save_pretrained, text_classification
from brimful.recipes.multi_label import (
    multi_label_counts,
    multi_label_scores,
    positive_weights,
    targets_of,
)

transformers = pytest.importorskip("transformers")


def write_films(path: Path, rows: int = 96) -> Path:
    """Each word is a label of its own; a fourth of the texts has none of them."""
    chosen = [[word for bit, word in ((1, "good"), (2, "bad")) if number & bit] for number in range(rows)]
    texts = [f"a {'very ' * (number // 4 % 4)}{' '.join(words)} film" for number, words in enumerate(chosen)]
    if path.suffix == ".csv":
        lines = [f"{text},{';'.join(words)}" for text, words in zip(texts, chosen, strict=True)]
        path.write_text("\n".join(["text,label", *lines]))
    else:
        entries = [{"text": text, "label": words} for text, words in zip(texts, chosen, strict=True)]
        path.write_text("\n".join(map(json.dumps, entries)))
    return path


def classify(file: Path, model: Path, **options: Any) -> bf.Job:
    options = {"label_separator": ";"} | options
    return text_classification(file, model=model, sequence_length=16, multi_label=True, **options)


def train(job: bf.Job, **options: Any) -> Any:
    job = replace(job, optimizer=bf.optimizers.named_optimizer("adamw", learning_rate=5e-3))
    settings = bf.Settings(micro_batch_size=6, gradient_accumulation_steps=2)
    return bf.trainer.Trainer(job, settings, device="cpu", show_progress=False, **options).fit()


@pytest.mark.filterwarnings("ignore:.*start from random weights")
def test_several_labels_are_learned_and_a_pipeline_infers_their_probabilities(
    tmp_path: Path, bert: Path
) -> None:
    job = classify(write_films(tmp_path / "films.jsonl"), bert, training_metrics=True)
    result = train(job, epochs=6, run_dir=tmp_path / "run")
    first, last = result.validations[0], result.validations[-1]
    assert last.metrics["micro_f1"] > first.metrics["micro_f1"]
    for record in (first, last):
        assert record.metrics["training_loss"] == pytest.approx(record.loss, abs=0.1)  # the same few texts
    assert last.metrics["training_loss"] < 0.9 * first.metrics["training_loss"]

    infer = transformers.pipeline("text-classification", str(save_pretrained(tmp_path / "run")), top_k=None)
    model = job.model()  # type: ignore[operator]
    bf.trainer.load_weights(model, tmp_path / "run")
    texts = ("a good bad film", "a bad film")
    with torch.no_grad():
        expected = [
            model.eval()(**infer.tokenizer(text, return_tensors="pt")).logits.sigmoid()[0] for text in texts
        ]
    for found, scores in zip(infer(list(texts)), expected, strict=True):
        by_name = {entry["label"]: entry["score"] for entry in found}
        assert [by_name["bad"], by_name["good"]] == pytest.approx(scores.tolist(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*start from random weights")
def test_tables_and_json_name_the_same_labels_and_a_resumed_run_is_the_same(tmp_path: Path, bert: Path) -> None:
    jobs = [classify(write_films(tmp_path / name), bert) for name in ("films.csv", "films.jsonl")]
    first, second = (job.data().train.batch(range(20)) for job in jobs)  # type: ignore[misc, union-attr]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["labels"].sum() > 0
    assert first["labels"].dtype == torch.float32
    whole = train(jobs[0], epochs=2)
    train(jobs[0], epochs=2, run_dir=tmp_path / "run", steps=3)
    assert train(jobs[0], epochs=2, run_dir=tmp_path / "run", resume=True).losses == whole.losses


def test_f1_is_that_of_scikit_learn_for_any_division_of_the_data() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 5), (torch.rand(50, 5) > 0.7).float()
    labels[:, 3], logits[:, 3] = 0, -1  # a class that is nowhere
    sums: dict[str, torch.Tensor] = {}
    for part in (slice(0, 7), slice(7, 50)):
        batch = {"logits": logits[part], "labels": labels[part]}
        counts = multi_label_counts(torch.nn.Identity(), batch, logits_of=lambda _model, batch: batch["logits"])
        for name, value in counts.items():
            sums[name] = sums.get(name, 0) + value * len(batch["labels"])
    found = multi_label_scores({name: value / 50 for name, value in sums.items()})
    for kind in ("micro", "macro"):
        expected = metrics.f1_score(labels, logits > 0, average=kind, zero_division=0)
        assert found[f"{kind}_f1"].item() == pytest.approx(expected)
    assert found["exact_match"].item() == pytest.approx(metrics.accuracy_score(labels, logits > 0))


def test_the_loss_is_the_binary_cross_entropy_and_balancing_is_pos_weight(tmp_path: Path, bert: Path) -> None:
    rows = [{"text": "a film", "label": ["rare", "some"] if n < 4 else ["some"] * (n < 10)} for n in range(40)]
    random.Random(0).shuffle(rows)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a film", "label": ["rare", "some"]}))
    for balance_classes, weights in ((False, None), (True, torch.tensor([36 / 4, 30 / 10]))):
        job = classify(
            tmp_path / "rows.jsonl",
            bert,
            validation_file=tmp_path / "one.jsonl",
            balance_classes=balance_classes,
        )
        batch = job.data().train.batch(range(40))  # type: ignore[misc, union-attr]
        own = job.model().eval()  # type: ignore[operator]
        inputs = {name: entry for name, entry in batch.items() if name != "labels"}
        expected = F.binary_cross_entropy_with_logits(own(**inputs).logits, batch["labels"], pos_weight=weights)
        assert job.loss(own, batch) == expected


def test_rows_without_labels_are_samples_and_missing_labels_are_bad_rows(tmp_path: Path, bert: Path) -> None:
    file = write_films(tmp_path / "films.jsonl")
    entries = [{"text": "a film"}, {"text": "a film", "label": ["good", None]}, {"text": "a", "label": {}}]
    file.write_text(file.read_text() + "\n" + "\n".join(map(json.dumps, entries)))
    with pytest.raises(DataError, match=r":97: 'label': there is none\n.*:98: 'label': entry 2: there is none"):
        classify(file, bert)
    with pytest.warns(UserWarning, match="3 of 99"):
        job = classify(file, bert, bad_samples="skip")
    assert job.about is not None
    assert job.about["training_texts"] + job.about["validation_texts"] == 96
    (tmp_path / "none.csv").write_text("text,label\na film,\na good film,good\n")
    with pytest.raises(UsageError, match=r"one class only, 'good'.* Check the column .*without --multi-label"):
        classify(tmp_path / "none.csv", bert)


def test_lists_with_labels_of_another_type_are_bad_rows(tmp_path: Path, bert: Path) -> None:
    rows = [{"text": "a film", "label": labels} for labels in ([0, 1], [0], ["good"], [1])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(
        DataError, match=r"1 of 4 .*\n.*:3: 'label': 'good' is a text, and of 3 rows it is a num"
    ):
        classify(tmp_path / "rows.jsonl", bert)


def test_balancing_leaves_labels_of_all_texts_or_of_none_as_they_are() -> None:
    targets = [targets_of(labels, ("all", "none", "some")) for labels in (["all", "some"], ["all"], ["all"])]
    assert positive_weights(targets).tolist() == [1, 1, 2]


def test_an_empty_separator_is_refused_where_labels_are_separated(tmp_path: Path, bert: Path) -> None:
    file = write_films(tmp_path / "films.csv")
    with pytest.raises(UsageError, match="label_separator is empty; give the character between labels"):
        classify(file, bert, label_separator="")
