"""Language models: a job from texts, concatenated and cut into sequences of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from brimful.errors import DataError, UsageError
from brimful.job import Batch, Data, Job
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.rows import TABLES, Row, read_rows, read_text, undecoded
from brimful.recipes.samples import check_fraction, digest
from brimful.recipes.text_models import find_text_model
from brimful.recipes.tokens import Tokenizer, Tokens

# B rows, T tokens


def language_model(
    *files: Path | str,
    model: Path | str = "gpt2",
    tokenizer: Path | str | None = None,
    text_column: str = "text",
    encoding: str = "utf-8",
    sequence_length: int = 1024,
    validation_fraction: float = 0.05,
    lora: str | None = None,
    quantize: str | None = None,
    bad_samples: str = "refuse",
) -> Job:
    """Create a job that trains a language model to predict the next token.

    Texts are concatenated, each with an end token, and cut into sequences of `sequence_length` tokens; texts in
    a sequence attend to those before them, as in Brown et al. 2020, GPT-3, appendix B. The last tokens of each
    file are for validation.

    Args:
        *files: Files of text; .jsonl, .csv and .tsv files have one text per row, any other is one text.
        model: A directory saved by transformers or an id on the Hub, such as "Qwen/Qwen2.5-0.5B", to start from
            its weights; or a built-in language model, such as "gpt2", with random weights.
        tokenizer: A directory or a `tokenizer.json`, or "bytes". None uses that of the model's directory; for
            a built-in model, bytes.
        text_column: Name of the text column in tables.
        encoding: Encoding of the files.
        sequence_length: Tokens per sequence.
        validation_fraction: Fraction of each file's tokens for validation.
        lora: Train LoRA adapters of peft over frozen weights, such as "r=16,alpha=32,targets=q_proj+v_proj";
            see `adapters.LoraOptions`. None trains all weights. Frozen weights of a directory keep their type.
        quantize: Quantise the frozen weights by bitsandbytes: "nf4" or "fp4", "nf4-dq" or "fp4-dq" with
            quantised scales, or "int8".
        bad_samples: "refuse" files and rows that are not text, or "skip" them with a warning.

    Returns:
        A job with data.

    Raises:
        UsageError: A file, column, model or tokenizer does not exist, or there is too little text.
        DataError: Files or rows are bad, and they are refused.
    """
    if not files:
        raise UsageError("a language model is trained on files, and none is given.")
    check_fraction(validation_fraction)
    paths = [Path(file) for file in files]
    found = find_text_model(
        model,
        tokenizer,
        num_labels=None,
        sequence_length=sequence_length,
        lora=lora,
        quantization=quantize,
    )
    if found.end is None:
        raise UsageError(
            f"the tokenizer {found.about['tokenizer']} names no end-of-text token. Give a directory whose "
            "tokenizer_config.json has an eos_token."
        )
    texts = _read(paths, text_column, encoding, BadSamples.parse(bad_samples))
    training, validation = _packed(texts, found.tokenizer, found.end, sequence_length, validation_fraction)
    vocab_size = found.tokenizer.vocab_size

    def make_samples(samples: int) -> Batch:
        return {"tokens": torch.randint(vocab_size, (samples, sequence_length), dtype=torch.int32)}

    return Job(
        model=found.build,
        weights=found.weights,
        loss=_loss,
        count=_count,
        counted="tokens",
        batch=make_samples,
        optimizer=found.optimizer,
        data=lambda: Data(train={"tokens": training}, validation={"tokens": validation}),
        name=f"{paths[0].stem}-{Path(model).name}",
        about={
            "task": "language-model",
            **found.about,
            "files": [str(path) for path in paths],
            "sequence_length": sequence_length,
            "training_tokens": training.numel(),
            "validation_tokens": validation.numel(),
            "data": digest(rows.numpy().data for rows in (training, validation)),
        },
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"].long()  # (B, T); kept as 4 bytes each until here
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def _count(batch: Batch) -> int:
    """Tokens that the loss averages over: all but the first of each row."""
    rows, length = batch["tokens"].shape
    return int(rows * (length - 1))


def _read(paths: Sequence[Path], text_column: str, encoding: str, asked: BadSamples) -> list[list[str]]:
    """The texts of each file."""
    of_files = [list(_texts_of(path, text_column, encoding)) for path in paths]
    everything = list(chain.from_iterable(of_files))
    check_bad_samples(
        (entry for entry in everything if isinstance(entry, BadSample)), of=len(everything), asked=asked
    )
    return [[entry.values[0] for entry in entries if isinstance(entry, Row)] for entries in of_files]


def _texts_of(path: Path, text_column: str, encoding: str) -> Iterator[Row | BadSample]:
    try:
        if path.suffix.lower() in TABLES:
            yield from read_rows(path, {"text_column": text_column}, encoding)
            return
        text = read_text(path, encoding)
    except DataError as error:
        yield BadSample(where=str(path), why=str(error))
        return
    why = undecoded(text) or ("an empty file" if not text.strip() else None)
    yield Row(where=str(path), values=(text,)) if why is None else BadSample(where=str(path), why=why)


def _packed(
    of_files: Sequence[Sequence[str]], tokenizer: Tokenizer, end: int, length: int, validation_fraction: float
) -> tuple[Tensor, Tensor]:
    """Rows of tokens for training and validation, (rows, T) each, int32."""
    training, validation = [], []
    for texts in of_files:
        tokens = _joined(texts, tokenizer, end)
        count = round(len(tokens) * validation_fraction)
        training.append(tokens[: len(tokens) - count])
        validation.append(tokens[len(tokens) - count :])
    rows = _rows(np.concatenate(training), length), _rows(np.concatenate(validation), length)
    if not all(map(len, rows)):
        total = sum(map(len, training)) + sum(map(len, validation))
        raise UsageError(
            f"{total} tokens make {len(rows[0])} rows of {length} to train on and {len(rows[1])} to validate "
            "with; at least 1 each is needed. Give more text, a shorter sequence length or another validation "
            "fraction."
        )
    return rows


def _joined(texts: Sequence[str], tokenizer: Tokenizer, end: int) -> Tokens:
    """The texts of a file, concatenated, each with its end token."""
    after = np.array([end], dtype=np.int32)
    parts = [part for tokens in tokenizer.encode_plain(texts) for part in (tokens, after)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _rows(tokens: Tokens, length: int) -> Tensor:
    """Tokens as whole rows, (rows, T); the rest is dropped."""
    count = len(tokens) // length
    return torch.from_numpy(tokens[: count * length].reshape(count, length))
