"""Sentence pairs: a job that trains an encoder of texts by a contrastive loss over the pairs of a batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.models.checks import check_multiple
from brimful.recipes.bad_samples import BadSample, BadSamples, check_bad_samples
from brimful.recipes.checks import check_fraction, digest
from brimful.recipes.choices import split_at_random
from brimful.recipes.heads import ENCODER
from brimful.recipes.labelled_rows import contents, good_rows
from brimful.recipes.rows import Row, read_rows
from brimful.recipes.splits import split_or_both
from brimful.recipes.text_models import TextModel, find_text_model
from brimful.recipes.tokenized import MULTIPLE, TokenizedTexts

# B pairs, T tokens, D model

_SIDES = ("", "pair_")
"""Prefixes of the entries of the two texts."""


def sentence_pairs(
    file: Path | str,
    *,
    model: Path | str = "bert-base",
    tokenizer: Path | str | None = None,
    validation_file: Path | str | None = None,
    text_column: str = "text",
    pair_column: str = "pair",
    encoding: str = "utf-8",
    sequence_length: int = 128,
    temperature: float = 0.05,
    validation_fraction: float = 0.1,
    training_metrics: bool = False,
    lora: str | None = None,
    quantize: str | None = None,
    bad_samples: str = "refuse",
    seed: int = 0,
) -> Job:
    """Create a job that trains an encoder to place the two texts of each pair near each other.

    A text's embedding is the mean of its tokens' last hidden states, normalized. The loss is InfoNCE in both
    directions: each text is to be nearest to the other text of its pair among those of the global batch,
    however that is split. Pairs that share a text, be it in the same column or not, are not contrasted with
    each other.

    Args:
        file: A .csv or .tsv file with a header, or a .jsonl file of objects.
        model: A directory saved by transformers, to start from its weights; or a built-in encoder, such as
            "bert-base", with random weights.
        tokenizer: A directory or a `tokenizer.json`, or "bytes". None uses that of the model's directory; for
            a built-in model, bytes.
        validation_file: A file of validation pairs; None uses a random part of `file`.
        text_column: Name of the column of first texts.
        pair_column: Name of the column of second texts.
        encoding: Encoding of the files.
        sequence_length: Maximum tokens per text, a multiple of 8; longer texts are truncated at the end.
        temperature: Divides the cosine similarities. Source of the default: Gao et al. 2021, SimCSE, section 3.
        validation_fraction: Fraction of the pairs for validation, without a `validation_file`.
        training_metrics: Also compute loss and metrics of training pairs at each validation, of as many as
            there are validation pairs.
        lora: Train LoRA adapters of peft over frozen weights; see `adapters.LoraOptions`.
        quantize: Quantise the frozen weights by bitsandbytes; see `text_classification`.
        bad_samples: "refuse" rows without two texts of at least one token, or "skip" them with a warning.
        seed: Seed of the choice of validation pairs.

    Returns:
        A job with data. Its metric `retrieval_accuracy` is the fraction of first texts that are nearest to the
        other text of their pair, among the second texts that the loss contrasts it with in a validation batch
        of at most 64 pairs.

    Raises:
        UsageError: A file, column, model or tokenizer does not exist, or a number is out of range.
        DataError: Rows are bad, and they are refused.

    Source of the loss: van den Oord et al. 2018, equation 4; of both directions: Radford et al. 2021, CLIP,
    figure 3.
    """
    check_fraction(validation_fraction)
    check_multiple("sentence pairs", "sequence_length", sequence_length, MULTIPLE)
    if not 0 < temperature < float("inf"):
        raise UsageError(f"temperature is {temperature}; it must be positive and finite.")
    bad = BadSamples.parse(bad_samples)
    columns = {"text_column": text_column, "pair_column": pair_column}

    def read(path: Path) -> list[Row]:
        return good_rows(read_rows(path, columns, encoding), path, bad)

    rows = read(Path(file))
    found = find_text_model(
        model,
        tokenizer,
        head=ENCODER,
        sequence_length=sequence_length,
        lora=lora,
        quantization=quantize,
    )
    of_validation = None if validation_file is None else read(Path(validation_file))
    split = split_or_both(
        rows,
        of_validation,
        encode=partial(_encode, model=found, most_tokens=sequence_length, bad=bad),
        choose=lambda pairs: split_at_random(len(pairs), validation_fraction, seed),
    )
    training, validation = split.training, split.validation
    if len(training) < 2:
        beside = f" beside {len(validation)} for validation" if validation_file is None else ""
        way_out = "a --validation-file, or more pairs" if beside else "more pairs"
        raise UsageError(
            f"{file} has {len(training)} pair to train on{beside}; at least 2 are needed to contrast. "
            f"Give {way_out}."
        )
    vocab_size = found.tokenizer.vocab_size
    longest = {side: split.padded_length(f"{side}input_ids") for side in _SIDES}

    def make_samples(samples: int) -> Batch:
        batch = {}
        for side in _SIDES:
            shape = (samples, longest[side])
            batch[f"{side}input_ids"] = torch.randint(vocab_size, shape)  # (B, T)
            batch[f"{side}attention_mask"] = torch.ones(shape, dtype=torch.int64)
            batch[f"{side}text"] = torch.arange(samples)
        return batch

    return Job(
        model=found.build,
        weights=found.weights,
        embed=embed,
        loss=partial(contrast, temperature=temperature),
        batch=make_samples,
        optimizer=found.optimizer,
        data=lambda: split.data(
            training_metrics=training_metrics, seed=seed, longest=partial(_longest, training)
        ),
        metrics=retrieval,
        name=f"{Path(file).stem}-{Path(model).name}",
        about={
            "task": "sentence-pairs",
            **found.about,
            "columns": list(columns.values()),
            "sequence_length": sequence_length,
            "temperature": temperature,
            "training_pairs": len(training),
            "validation_pairs": len(validation),
            "data": digest(contents((*rows, *(of_validation or ())))),
        },
    )


def embed(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The normalized embeddings of the texts of each pair, (B, D), and which texts these are, (B,)."""
    found: dict[str, Tensor] = {}
    for side in _SIDES:
        mask = batch[f"{side}attention_mask"]  # (B, T)
        hidden = model(input_ids=batch[f"{side}input_ids"], attention_mask=mask).last_hidden_state  # (B, T, D)
        weights = (mask / mask.sum(1, keepdim=True)).to(hidden.dtype)
        found[f"{side}embeddings"] = F.normalize((hidden * weights[:, :, None]).sum(1).float(), dim=1)
        found[f"{side}text"] = batch[f"{side}text"]
    return found


def contrast(embeddings: dict[str, Tensor], *, temperature: float) -> Tensor:
    """The mean cross-entropy of finding, for each text, the other text of its pair: InfoNCE in both directions.

    `embeddings` are those of `embed`, of the global batch; `temperature` divides their cosine similarities.
    """
    logits = _candidates(embeddings) / temperature
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def retrieval(embeddings: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fraction of first texts whose nearest second text is that of their pair.

    The candidates are those of `contrast`. So neither the text itself nor another right answer to it counts as
    an error; a first text that has no candidate but its own second text counts as found.
    """
    nearest = _candidates(embeddings).argmax(1)
    own = torch.arange(len(nearest), device=nearest.device)
    return {"retrieval_accuracy": (nearest == own).float().mean()}


def _candidates(embeddings: dict[str, Tensor]) -> Tensor:
    """Cosine similarities of each first text to each second one, (B, B); -inf where two pairs share a text."""
    similarities = _similarities(embeddings)
    is_other = ~torch.eye(len(similarities), dtype=torch.bool, device=similarities.device)
    return similarities.masked_fill(_share_a_text(embeddings) & is_other, float("-inf"))


def _similarities(embeddings: dict[str, Tensor]) -> Tensor:
    """Cosine similarities of each first text to each second one, (B, B), in float32."""
    first, second = embeddings["embeddings"], embeddings["pair_embeddings"]
    with torch.autocast(first.device.type, enabled=False):
        return first @ second.T


def _share_a_text(embeddings: dict[str, Tensor]) -> Tensor:
    """Whether two pairs share a text in any column, (B, B).

    Then no text of the one is wrong for the other: of the pairs (a, b) and (b, a), the second text of the
    other pair is the first of the own; of (a, b) and (a, c), both b and c are right for a.
    """
    first, second = embeddings["text"], embeddings["pair_text"]
    across = first[:, None] == second
    return (first[:, None] == first) | (second[:, None] == second) | across | across.T


def _encode(rows: Sequence[Row], *, model: TextModel, most_tokens: int, bad: BadSamples) -> TokenizedTexts:
    """Tokenize both texts of each pair separately, and number the different texts of both columns."""
    entries: list[dict[str, Any]] = [{} for _ in rows]
    numbers: dict[str, int] = {}  # of both columns
    cut = 0
    for place, side in enumerate(_SIDES):
        texts = [row.values[place] for row in rows]
        encoded, cut_here = model.tokenizer.encode(texts, None, most_tokens)
        cut += cut_here
        for entry, text, tokens in zip(entries, texts, encoded, strict=True):
            ids = tokens["input_ids"]
            entry[f"{side}input_ids"] = ids
            entry[f"{side}attention_mask"] = np.ones(len(ids), dtype=np.int32)
            entry[f"{side}text"] = numbers.setdefault(text, len(numbers))
    has_tokens = [all(len(entry[f"{side}input_ids"]) for side in _SIDES) for entry in entries]
    without = [row.where for row, is_good in zip(rows, has_tokens, strict=True) if not is_good]
    why = "a text that the tokenizer has no tokens of"  # and whose mean over tokens is NaN
    check_bad_samples((BadSample(where=where, why=why) for where in without), of=len(rows), asked=bad)
    if cut:
        warnings.warn(
            f"{cut} of {len(_SIDES) * len(rows)} texts have more than {most_tokens} tokens; what is beyond is "
            "cut off.",
            stacklevel=4,
        )
    padding = {"input_ids": model.padding, "attention_mask": 0}
    return TokenizedTexts(
        entries=list(compress(entries, has_tokens)),
        padding={f"{side}{name}": value for side in _SIDES for name, value in padding.items()},
    )


def _longest(pairs: TokenizedTexts, samples: int) -> Batch:
    """A batch of the longest first texts beside the longest second ones: no batch takes more memory."""
    batch: dict[str, Any] = {}
    for side in _SIDES:
        lengths = torch.tensor(pairs.lengths(f"{side}input_ids"))
        chosen = pairs.batch(lengths.topk(min(samples, len(lengths))).indices.tolist())
        batch |= {
            name: entry for name, entry in chosen.items() if name.startswith("pair_") == (side == "pair_")
        }
    return batch
