"""Text classification: a job from a table with a column of texts and one of labels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Data, Job
from brimful.models.checks import check_multiple
from brimful.recipes.bad_samples import BadSamples
from brimful.recipes.classes import one_label, warn_without_validation
from brimful.recipes.labelled_rows import class_names, contents, good_rows, rows_of_known_classes
from brimful.recipes.multi_label import several_labels, targets_of
from brimful.recipes.rows import Row, read_rows
from brimful.recipes.samples import check_fraction, digest, sample, split_at_random, split_by_class
from brimful.recipes.text_models import TextModel, find_text_model
from brimful.recipes.tokenized import MULTIPLE, TokenizedTexts, rounded_up

# B texts, T tokens, C classes


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
    multi_label: bool = False,
    label_separator: str = ",",
    balance_classes: bool = False,
    training_metrics: bool = False,
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
        model: A directory saved by transformers or an id on the Hub ("FacebookAI/roberta-base"), to start from
            its weights; or a built-in classifier, such as "bert-base", with random weights.
        tokenizer: A directory or a `tokenizer.json`, or "bytes". None uses that of the model's directory; for
            a built-in model, bytes.
        validation_file: A file of validation texts; None uses a part of `file`.
        text_column: Name of the text column.
        pair_column: Name of the column of second texts, for pairs of texts.
        label_column: Name of the label column.
        encoding: Encoding of the files.
        sequence_length: Maximum tokens per text, a multiple of 8; longer texts are truncated at the end.
        validation_fraction: Fraction of each class's texts for validation, without a `validation_file`; with
            `multi_label`, of all texts, chosen at random.
        multi_label: Texts have several labels or none: a list of them in JSON, or one text of names.
        label_separator: Separates the names of labels in one text.
        balance_classes: Weight each text by the inverse frequency of its class; with `multi_label`, weight
            the texts that have a label as much as those that do not.
        training_metrics: Also compute loss and metrics of training texts at each validation, of as many as
            there are validation texts.
        lora: Train LoRA adapters of peft over frozen weights, such as "r=16,alpha=32,targets=q_proj+v_proj";
            see `adapters.LoraOptions`. None trains all weights. Frozen weights of a directory keep their type.
        quantize: Quantise the frozen weights by bitsandbytes: "nf4" or "fp4", "nf4-dq" or "fp4-dq" with
            quantised scales, or "int8".
        bad_samples: "refuse" rows without text or label, or "skip" them with a warning.
        seed: Seed of the choice of validation texts.

    Returns:
        A job with data, and its classes in `about`. Its metric is `accuracy`; with `multi_label` they are
        `micro_f1`, `macro_f1` and `exact_match`.

    Raises:
        UsageError: A file, column, model or tokenizer does not exist, or a number is out of range.
        DataError: Rows are bad, and they are refused.
    """
    check_fraction(validation_fraction)
    check_multiple("text classification", "sequence_length", sequence_length, MULTIPLE)
    if multi_label and not label_separator:
        raise UsageError("label_separator is empty; give the character between labels, such as a comma.")
    bad = BadSamples.parse(bad_samples)
    columns = {"text_column": text_column, **({} if multi_label else {"label_column": label_column})}
    if pair_column is not None:
        columns["pair_column"] = pair_column

    def read(path: Path) -> list[Row]:
        separator = label_separator if multi_label else None
        rows = read_rows(path, columns, encoding, label_column=label_column, label_separator=separator)
        return good_rows(rows, path, bad)

    rows = read(Path(file))
    classes = class_names(rows, file)
    found = find_text_model(
        model,
        tokenizer,
        num_labels=len(classes),
        sequence_length=sequence_length,
        lora=lora,
        quantization=quantize,
    )
    of_validation = []
    if validation_file is not None:
        of_validation = rows_of_known_classes(read(Path(validation_file)), classes, bad)
    encode = partial(
        _encode,
        model=found,
        classes=classes,
        most_tokens=sequence_length,
        has_pairs=pair_column is not None,
        multi_label=multi_label,
    )
    training = encode(rows)
    if validation_file is not None:
        validation = encode(of_validation)
    else:
        for_training, for_validation = (
            split_at_random(len(training), validation_fraction, seed)
            if multi_label
            else split_by_class(_numbers(training), validation_fraction, seed)
        )
        training, validation = training.some(for_training), training.some(for_validation)
    warn_without_validation(classes, _numbers(validation))
    labels: Any = [entry["labels"] for entry in training.entries]
    objective = (
        several_labels(labels, logits_of=_logits, balances=balance_classes)
        if multi_label
        else one_label(labels, len(classes), logits_of=_logits, balances=balance_classes)
    )
    has_types = "token_type_ids" in training.padding
    vocab_size = found.tokenizer.vocab_size
    longest = rounded_up(max(training.lengths + validation.lengths))

    def make_samples(samples: int) -> Batch:
        shape = (samples, longest)
        batch = {
            "input_ids": torch.randint(vocab_size, shape),  # (B, T)
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.randint(2, (samples, len(classes))).float()  # (B, C)
            if multi_label
            else torch.randint(len(classes), (samples,)),  # (B,)
        }
        return batch | ({"token_type_ids": torch.zeros(shape, dtype=torch.int64)} if has_types else {})

    def data() -> Data:
        has_sample = training_metrics and len(validation) > 0
        return Data(
            train=training,
            validation=validation if len(validation) else None,
            training_sample=training.some(sample(len(training), len(validation), seed)) if has_sample else None,
            longest=training.longest,
        )

    return Job(
        **objective,
        model=found.build,
        weights=found.weights,
        batch=make_samples,
        optimizer=found.optimizer,
        data=data,
        name=f"{Path(file).stem}-{Path(model).name}",
        about={
            "task": "text-classification",
            **found.about,
            "classes": list(classes),
            "columns": [*columns.values(), *((label_column,) if multi_label else ())],
            "sequence_length": sequence_length,
            "balance_classes": balance_classes,
            **({"multi_label": True} if multi_label else {}),
            "training_texts": len(training),
            "validation_texts": len(validation),
            "data": digest(contents((*rows, *of_validation), multi_label=multi_label)),
        },
    )


def _encode(
    rows: Sequence[Row],
    *,
    model: TextModel,
    classes: Sequence[str],
    most_tokens: int,
    has_pairs: bool,
    multi_label: bool,
) -> TokenizedTexts:
    pairs = [row.values[-1] for row in rows] if has_pairs else None
    encoded, cut = model.tokenizer.encode([row.values[0] for row in rows], pairs, most_tokens)
    if cut:
        warnings.warn(
            f"{cut} of {len(rows)} texts have more than {most_tokens} tokens; what is beyond is cut off"
            f"{', first of the longer of a pair' if pairs else ''}.",
            stacklevel=3,
        )
    numbers = {name: number for number, name in enumerate(classes)}
    labels: list[Any] = (
        [targets_of(row.labels, classes) for row in rows]
        if multi_label
        else [numbers[row.labels[0]] for row in rows]
    )
    has_types = any("token_type_ids" in entry for entry in encoded)
    return TokenizedTexts(
        entries=[entry | {"labels": label} for entry, label in zip(encoded, labels, strict=True)],
        padding={"input_ids": model.padding} | ({"token_type_ids": 0} if has_types else {}),
    )


def _numbers(texts: TokenizedTexts) -> list[int]:
    """The numbers of all classes that texts have, text by text."""
    return [
        int(number)
        for entry in texts.entries
        for number in (
            [entry["labels"]] if isinstance(entry["labels"], int) else np.flatnonzero(entry["labels"])
        )
    ]


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {name: entry for name, entry in batch.items() if name != "labels"}
    logits: Tensor = model(**inputs).logits
    return logits
