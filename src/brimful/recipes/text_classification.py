"""Text classification: a job from a table with a column of texts and one of labels."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Data, Job
from brimful.models.checks import check_multiple
from brimful.recipes.adapters import LoraOptions
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.checks import check_fraction, digest
from brimful.recipes.classes import (
    accuracy,
    balanced_weights,
    count,
    loss,
    split_by_class,
    warn_without_validation,
)
from brimful.recipes.rows import Row, read_rows
from brimful.recipes.text_models import TextModel, find_text_model
from brimful.recipes.tokens import Encoded
from brimful.trainer.data.length_buckets import LengthBuckets, pad_batch

# B texts, T tokens

_MULTIPLE = 8
_NUMBER = re.compile(r"-?[0-9]+")
_VALIDATION_TEXTS = 64
"""Texts per validation batch, which is computed in micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Texts:
    """Tokenized texts with labels: `Samples`; iterating over them yields validation batches in order."""

    encoded: Sequence[Encoded]
    labels: Sequence[int]
    padding: int

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Batches of texts of similar length; see `Samples`."""
        buckets = self._buckets(size, seed)
        buckets.set_epoch(epoch)
        return (self.batch(indices) for indices in list(buckets)[skip:])

    def __iter__(self) -> Iterator[Batch]:
        indices = range(len(self))
        return (
            self.batch(indices[start : start + _VALIDATION_TEXTS])
            for start in range(0, len(self), _VALIDATION_TEXTS)
        )

    def longest(self, size: int) -> Batch:
        """The batch that takes the most memory."""
        return self.batch(self._buckets(size, 0).longest)

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch of some of the texts, padded to the longest of them."""
        samples = [
            {name: torch.from_numpy(part).long() for name, part in self.encoded[index].items()}
            | {"labels": self.labels[index]}
            for index in indices
        ]
        values = {"input_ids": self.padding} | ({"token_type_ids": 0} if "token_type_ids" in samples[0] else {})
        return pad_batch(samples, values, multiple_of=_MULTIPLE)

    def some(self, indices: Sequence[int]) -> _Texts:
        """A subset of the texts."""
        return _Texts(
            encoded=[self.encoded[index] for index in indices],
            labels=[self.labels[index] for index in indices],
            padding=self.padding,
        )

    @property
    def most_tokens(self) -> int:
        """Number of tokens in the longest text."""
        return max((len(entry["input_ids"]) for entry in self.encoded), default=0)

    def _buckets(self, size: int, seed: int) -> LengthBuckets:
        return LengthBuckets([len(entry["input_ids"]) for entry in self.encoded], size, seed=seed)


def text_classification(
    file: Path | str,
    *,
    model: Path | str = "bert-base",
    tokenizer: Path | str | None = None,
    validation_file: Path | str | None = None,
    text_column: str = "text",
    pair_column: str | None = None,
    label_column: str = "label",
    encoding: str = "utf-8",
    sequence_length: int = 512,
    validation_fraction: float = 0.1,
    balance_classes: bool = False,
    lora: str | None = None,
    quantize: str | None = None,
    bad_samples: str = "refuse",
    seed: int = 0,
) -> Job:
    """Create a job that trains a text classifier.

    Each batch has texts of similar length, padded to the longest of them in multiples of 8. Memory is planned
    for batches of the longest text, so the mean step is faster than predicted.

    Args:
        file: A .csv or .tsv file with a header, or a .jsonl file of objects.
        model: A directory saved by transformers, to start from its weights; or a built-in classifier, such as
            "bert-base", with random weights.
        tokenizer: A directory or a `tokenizer.json`, or "bytes". None uses that of the model's directory; for
            a built-in model, bytes.
        validation_file: A file of validation texts; None uses a part of `file`.
        text_column: Name of the text column.
        pair_column: Name of the column of second texts, for pairs of texts.
        label_column: Name of the label column.
        encoding: Encoding of the files.
        sequence_length: Maximum tokens per text, a multiple of 8; longer texts are truncated at the end.
        validation_fraction: Fraction of each class's texts for validation, without a `validation_file`.
        balance_classes: Weight each text by the inverse frequency of its class.
        lora: Train LoRA adapters of peft over frozen weights, such as "r=16,alpha=32,targets=q_proj+v_proj";
            see `adapters.LoraOptions`. None trains all weights. Frozen weights of a directory keep their type.
        quantize: Quantise the frozen weights by bitsandbytes: "nf4" or "fp4", "nf4-dq" or "fp4-dq" with
            quantised scales, or "int8".
        bad_samples: "refuse" rows without text or label, or "skip" them with a warning.
        seed: Seed of the choice of validation texts.

    Returns:
        A job with data, the metric `accuracy`, and its classes in `about`.

    Raises:
        UsageError: A file, column, model or tokenizer does not exist, or a number is out of range.
        DataError: Rows are bad, and they are refused.
    """
    check_fraction(validation_fraction)
    check_multiple("text classification", "sequence_length", sequence_length, _MULTIPLE)
    bad = BadSamples.parse(bad_samples)
    columns = (text_column, label_column, *(() if pair_column is None else (pair_column,)))
    rows = _good_rows(Path(file), columns, encoding, bad)
    classes = _classes([_label(row) for row in rows], file)
    found = find_text_model(
        model,
        tokenizer,
        sequence_length=sequence_length,
        num_labels=len(classes),
        lora=None if lora is None else LoraOptions.parse(lora),
        quantization=quantize,
    )
    encode = partial(_encode, model=found, classes=classes, most_tokens=sequence_length)
    training = encode(rows)
    of_validation: list[Row] = []
    if validation_file is None:
        for_training, for_validation = split_by_class(training.labels, validation_fraction, seed)
        validation, training = training.some(for_validation), training.some(for_training)
    else:
        of_validation = _known(_good_rows(Path(validation_file), columns, encoding, bad), classes, bad)
        validation = encode(of_validation)
    warn_without_validation(classes, validation.labels)
    weights = balanced_weights(training.labels, len(classes)) if balance_classes else None
    longest = -(-max(training.most_tokens, validation.most_tokens) // _MULTIPLE) * _MULTIPLE
    has_types = "token_type_ids" in training.encoded[0]
    vocab_size = found.tokenizer.vocab_size

    def make_samples(samples: int) -> Batch:
        shape = (samples, longest)
        batch = {
            "input_ids": torch.randint(vocab_size, shape),  # (B, T)
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.randint(len(classes), (samples,)),  # (B,)
        }
        return batch | ({"token_type_ids": torch.zeros(shape, dtype=torch.int64)} if has_types else {})

    return Job(
        model=found.build,
        weights=found.weights,
        loss=partial(loss, logits_of=_logits, class_weights=weights),
        count=None if weights is None else partial(count, class_weights=weights),
        batch=make_samples,
        optimizer=found.optimizer,
        data=lambda: Data(
            train=training, validation=validation if len(validation) else None, longest=training.longest
        ),
        metrics=partial(accuracy, logits_of=_logits),
        name=f"{Path(file).stem}-{Path(model).name}",
        about={
            "task": "text-classification",
            **found.about,
            "classes": list(classes),
            "columns": list(columns),
            "sequence_length": sequence_length,
            "balance_classes": balance_classes,
            "training_texts": len(training),
            "validation_texts": len(validation),
            "data": digest(value for row in (*rows, *of_validation) for value in row.values),
        },
    )


def _good_rows(path: Path, columns: Sequence[str], encoding: str, asked: BadSamples) -> list[Row]:
    rows = [_with_a_label(row) for row in read_rows(path, columns, encoding)]
    check_bad_samples((row for row in rows if isinstance(row, BadSample)), of=len(rows), asked=asked)
    good = [row for row in rows if isinstance(row, Row)]
    if not good:
        raise UsageError(f"{path} has no rows.")
    return good


def _with_a_label(row: Row | BadSample) -> Row | BadSample:
    """Refuse NaN, which pandas and NumPy write for a missing label."""
    if isinstance(row, BadSample) or _label(row).lower() != "nan":
        return row
    return BadSample(where=row.where, why="the label is NaN; rename the class if it is one")


def _label(row: Row) -> str:
    return row.values[1].strip()


def _classes(labels: Sequence[str], file: Path | str) -> tuple[str, ...]:
    """Names of the classes, in numeric order if all are numbers."""
    names = set(labels)
    if len(names) < 2:
        raise UsageError(f"{file} has labels of one class only, {labels[0]!r}; at least 2 are needed.")
    are_numbers = all(_NUMBER.fullmatch(name) for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if are_numbers else (0, name)))


def _known(rows: list[Row], classes: tuple[str, ...], asked: BadSamples) -> list[Row]:
    """The validation rows; refuse or skip those with a class that the training data lack."""
    unknown = [row for row in rows if _label(row) not in classes]
    check_bad_samples(
        (
            BadSample(where=row.where, why=f"class {_label(row)!r} is not in the training data")
            for row in unknown
        ),
        of=len(rows),
        asked=asked,
    )
    return [row for row in rows if _label(row) in classes]


def _encode(rows: Sequence[Row], *, model: TextModel, classes: Sequence[str], most_tokens: int) -> _Texts:
    pairs = [row.values[2] for row in rows] if rows and len(rows[0].values) > 2 else None
    encoded, cut = model.tokenizer.encode([row.values[0] for row in rows], pairs, most_tokens)
    if cut:
        warnings.warn(
            f"{cut} of {len(rows)} texts have more than {most_tokens} tokens; what is beyond is cut off"
            f"{', first of the longer of a pair' if pairs else ''}.",
            stacklevel=3,
        )
    numbers = {name: number for number, name in enumerate(classes)}
    return _Texts(encoded=encoded, labels=[numbers[_label(row)] for row in rows], padding=model.padding)


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits
