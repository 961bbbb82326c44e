"""Pairs of texts, as a job with a contrastive loss."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import brimful as bf
from brimful.errors import DataError, UsageError
from brimful.recipes import save_pretrained, sentence_pairs
from brimful.recipes.bad_samples import BadSamples
from brimful.recipes.rows import Row
from brimful.recipes.sentence_pairs import _encode, contrast, embed, retrieval
from brimful.recipes.text_models import TextModel
from brimful.recipes.tokens import Bytes

transformers = pytest.importorskip("transformers")


def write_pairs(path: Path) -> Path:
    """The second text names what the first has, in other words' places."""
    rows = ["text,pair"]
    for number in range(40):
        words = ["good", "bad"][number % 2], "very " * (number // 2 % 5), ["film", "a"][number // 10 % 2]
        rows.append(f"{words[1]}{words[0]} {words[2]},{words[2]} {words[1]}{words[0]}")
    path.write_text("\n".join(rows))
    return path


def pairs(file: Path, model: Path, **options: Any) -> bf.Job:
    return sentence_pairs(file, model=model, sequence_length=16, **options)


def embedded(first: torch.Tensor, second: torch.Tensor, texts: list[int], others: list[int]) -> dict[str, Any]:
    vectors = {"embeddings": F.normalize(first, dim=1), "pair_embeddings": F.normalize(second, dim=1)}
    return vectors | {"text": torch.tensor(texts), "pair_text": torch.tensor(others)}


def test_pairs_are_learned_within_the_plan_and_written_as_an_encoder(tmp_path: Path, bert: Path) -> None:
    job = pairs(write_pairs(tmp_path / "pairs.csv"), bert, training_metrics=True)
    job = replace(job, optimizer=bf.named_optimizer("adamw", learning_rate=3e-3))
    plan = bf.plan(job, device="cpu", global_batch_size=12, micro_batch_size=4)
    result = bf.Trainer(job, plan, epochs=6, run_dir=tmp_path / "run", show_progress=False).fit()
    first, last = result.validations[0], result.validations[-1]
    assert last.metrics["training_loss"] < 0.9 * first.metrics["training_loss"]
    assert {"retrieval_accuracy", "training_retrieval_accuracy"} < set(last.metrics)
    assert result.measured_peak_allocated_bytes == pytest.approx(plan.predicted_peak_allocated_bytes, rel=0.02)

    directory = save_pretrained(tmp_path / "run")
    batch = job.data().train.batch(range(3))  # type: ignore[misc, union-attr]
    encoder = transformers.AutoModel.from_pretrained(directory)
    model = job.model()  # type: ignore[operator]
    bf.load_weights(model, tmp_path / "run")
    with torch.no_grad():
        one, other = (embed(each.eval(), batch) for each in (model, encoder))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_micro_batches_are_contrasted_with_the_whole_batch_and_resumed(tmp_path: Path, bert: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(bert)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "plain")
    config.save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="has no weights"):
        job = pairs(write_pairs(tmp_path / "pairs.csv"), tmp_path / "plain")

    def train(samples: int, **options: Any) -> Any:
        settings = bf.Settings(micro_batch_size=samples, gradient_accumulation_steps=12 // samples)
        return bf.Trainer(job, settings, device="cpu", epochs=1, show_progress=False, **options).fit()

    whole, split = train(12), train(3)
    assert split.losses == pytest.approx(whole.losses, rel=1e-4)
    assert split.validations[-1].metrics == whole.validations[-1].metrics
    train(3, run_dir=tmp_path / "run", steps=2)
    assert train(3, run_dir=tmp_path / "run", resume=True).losses == split.losses


def test_the_loss_is_info_nce_in_both_directions() -> None:
    torch.manual_seed(0)
    found = embedded(torch.randn(5, 8), torch.randn(5, 8), [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    similarities = (found["embeddings"] @ found["pair_embeddings"].T / 0.1).double()
    matched = similarities.diagonal()
    expected = [(matched - similarities.logsumexp(dim)).neg().mean() for dim in (0, 1)]
    assert contrast(found, temperature=0.1).item() == pytest.approx(sum(expected).item() / 2, rel=1e-5)


def encoded(rows: list[tuple[str, str]], vectors: dict[str, list[float]]) -> dict[str, Any]:
    """The rows as the recipe numbers their texts, embedded by a table."""
    model = TextModel(build=torch.nn.Identity, weights=None, tokenizer=Bytes(), padding=0, end=1, about={})
    pairs_of = [Row(where=str(place), values=row) for place, row in enumerate(rows)]
    batch = _encode(pairs_of, model=model, most_tokens=16, bad=BadSamples.REFUSE).batch(range(len(rows)))
    first, second = (torch.tensor([vectors[row[side]] for row in rows]) for side in (0, 1))
    return embedded(first, second, batch["text"].tolist(), batch["pair_text"].tolist())


@pytest.mark.parametrize(
    "rows",
    [
        [("a", "b"), ("c", "d"), ("e", "f")],
        [("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")],
        [("a", "b"), ("a", "c"), ("d", "b"), ("e", "f")],
        [("a", "b"), ("b", "c"), ("c", "d"), ("e", "e")],
        [("a", "b"), ("a", "b"), ("c", "d")],
    ],
    ids=["different", "both orders", "same column", "a chain", "twice"],
)
def test_pairs_that_share_a_text_are_not_contrasted_with_each_other(rows: list[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    vectors = {text: F.normalize(torch.randn(4), dim=0).tolist() for text in "abcdef"}

    def similarity(one: str, other: str) -> float:
        return sum(x * y for x, y in zip(vectors[one], vectors[other], strict=True))

    losses, hits = [], 0
    for place, (first, second) in enumerate(rows):
        others = [row for row in rows[:place] + rows[place + 1 :] if not {first, second} & set(row)]
        own, seconds = similarity(first, second), [similarity(first, other) for _, other in others]
        firsts = [similarity(other, second) for other, _ in others]
        for candidates in (seconds, firsts):
            losses.append(math.log(sum(math.exp(each / 0.1) for each in (own, *candidates))) - own / 0.1)
        hits += own > max(seconds, default=-1)
    found = encoded(rows, vectors)
    assert contrast(found, temperature=0.1).item() == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert retrieval(found)["retrieval_accuracy"].item() == pytest.approx(hits / len(rows))


def test_a_perfect_encoder_has_no_loss_and_finds_all_where_texts_are_in_both_columns() -> None:
    """A text would be nearest to itself, which is the second text of the reversed pair."""
    vectors = {"a": [1.0, 0.1], "b": [1.0, -0.1], "c": [-1.0, 0.1], "d": [-1.0, -0.1]}
    found = encoded([("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")], vectors)
    assert contrast(found, temperature=0.05).item() == pytest.approx(0, abs=1e-6)
    assert retrieval(found)["retrieval_accuracy"] == 1
    wrong = encoded([("a", "c"), ("c", "a"), ("b", "d"), ("d", "b")], vectors)
    assert retrieval(wrong)["retrieval_accuracy"] == 0


def test_texts_without_tokens_are_bad_samples(tmp_path: Path, bert: Path) -> None:
    """Their mean over tokens would be NaN, and with it the loss of the whole batch."""
    tokenizer = json.loads((bert / "tokenizer.json").read_text())
    tokenizer["post_processor"], tokenizer["model"]["unk_token"] = None, "none"
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^a-z ]"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    rows = ["text,pair", "a film,…", *["a film,good", "very good,film"] * 4]
    (tmp_path / "pairs.csv").write_text("\n".join(rows), encoding="utf-8")
    options = {"tokenizer": tmp_path / "tokenizer.json"}
    with pytest.raises(
        DataError, match=r"1 of 9 .*\n.*pairs\.csv:2: a text that the tokenizer has no tokens of"
    ):
        pairs(tmp_path / "pairs.csv", bert, **options)
    with pytest.warns(UserWarning, match="1 of 9 samples cannot be used"):
        job = pairs(tmp_path / "pairs.csv", bert, bad_samples="skip", **options)
    assert job.about is not None
    assert job.about["training_pairs"] + job.about["validation_pairs"] == 8
    batch = job.data().train.batch(range(7))  # type: ignore[misc, union-attr]
    assert torch.isfinite(job.loss(embed(job.model(), batch)))  # type: ignore[operator, call-arg, arg-type]


def test_padding_changes_no_embedding(tmp_path: Path, bert: Path) -> None:
    job = pairs(write_pairs(tmp_path / "pairs.csv"), bert)
    model, data = job.model().eval(), job.data()  # type: ignore[misc, operator]
    lengths = data.train.lengths("input_ids")  # type: ignore[union-attr]
    shortest, longest = lengths.index(min(lengths)), lengths.index(max(lengths))
    with torch.no_grad():
        alone = embed(model, data.train.batch([shortest]))  # type: ignore[union-attr]
        padded = embed(model, data.train.batch([shortest, longest]))  # type: ignore[union-attr]
    for name in ("embeddings", "pair_embeddings"):
        assert torch.allclose(alone[name][0], padded[name][0], atol=1e-6)
        assert padded[name].norm(dim=1).tolist() == pytest.approx([1, 1])


def test_no_batch_is_longer_than_the_one_that_is_tried_first(tmp_path: Path, bert: Path) -> None:
    rows = [
        "text,pair",
        "a film,very very very very very very very bad",
        "very very very very very very good,a",
    ]
    (tmp_path / "pairs.csv").write_text("\n".join([*rows, *["a,film"] * 20]))
    data = pairs(tmp_path / "pairs.csv", bert).data()  # type: ignore[misc]
    longest = data.longest(1)  # type: ignore[misc, operator]
    for batch in data.train.batches(1, seed=0, epoch=1):  # type: ignore[union-attr]
        assert all(entry.shape[-1] <= longest[name].shape[-1] for name, entry in batch.items())


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=264, d_model=16, num_layers=1, num_heads=2).save_pretrained(
        tmp_path / "t5"
    )
    with pytest.raises(UsageError, match="has an encoder and a decoder"):
        pairs(write_pairs(tmp_path / "pairs.csv"), tmp_path / "t5", tokenizer="bytes")


def test_a_single_pair_and_a_wrong_temperature_are_refused(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "one.csv").write_text("text,pair\na film,film\nfilm,a\n")
    with pytest.raises(
        UsageError, match=r"1 pair to train on beside 1 for validation; .* --validation-file, or more"
    ):
        pairs(tmp_path / "one.csv", bert)
    file = write_pairs(tmp_path / "pairs.csv")
    (tmp_path / "one.csv").write_text("text,pair\na film,film\n")
    with pytest.raises(UsageError, match=r"1 pair to train on; .* Give more pairs"):
        pairs(tmp_path / "one.csv", bert, validation_file=file)
    with pytest.raises(UsageError, match="temperature is 0"):
        pairs(write_pairs(tmp_path / "pairs.csv"), bert, temperature=0)
