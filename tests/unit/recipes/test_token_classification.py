"""Words with a tag each, as a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import brimful as bf
from brimful.errors import DataError
from brimful.recipes import save_pretrained, token_classification
from brimful.recipes.bad_samples import BadSample
from brimful.recipes.entities import entities, tag_counts, tag_scores
from brimful.recipes.rows import Row
from brimful.recipes.tagged_text import read_tagged
from brimful.recipes.tokens import Bytes, Pretrained

transformers = pytest.importorskip("transformers")

NAMED = {"tokens_column": "tokens", "tags_column": "tags"}

pytestmark = pytest.mark.filterwarnings("ignore:.*start from random weights")


def write_sentences(path: Path, rows: int = 48) -> Path:
    """Good films are entities of two words, "very" is one."""
    sentences = []
    for number in range(rows):
        words = ["a", *["very"] * (number % 4), "good" if number % 3 else "bad", "film"]
        tags = ["O" if word in ("a", "bad") else "B-ADV" if word == "very" else "B-X" for word in words]
        tags[-1] = "I-X" if number % 3 else "O"
        sentences.append((words, tags))
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"tokens": words, "tags": tags}) for words, tags in sentences))
    elif path.suffix == ".csv":
        lines = [f"{' '.join(words)},{' '.join(tags)}" for words, tags in sentences]
        path.write_text("\n".join(["tokens,tags", *lines]))
    else:
        lines = ["-DOCSTART- -X- O\n"]
        for words, tags in sentences:
            lines += [*(f"{word} NN {tag}" for word, tag in zip(words, tags, strict=True)), ""]
        path.write_text("\n".join(lines))
    return path


def tag(file: Path, model: Path, **options: Any) -> bf.Job:
    return token_classification(file, model=model, sequence_length=16, **options)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")  # of whole words in the test
def test_tags_are_learned_and_a_pipeline_finds_the_entities(tmp_path: Path, bert: Path) -> None:
    job = tag(write_sentences(tmp_path / "films.conll"), bert)
    job = replace(job, optimizer=bf.named_optimizer("adamw", learning_rate=1e-2))
    plan = bf.plan(job, device="cpu", global_batch_size=8, micro_batch_size=4)
    trainer = bf.Trainer(job, plan, epochs=8, run_dir=tmp_path / "run", show_progress=False)
    result = trainer.fit()
    assert result.validations[-1].metrics == {"accuracy": 1, "entity_f1": 1}
    assert result.measured_peak_allocated_bytes == pytest.approx(plan.predicted_peak_allocated_bytes, rel=0.02)
    directory = str(save_pretrained(tmp_path / "run"))
    find = transformers.pipeline("token-classification", directory, aggregation_strategy="first")
    found = [(entry["word"], entry["entity_group"]) for entry in find("a very good film")]
    assert found == [("very", "ADV"), ("good film", "X")]


def test_a_run_in_micro_batches_and_resumed_is_the_same(tmp_path: Path, bert: Path) -> None:
    """Micro-batches have different numbers of words: the loss is a mean over words, not of means."""
    config = transformers.AutoConfig.from_pretrained(bert)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    transformers.AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "plain")
    config.save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="has no weights"):
        job = tag(write_sentences(tmp_path / "films.jsonl"), tmp_path / "plain", training_metrics=True)

    def train(samples: int, **options: Any) -> Any:
        settings = bf.Settings(micro_batch_size=samples, gradient_accumulation_steps=8 // samples)
        return bf.Trainer(job, settings, device="cpu", epochs=1, show_progress=False, **options).fit()

    whole = train(8)
    split = train(2)
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    assert split.validations[-1].metrics == pytest.approx(whole.validations[-1].metrics, rel=1e-5)
    train(2, run_dir=tmp_path / "run", steps=4)
    assert train(2, run_dir=tmp_path / "run", resume=True).losses == split.losses


def test_every_kind_of_file_has_the_same_sentences(tmp_path: Path, bert: Path) -> None:
    batches = []
    for name in ("films.jsonl", "films.csv", "films.bio"):
        job = tag(write_sentences(tmp_path / name), bert)
        batches.append(job.data().train.batch(range(30)))  # type: ignore[misc, union-attr]
        assert job.about is not None
        assert job.about["classes"] == ["B-ADV", "B-X", "I-X", "O"]
    assert all(torch.equal(batches[0][name], other[name]) for other in batches[1:] for name in other)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-A I-A O B-A", [(0, 2, "A"), (3, 4, "A")]),
        ("B-A B-A I-A", [(0, 1, "A"), (1, 3, "A")]),
        ("I-A I-A I-B O", [(0, 2, "A"), (2, 3, "B")]),
        ("B-A E-A S-B S-B O", [(0, 2, "A"), (2, 3, "B"), (3, 4, "B")]),
        ("O I-A O", [(1, 2, "A")]),
        ("B-A I-B", [(0, 1, "A"), (1, 2, "B")]),
        ("O O", []),
        ("B-a-b I-a-b", [(0, 2, "a-b")]),
    ],
)
def test_entities_are_those_of_conlleval(tags: str, expected: list[Any]) -> None:
    assert entities(tags.split()) == expected


def test_scores_count_whole_entities_and_labelled_words_alone() -> None:
    """Of 3 entities one is found, one ends too early, one is missed; a word of padding is predicted."""
    tags = ("B-A", "I-A", "O")
    labels = torch.tensor([[0, 1, 2, 0, 1, -100], [0, 2, -100, -100, -100, -100]])
    predicted = torch.tensor([[0, 1, 2, 0, 2, 0], [2, 2, 0, 0, 0, 0]])
    logits = F.one_hot(predicted, 3).float()
    batch = {"labels": labels, "logits": logits}
    means = tag_counts(torch.nn.Identity(), batch, logits_of=lambda _model, batch: batch["logits"], tags=tags)
    scores = tag_scores(means)
    assert scores["accuracy"].item() == pytest.approx(5 / 7)
    assert scores["entity_f1"].item() == pytest.approx(2 * 1 / (2 + 3))


def test_tags_that_name_no_entities_have_the_f1_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    torch.manual_seed(0)
    labels, logits = torch.randint(4, (6, 10)), torch.randn(6, 10, 4)
    batch = {"labels": labels, "logits": logits}
    tags = ("NOUN", "VERB", "DET", "ADJ")
    means = tag_counts(torch.nn.Identity(), batch, logits_of=lambda _model, batch: batch["logits"], tags=tags)
    expected = metrics.f1_score(labels.flatten(), logits.argmax(2).flatten(), average="macro")
    assert tag_scores(means)["macro_f1"].item() == pytest.approx(expected)


def test_the_first_token_of_each_word_is_labelled(tmp_path: Path) -> None:
    """By a byte-level BPE, whose tokens of a word begin with its space, and by bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["good films are good"] * 4, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sentences = [["good", "films"], ["é", "good", "goods"]]
    pretrained = Pretrained(tmp_path / "tokenizer.json")
    for encoder in (pretrained, Bytes()):
        for words, (tokens, firsts) in zip(sentences, encoder.encode_words(sentences, 64), strict=True):
            assert len(tokens) == len(firsts)
            assert [first for first in firsts if first is not None] == list(range(len(words)))
    (tokens, firsts), _ = pretrained.encode_words(sentences, 64)
    plain = pretrained.encode_plain(["good films"])[0]
    assert np.array_equal(tokens, plain)  # as at inference
    (tokens, firsts), _ = Bytes().encode_words(sentences, 7)
    assert bytes((tokens[:-1] - 3).tolist()) == b"good f"
    assert (tokens[-1], firsts) == (1, [0, None, None, None, None, 1, None])


def test_bad_sentences_are_listed_by_line_and_cut_words_are_reported(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "a.conll").write_text("good B-X\nfilm\n\n" + "a O\ngood B-X\n\n" * 8)
    with pytest.raises(DataError, match=r"1 of 9 .*\n.*a\.conll:2: one column"):
        tag(tmp_path / "a.conll", bert)
    rows = [
        {"tokens": ["a", "film"], "tags": ["O"]},
        {"tokens": [], "tags": []},
        {"tokens": ["a"], "tags": "O O"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match=r"2 words and 1 tags\n.*no words\n.*1 words and 2 tags"):
        tag(tmp_path / "a.jsonl", bert)
    (tmp_path / "long.conll").write_text("a O\n" * 40 + "good B-X\n\n" + "good B-X\na O\n\n" * 8)
    with pytest.warns(UserWarning, match=r"1 of \d sentences have words without a label"):
        job = tag(tmp_path / "long.conll", bert, validation_fraction=0.2)
    assert len(job.data().longest(1)["labels"][0]) == 16  # type: ignore[misc, operator]


def test_columns_are_separated_by_tabs_else_by_spaces_and_other_white_space_is_of_a_word(
    tmp_path: Path,
) -> None:
    lines = [
        "10\u00a0000 X O",
        "a\u3000film  B-X\r",
        "",
        "very good\tB-X\r",
        "bad\t O \t",
        "\t",
        "\u00a0",
        "a O",
    ]
    (tmp_path / "a.conll").write_bytes("\n".join(lines).encode())
    (tmp_path / "a.csv").write_text("tokens,tags\n10\u00a0000 a,O B-X\n", encoding="utf-8")
    rows = read_tagged(tmp_path / "a.conll", NAMED, "utf-8")
    assert [row.lists for row in rows if isinstance(row, Row)] == [
        (("10\u00a0000", "a\u3000film"), ("O", "B-X")),
        (("very good", "bad"), ("B-X", "O")),
        (("a",), ("O",)),
    ]
    (row,) = read_tagged(tmp_path / "a.csv", NAMED, "utf-8")
    assert isinstance(row, Row)
    assert row.lists == (("10\u00a0000", "a"), ("O", "B-X"))
    (tmp_path / "bad.conll").write_text("\tO\n\n\u00a0 O\n\na\t\n\na\t\u00a0", encoding="utf-8")
    whys = [
        row.why for row in read_tagged(tmp_path / "bad.conll", NAMED, "utf-8") if isinstance(row, BadSample)
    ]
    assert [why.partition(";")[0] for why in whys] == [
        "no word in the first column",
        "no word in the first column",
        "one column",
        "no tag in the last column",
    ]


def test_comments_are_listed_and_skipped_and_the_word_hash_is_kept(tmp_path: Path, bert: Path) -> None:
    """As MultiCoNER writes comments, with as many columns as its words, or with a tab."""
    comments = ("# id 12 domain=en", "# id 5239d808\tdomain=en")
    sentences = [
        [comments[n % 2], *(["# _ _ O"] if n < 2 else []), "a _ _ O", "film _ _ B-X"] for n in range(8)
    ]
    (tmp_path / "a.conll").write_text("\n\n".join(map("\n".join, sentences)))
    with pytest.raises(
        DataError, match=r"8 of 16 .*\n.*a\.conll:1: a comment, '# id 12 domain=en', has no word"
    ):
        tag(tmp_path / "a.conll", bert)
    with pytest.warns(UserWarning, match="8 of 16 samples cannot be used and are skipped"):
        job = tag(tmp_path / "a.conll", bert, bad_samples="skip")
    assert job.about is not None
    assert job.about["classes"] == ["B-X", "O"]
    rows = [row for row in read_tagged(tmp_path / "a.conll", NAMED, "utf-8") if isinstance(row, Row)]
    assert [row.lists[0] for row in rows] == [("#", "a", "film")] * 2 + [("a", "film")] * 6


def test_tags_of_two_types_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"tokens": ["a", "b"], "tags": [0, 1]}\n' * 2 + '{"tokens": ["a"], "tags": ["O"]}\n')
    (bad,) = [row for row in read_tagged(file, NAMED, "utf-8") if isinstance(row, BadSample)]
    assert bad.where.endswith("a.jsonl:3")
    assert "'O' is a text, and of 2 rows it is a number" in bad.why
