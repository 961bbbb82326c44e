"""Texts in files, as jobs: classification and language models."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import brimful as bf
from brimful.errors import BrimfulError, DataError, UnknownNameError, UsageError
from brimful.job import Data
from brimful.recipes import language_model, text_classification
from brimful.recipes.bad_samples import BadSample
from brimful.recipes.rows import Row, read_rows
from brimful.recipes.tokens import Bytes

transformers = pytest.importorskip("transformers")

NEW_HEAD = pytest.warns(UserWarning, match=r"classifier\.bias, classifier\.weight\b.*start from random")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "a", "very"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_reviews(path: Path, rows: int = 40) -> Path:
    lines = ["text,label"]
    for number in range(rows):
        words = "very " * (number % 7)
        lines.append(f'"a {words}{"good" if number % 2 else "bad"} film",{"pos" if number % 2 else "neg"}')
    path.write_text("\n".join(lines))
    return path


def classify(file: Path, bert: Path, **options: Any) -> bf.Job:
    return text_classification(file, model=bert, sequence_length=16, **options)


def data_of(job: bf.Job) -> Data:
    assert job.data is not None
    return job.data()


def test_a_pretrained_model_learns_a_table_and_says_its_classes(tmp_path: Path, bert: Path) -> None:
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    run = tmp_path / "run"
    job = replace(job, optimizer=bf.optimizers.named_optimizer("adamw", learning_rate=1e-2))
    trainer = bf.trainer.Trainer(
        job, bf.Settings(micro_batch_size=12), device="cpu", epochs=12, run_dir=run, show_progress=False
    )
    with NEW_HEAD:
        result = trainer.fit()
    assert result.validations[-1].metrics["accuracy"] == 1.0
    assert json.loads((run / "job.json").read_text())["classes"] == ["neg", "pos"]
    assert result.steps[0].samples == 12


def test_the_weights_are_those_of_the_directory_but_for_the_new_head(tmp_path: Path, bert: Path) -> None:
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    model = job.model()  # type: ignore[operator]
    pretrained = transformers.BertModel.from_pretrained(bert)
    name = "encoder.layer.1.output.dense.weight"
    assert not torch.equal(model.bert.get_parameter(name), pretrained.get_parameter(name))
    assert job.weights is not None
    with NEW_HEAD:
        job.weights(model)
    assert torch.equal(model.bert.get_parameter(name), pretrained.get_parameter(name))
    assert model.classifier.weight.shape[0] == 2


def test_padding_changes_neither_loss_nor_gradients(tmp_path: Path, bert: Path) -> None:
    """Of one text alone and beside a longer one."""
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    texts = data_of(job).train
    model = job.model().eval()  # type: ignore[operator]
    lengths = [len(entry["input_ids"]) for entry in texts.entries]  # type: ignore[union-attr]
    short, long = lengths.index(min(lengths)), lengths.index(max(lengths))
    alone = job.loss(model, texts.batch([short]))  # type: ignore[union-attr]
    other = job.loss(model, texts.batch([long]))  # type: ignore[union-attr]
    both = job.loss(model, texts.batch([short, long]))  # type: ignore[union-attr]
    weights = list(model.parameters())
    apart = torch.autograd.grad((alone + other) / 2, weights)
    together = torch.autograd.grad(both, weights)
    for one, two in zip(apart, together, strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    assert both.item() == pytest.approx((alone.item() + other.item()) / 2, rel=1e-5)


def test_planned_is_the_longest_text_and_the_longest_batch_is_tried_first(tmp_path: Path, bert: Path) -> None:
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    assert job.batch(3)["input_ids"].shape == (3, 16)  # type: ignore[operator]
    longest = data_of(job).longest
    assert callable(longest)
    assert longest(4)["input_ids"].shape == (4, 16)


def test_plan_says_what_a_run_takes(tmp_path: Path, bert: Path) -> None:
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    plan = bf.plan(job, device="cpu", global_batch_size=8)
    with NEW_HEAD:
        measured = bf.measure(job, plan)
    assert measured.measured_peak_allocated_bytes == pytest.approx(
        plan.predicted_peak_allocated_bytes, rel=0.02
    )


def test_a_built_in_model_reads_bytes(tmp_path: Path) -> None:
    job = text_classification(write_reviews(tmp_path / "reviews.csv"), model="bert-base", sequence_length=48)
    assert job.weights is None
    assert job.about is not None
    assert job.about["tokenizer"] == "bytes"
    with torch.device("meta"):
        assert job.model().config.vocab_size == Bytes.vocab_size  # type: ignore[operator]


def test_long_texts_are_cut_and_that_is_said(tmp_path: Path, bert: Path) -> None:
    with pytest.warns(UserWarning, match=r"of 40 texts have more than 8 tokens"):
        job = text_classification(write_reviews(tmp_path / "reviews.csv"), model=bert, sequence_length=8)
    ids = data_of(job).longest(4)["input_ids"]  # type: ignore[misc, operator]
    assert ids.shape == (4, 8)
    assert (ids[:, -1] == WORDS.index("[SEP]")).all()


def test_bad_rows_are_listed_by_line(tmp_path: Path, bert: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": "a good film", "label": number % 2}) for number in range(16)]
    rows[1] = '{"text": "a bad'
    rows[2] = json.dumps({"text": "", "label": 1})
    rows[3] = json.dumps({"text": "a film"})
    rows[5] = json.dumps(["no", "object"])
    file.write_text("\n".join(rows))
    with pytest.raises(DataError) as refused:
        classify(file, bert)
    for part in (
        ":2: not JSON",
        ":3: 'text': empty",
        ":4: 'label': there is none",
        ":6: not a JSON object",
        "4 of 16",
    ):
        assert part in str(refused.value)
    with pytest.warns(UserWarning, match="4 of 16"):
        job = classify(file, bert, bad_samples="skip")
    assert job.about is not None
    assert job.about["classes"] == ["0", "1"]


def test_a_row_that_is_nested_too_deeply_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    good, bad = read_rows(tmp_path / "deep.jsonl", {"text_column": "text"}, "utf-8")
    assert isinstance(good, Row)
    assert bad == BadSample(where=f"{tmp_path / 'deep.jsonl'}:2", why="not JSON: nested too deeply")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("rows.jsonl", ['{"text": "a film", "label": NaN}', '{"text": "a film", "label": "nan"}']),
        ("rows.csv", ["a film,nan", "a film, NaN"]),
    ],
)
def test_labels_that_are_nan_are_bad_rows_and_not_a_class(
    tmp_path: Path, bert: Path, name: str, lines: list[str]
) -> None:
    """As pandas and NumPy write labels that are missing; other columns may have them."""
    rows = ["text,label"] if name.endswith("csv") else []
    for label in (0, 1) * 4:
        is_json = name.endswith("jsonl")
        rows.append(f'{{"text": "a film", "label": {label}, "age": NaN}}' if is_json else f"a film,{label}")
    (tmp_path / name).write_text("\n".join([*rows, *lines]))
    with pytest.raises(DataError, match="2 of 10"):
        classify(tmp_path / name, bert)
    with pytest.warns(UserWarning, match="2 of 10"):
        job = classify(tmp_path / name, bert, bad_samples="skip")
    assert job.about is not None
    assert job.about["classes"] == ["0", "1"]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.txt"])
def test_what_is_not_a_regular_file_is_refused_without_waiting_for_it(tmp_path: Path, name: str) -> None:
    def read() -> None:
        if name.endswith("txt"):
            language_model(tmp_path / name, sequence_length=16)
        else:
            text_classification(tmp_path / name, sequence_length=16)

    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match="is not a regular file"):
        read()
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="is not a regular file"):
        read()


@pytest.mark.parametrize("encoding", ["undefined", "punycode", "utf-32", "hex", "nonsense\n"])
def test_an_encoding_that_does_not_fit_is_an_error_of_one_line(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,0\n")
    with pytest.raises(BrimfulError, match=r"a\.csv is not in|there is no encoding") as refused:
        text_classification(tmp_path / "a.csv", encoding=encoding, sequence_length=16)
    assert "\n" not in str(refused.value)


def test_weights_that_would_run_code_are_refused(tmp_path: Path, bert: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    shutil.copytree(bert, tmp_path / "evil")
    (tmp_path / "evil" / "model.safetensors").unlink()
    torch.save({"a": Runs()}, tmp_path / "evil" / "pytorch_model.bin")
    job = classify(write_reviews(tmp_path / "reviews.csv"), tmp_path / "evil")
    assert job.weights is not None
    with pytest.raises(UsageError, match="could run code is not loaded") as refused:
        job.weights(job.model())  # type: ignore[operator]
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Quotes with ends of lines in them, empty lines, characters that other programs take for ends of lines."""
    file = tmp_path / "table.csv"
    file.write_bytes(
        b'text,label\r\n"one\ntwo ""three""",a\r\n\r\nfour\xe2\x80\xa8five,b\r\nsix, seven,a\r\n"'
        + b"x" * 200000
        + b'",b\r\n'
    )
    rows = list(read_rows(file, {"text_column": "text", "label_column": "label"}, "utf-8"))
    assert [row.values for row in rows if isinstance(row, Row)][:2] == [
        ('one\ntwo "three"', "a"),
        ("four\u2028five", "b"),
    ]
    assert [(bad.where, bad.why) for bad in rows if isinstance(bad, BadSample)] == [
        (f"{file}:6", "3 fields, and the header has 2")
    ]
    assert len(rows[-1].values[0]) == 200000  # type: ignore[union-attr]


def test_lone_surrogates_and_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud83d"}\n{"text": "whole"}')
    first, second = read_rows(tmp_path / "half.jsonl", {"text_column": "text"}, "utf-8")
    assert isinstance(first, BadSample)
    assert "half of a pair" in first.why
    assert isinstance(second, Row)
    (tmp_path / "twice.csv").write_text("text,text,label\na,b,c\n")
    with pytest.raises(UsageError, match="several columns text"):
        list(read_rows(tmp_path / "twice.csv", {"text_column": "text", "label_column": "label"}, "utf-8"))


def test_classes_are_numbered_alike_in_every_process(tmp_path: Path, bert: Path) -> None:
    file = tmp_path / "numbers.csv"
    labels = ["1", "01", "10", "2", "--1"]
    file.write_text("text,label\n" + "".join(f"a film,{label}\n" for label in labels * 4))
    job = classify(file, bert)
    assert job.about is not None
    assert job.about["classes"] == ["--1", "01", "1", "10", "2"]
    file.write_text("text,label\n" + "".join(f"a film, {label}\n" for label in labels[:-1] * 4))
    job = classify(file, bert)
    assert job.about is not None
    assert job.about["classes"] == ["01", "1", "2", "10"]


def test_of_two_texts_the_longer_is_cut_and_none_is_lost(tmp_path: Path, bert: Path) -> None:
    file = tmp_path / "pairs.csv"
    row = f"{'very ' * 30},a good film,0\n"
    file.write_text("text,other,label\n" + (row + "a film,bad,1\n") * 4)
    with pytest.warns(UserWarning, match="4 of 8 texts have more than 16 tokens"):
        texts = data_of(classify(file, bert, pair_column="other")).train
    longest = max(texts.entries, key=lambda entry: len(entry["input_ids"]))["input_ids"]  # type: ignore[union-attr]
    assert [WORDS[token] for token in longest[-5:]] == ["[SEP]", "a", "good", "film", "[SEP]"]
    assert len(longest) == 16
    encoded, cut = Bytes().encode(["a" * 30, "ab"], ["bcd", "c" * 20], 16)
    assert cut == 2
    assert [len(entry["input_ids"]) for entry in encoded] == [16, 16]
    assert bytes(token - 3 for token in encoded[0]["input_ids"] if token > 2) == b"a" * 11 + b"bcd"


def test_an_identifier_for_a_label_leaves_nothing_to_validate_and_that_is_said(
    tmp_path: Path, bert: Path
) -> None:
    file = tmp_path / "ids.csv"
    file.write_text("text,label\na film,1\na good film,2\n")
    with pytest.warns(UserWarning, match="2 of 2 classes have no sample for validation"):
        assert data_of(classify(file, bert)).validation is None


@pytest.mark.parametrize("window", [None, 8])
def test_a_language_model_of_a_directory_is_the_one_that_transformers_makes(
    tmp_path: Path, window: int | None
) -> None:
    """Also where its layers see a few tokens behind alone, which plain causal attention would not heed."""
    config = transformers.MistralConfig(
        vocab_size=264,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        sliding_window=window,
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("to be or not to be " * 40)
    job = language_model(tmp_path / "a.txt", model=tmp_path / "model", tokenizer="bytes", sequence_length=32)
    ours = job.model().eval()  # type: ignore[operator]
    assert job.weights is not None
    job.weights(ours)
    ids = job.batch(2)["tokens"].long()  # type: ignore[operator]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)


def test_an_encoder_is_not_taught_the_next_token(tmp_path: Path, bert: Path) -> None:
    (tmp_path / "a.txt").write_text("a good film " * 100)
    with pytest.raises(UsageError, match="is an encoder"):
        language_model(tmp_path / "a.txt", model=bert, sequence_length=16)


def test_a_directory_that_is_called_as_a_built_in_model_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "a.txt").write_text("a good film " * 100)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"Write \./gpt2"):
        language_model("a.txt", model="gpt2", sequence_length=16)


def test_a_classifier_of_a_decoder_that_has_no_padding_is_given_one(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=264, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    config.save_pretrained(tmp_path / "gpt2")
    with pytest.warns(UserWarning, match="has no weights"):
        job = text_classification(
            write_reviews(tmp_path / "reviews.csv"),
            model=tmp_path / "gpt2",
            tokenizer="bytes",
            sequence_length=64,
        )
    model = job.model()  # type: ignore[operator]
    assert torch.isfinite(job.loss(model, data_of(job).longest(4)))  # type: ignore[misc, operator]


def test_a_wrong_encoding_is_told_with_the_line(tmp_path: Path, bert: Path) -> None:
    file = tmp_path / "latin.csv"
    file.write_bytes("text,label\ncafé,0\nthé,1\nfilm,1\nfilm,0\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv:2: 'text': byte 0xE9 is not UTF-8"):
        classify(file, bert)
    job = classify(file, bert, encoding="latin-1")
    assert job.about is not None
    assert job.about["training_texts"] == 2


def test_classes_only_in_the_validation_data_are_refused(tmp_path: Path, bert: Path) -> None:
    train, other = write_reviews(tmp_path / "train.csv"), tmp_path / "other.csv"
    other.write_text("text,label\na good film,pos\na film,meh\n")
    with pytest.raises(DataError, match=r"other\.csv:3: class 'meh'"):
        classify(train, bert, validation_file=other)


def test_two_texts_of_a_row_are_told_apart(tmp_path: Path, bert: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("text\tother\tlabel\n" + "a good film\ta bad film\t0\na film\tvery good\t1\n" * 4)
    batch = data_of(classify(file, bert, pair_column="other")).train.batch([0])  # type: ignore[union-attr]
    assert batch["token_type_ids"].sum() > 0


def test_unknown_models_and_wrong_kinds_are_refused(tmp_path: Path) -> None:
    file = write_reviews(tmp_path / "reviews.csv")
    with pytest.raises(UnknownNameError, match="text classifier 'gpt2'"):
        text_classification(file, model="gpt2", sequence_length=16)
    with pytest.raises(UsageError, match="multiple of 8"):
        text_classification(file, model="bert-base", sequence_length=20)


def test_texts_are_packed_without_losing_any_but_the_rest(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 50)
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n' * 30)
    files = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    job = language_model(*files, model=llama, tokenizer="bytes", sequence_length=16, validation_fraction=0.2)
    data = data_of(job)
    # 151 tokens in the one, 60 × 4 in the other; a fifth of each is for validation
    assert data.train["tokens"].shape == ((121 + 192) // 16, 16)
    assert data.validation["tokens"].shape == ((30 + 48) // 16, 16)
    text = bytes(token - 3 for token in data.train["tokens"].flatten().tolist() if token > 2)
    assert text.startswith(b"abc" * 40)
    assert b"onetwo" in text


def test_a_language_model_of_a_directory_learns_and_is_as_planned(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 100)
    job = language_model(tmp_path / "a.txt", model=llama, tokenizer="bytes", sequence_length=32)
    plan = bf.plan(job, device="cpu", global_batch_size=8, micro_batch_size=4)
    result = bf.trainer.Trainer(job, plan, epochs=1, show_progress=False).fit()
    assert result.validations[-1].loss < result.steps[0].loss
    assert result.measured_peak_allocated_bytes == pytest.approx(plan.predicted_peak_allocated_bytes, rel=0.02)


def test_an_id_on_the_hub_is_its_directory_in_the_cache(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its weights, and without code or pickles."""
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    (tmp_path / "a.txt").write_text("the quick brown fox " * 100)
    job = language_model(tmp_path / "a.txt", model="some/llama", tokenizer="bytes", sequence_length=32)
    assert job.weights is not None
    assert asked["name"] == "some/llama"
    assert not {".py", ".bin", ".pt"} & {Path(pattern).suffix for pattern in asked["patterns"]}


def test_an_id_that_cannot_be_downloaded_says_what_to_fetch_and_what_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "a.txt").write_text("the quick brown fox " * 100)
    with pytest.raises(UsageError, match=r"hf download Qwen/Qwen2\.5-0\.5Bx; .*Nearest: Qwen/Qwen2\.5-0\.5B"):
        language_model(tmp_path / "a.txt", model="Qwen/Qwen2.5-0.5Bx", sequence_length=32)


def test_too_little_text_and_files_that_are_none_are_refused(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_bytes(b"\x80\x81abc")
    (tmp_path / "c.txt").write_text("")
    with pytest.raises(UsageError, match="make 0 rows of 32"):
        language_model(tmp_path / "a.txt", model=llama, tokenizer="bytes", sequence_length=32)
    with pytest.raises(DataError, match=r"b\.txt: byte 0x80[^\n]*\n[^\n]*c\.txt: an empty file"):
        language_model(
            *(tmp_path / name for name in ("a.txt", "b.txt", "c.txt")),
            model=llama,
            tokenizer="bytes",
            sequence_length=32,
        )
    with pytest.raises(UsageError, match="positions for 64 tokens"):
        language_model(tmp_path / "a.txt", model=llama, tokenizer="bytes", sequence_length=128)


def test_a_model_without_its_tokenizer_is_not_trained_on_unknown_words(tmp_path: Path) -> None:
    """transformers makes a tokenizer of special tokens alone."""
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"bare has no tokenizer: .* special tokens and no words.*--tokenizer"):
        text_classification(write_reviews(tmp_path / "reviews.csv"), model=tmp_path / "bare")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"label_column": "verdict"},
            "no column verdict. It has text, label. Name the right one: label_column",
        ),
        ({"pair_column": "answer"}, "no column answer. It has text, label. Name the right one: pair_column"),
        ({"text_column": "review"}, r"--text-column"),
    ],
)
def test_an_error_names_the_option_of_the_column_that_does_not_exist(
    options: dict[str, Any], expected: str, tmp_path: Path, bert: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        classify(write_reviews(tmp_path / "reviews.csv"), bert, **options)


def test_rows_with_labels_of_another_type_are_refused_or_skipped(tmp_path: Path, bert: Path) -> None:
    labels = ["good", "bad", "good", "bad", 1, "good", "bad", True]
    rows = [json.dumps({"text": "a film", "label": label}) for label in labels]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(DataError) as refused:
        classify(file, bert)
    for expected in (
        "2 of 8 samples",
        "mixed.jsonl:5: 'label': 1 is a number, and of 6 rows it is a text",
        "mixed.jsonl:8: 'label': True is a boolean",
    ):
        assert expected in str(refused.value)
    with pytest.warns(UserWarning, match="2 of 8 samples"):
        job = classify(file, bert, bad_samples="skip")
    assert job.about is not None
    assert job.about["classes"] == ["bad", "good"]


def test_whole_and_decimal_numbers_are_labels_of_one_type(tmp_path: Path, bert: Path) -> None:
    rows = [json.dumps({"text": "a film", "label": label}) for label in (0, 1.0, 0.0, 1)]
    (tmp_path / "numbers.jsonl").write_text("\n".join(rows))
    job = classify(tmp_path / "numbers.jsonl", bert)
    assert job.about is not None
    assert job.about["classes"] == ["0", "1"]


def test_a_plan_that_splits_texts_gives_no_advice_about_a_count(tmp_path: Path, bert: Path) -> None:
    job = classify(write_reviews(tmp_path / "reviews.csv"), bert)
    plan = bf.plan(job, "cpu", global_batch_size=8, micro_batch_size=2)
    assert plan.settings.gradient_accumulation_steps == 4
    assert not any("count" in note for note in plan.notes)
