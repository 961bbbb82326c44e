"""Token classification: a job from sentences of words with a tag each, such as those of named entities."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.models.checks import check_multiple
from brimful.recipes.bad_samples import BadSamples
from brimful.recipes.checks import check_fraction, digest
from brimful.recipes.choices import split_at_random
from brimful.recipes.classes import warn_without_validation
from brimful.recipes.entities import IGNORED, count_labelled, tag_counts, tag_loss, tag_scores
from brimful.recipes.heads import token_classifier
from brimful.recipes.labelled_rows import class_names, contents, good_rows, rows_of_known_classes
from brimful.recipes.rows import Row
from brimful.recipes.splits import split_or_both
from brimful.recipes.tagged_text import read_tagged
from brimful.recipes.text_models import TextModel, find_text_model
from brimful.recipes.tokenized import MULTIPLE, TokenizedTexts

# B sentences, T tokens


def token_classification(
    file: Path | str,
    *,
    model: Path | str = "bert-base",
    tokenizer: Path | str | None = None,
    validation_file: Path | str | None = None,
    tokens_column: str = "tokens",
    tags_column: str = "tags",
    encoding: str = "utf-8",
    sequence_length: int = 512,
    validation_fraction: float = 0.1,
    training_metrics: bool = False,
    lora: str | None = None,
    quantize: str | None = None,
    bad_samples: str = "refuse",
    seed: int = 0,
) -> Job:
    """Create a job that trains a classifier of words.

    The first token of each word is labelled; the loss is a mean over labelled tokens, also when a batch is
    split. Batches have sentences of similar length, padded as for `text_classification`.

    Args:
        file: A .jsonl, .csv or .tsv file with columns of words and tags, as lists in JSON or separated by
            spaces; or any other file with one word a line, its tag in the last column, and an empty line after
            each sentence, as in CoNLL-2003.
        model: A directory saved by transformers, to start from its weights; or a built-in encoder, such as
            "bert-base", with random weights.
        tokenizer: A directory or a `tokenizer.json`, or "bytes". None uses that of the model's directory; for
            a built-in model, bytes.
        validation_file: A file of validation sentences; None uses a random part of `file`.
        tokens_column: Name of the column of words in a table.
        tags_column: Name of the column of tags in a table.
        encoding: Encoding of the files.
        sequence_length: Maximum tokens per sentence, a multiple of 8; longer sentences are truncated.
        validation_fraction: Fraction of the sentences for validation, without a `validation_file`.
        training_metrics: Also compute loss and metrics of training sentences at each validation, of as many as
            there are validation sentences.
        lora: Train LoRA adapters of peft over frozen weights; see `adapters.LoraOptions`.
        quantize: Quantise the frozen weights by bitsandbytes; see `text_classification`.
        bad_samples: "refuse" sentences that cannot be used, or "skip" them with a warning.
        seed: Seed of the choice of validation sentences.

    Returns:
        A job with data, and its tags in `about` as `classes`. Its metrics are `accuracy` over words, and
        `entity_f1` of whole entities if the tags are "O" and "B-…", "I-…" and the like; else `macro_f1` of the
        tags.

    Raises:
        UsageError: A file, column, model or tokenizer does not exist, or a number is out of range.
        DataError: Sentences are bad, and they are refused.
    """
    check_fraction(validation_fraction)
    check_multiple("token classification", "sequence_length", sequence_length, MULTIPLE)
    bad = BadSamples.parse(bad_samples)
    columns = {"tokens_column": tokens_column, "tags_column": tags_column}

    def read(path: Path) -> list[Row]:
        return good_rows(read_tagged(path, columns, encoding), path, bad, labels_of=_tags)

    rows = read(Path(file))
    classes = class_names((tag for row in rows for tag in _tags(row)), file)
    found = find_text_model(
        model,
        tokenizer,
        head=token_classifier(len(classes)),
        sequence_length=sequence_length,
        lora=lora,
        quantization=quantize,
    )
    of_validation = None
    if validation_file is not None:
        of_validation = rows_of_known_classes(read(Path(validation_file)), classes, bad, labels_of=_tags)
    split = split_or_both(
        rows,
        of_validation,
        encode=partial(_encode, model=found, classes=classes, most_tokens=sequence_length),
        choose=lambda sentences: split_at_random(len(sentences), validation_fraction, seed),
    )
    training, validation = split.training, split.validation
    if not len(training):
        raise UsageError(f"{file} has no words that the tokenizer has tokens of.")
    warn_without_validation(classes, sorted(_labels(validation)))
    longest = split.padded_length()

    def make_samples(samples: int) -> Batch:
        shape = (samples, longest)
        return {
            "input_ids": torch.randint(found.tokenizer.vocab_size, shape),  # (B, T)
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.randint(len(classes), shape),
        }

    return Job(
        model=found.build,
        weights=found.weights,
        loss=partial(tag_loss, logits_of=_logits),
        count=count_labelled,
        counted="words",
        batch=make_samples,
        optimizer=found.optimizer,
        data=lambda: split.data(training_metrics=training_metrics, seed=seed),
        metrics=partial(tag_counts, logits_of=_logits, tags=classes),
        summarize=tag_scores,
        name=f"{Path(file).stem}-{Path(model).name}",
        about={
            "task": "token-classification",
            **found.about,
            "classes": list(classes),
            "columns": list(columns.values()),
            "sequence_length": sequence_length,
            "training_sentences": len(training),
            "validation_sentences": len(validation),
            "data": digest(contents((*rows, *(of_validation or ())))),
        },
    )


def _tags(row: Row) -> Sequence[str]:
    return row.lists[1]


def _encode(
    rows: Sequence[Row], *, model: TextModel, classes: Sequence[str], most_tokens: int
) -> TokenizedTexts:
    """Tokenize sentences and label their tokens; sentences without a labelled token are dropped."""
    numbers = {name: number for number, name in enumerate(classes)}
    entries, without = [], 0
    encoded = model.tokenizer.encode_words([row.lists[0] for row in rows], most_tokens)
    for row, (tokens, first_of) in zip(rows, encoded, strict=True):
        tags = _tags(row)
        labels = [IGNORED if word is None else numbers[tags[word]] for word in first_of]
        labelled = sum(word is not None for word in first_of)
        without += labelled < len(tags)
        if labelled:
            entries.append({"input_ids": tokens, "labels": np.array(labels, dtype=np.int32)})
    if without:
        warnings.warn(
            f"{without} of {len(rows)} sentences have words without a label: words beyond {most_tokens} tokens "
            "are cut off, and some characters have no token. They are neither trained on nor validated.",
            stacklevel=4,
        )
    return TokenizedTexts(entries=entries, padding={"input_ids": model.padding, "labels": IGNORED})


def _labels(texts: TokenizedTexts) -> set[int]:
    return {int(label) for entry in texts.entries for label in np.unique(entry["labels"])} - {IGNORED}


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits
