"""Tags of words: loss, accuracy and F1 of entities or tags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Batch
from brimful.recipes.classes import LogitsOf, f1

# B sentences, T tokens, C tags

IGNORED = -100
"""Label of tokens that have none: special ones, padding, and all but the first of a word. Source:
torch.nn.functional.cross_entropy, `ignore_index`."""

_ENTITY_TAG = re.compile(r"O|[BIES]-.+")
_OUTSIDE = "O"

Entity = tuple[int, int, str]
"""Index of the first word, index of the first word after the entity, and type."""


def are_entity_tags(tags: Iterable[str]) -> bool:
    """Whether all tags are those of entities (IOB1, IOB2 or IOBES): "O", or a type after B-, I-, E- or S-."""
    return all(_ENTITY_TAG.fullmatch(tag) for tag in tags)


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities of a sentence, in order, from the tags of its words.

    An entity also begins where the type changes or "I-" follows "O".

    Source: the rules of conlleval, of CoNLL-2000 and CoNLL-2003.
    """
    found = []
    start, prefix_before, type_before = 0, _OUTSIDE, ""
    for place, tag in enumerate([*tags, _OUTSIDE]):
        prefix, _, kind = tag.partition("-")
        if prefix_before != _OUTSIDE and (prefix_before in "ES" or prefix in "BSO" or kind != type_before):
            found.append((start, place, type_before))
        if prefix != _OUTSIDE and (prefix in "BS" or prefix_before in "ESO" or kind != type_before):
            start = place
        prefix_before, type_before = prefix, kind
    return found


def tag_loss(model: nn.Module, batch: Batch, *, logits_of: LogitsOf) -> Tensor:
    """The cross-entropy, as a mean over labelled tokens."""
    logits = logits_of(model, batch)  # (B, T, C)
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def count_labelled(batch: Batch) -> Tensor:
    """The number of labelled tokens of a batch."""
    labelled: Tensor = batch["labels"] != IGNORED
    return labelled.sum()


def tag_counts(
    model: nn.Module, batch: Batch, *, logits_of: LogitsOf, tags: Sequence[str]
) -> dict[str, Tensor]:
    """Means over sentences from which `tag_scores` computes accuracy and F1."""
    labels: Tensor = batch["labels"]  # (B, T)
    predicted, is_labelled = logits_of(model, batch).argmax(2), labels != IGNORED
    counts = {
        "words": is_labelled.double().sum(1).mean(),
        "right": ((predicted == labels) & is_labelled).double().sum(1).mean(),
    }
    count = _entity_counts if are_entity_tags(tags) else _counts_by_tag
    matched, every = count(predicted, labels, is_labelled, tags)
    return counts | {"true_positives": matched / len(labels), "predicted_and_labels": every / len(labels)}


def tag_scores(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Accuracy over labelled words, and F1 of entities, or else the mean of the F1 of each tag.

    `means` are those of `tag_counts`.
    """
    score = f1(means["true_positives"], means["predicted_and_labels"])
    name = "entity_f1" if score.ndim == 0 else "macro_f1"
    return {"accuracy": means["right"] / means["words"], name: score.mean()}


def _entity_counts(
    predicted: Tensor, labels: Tensor, is_labelled: Tensor, tags: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The entities predicted with the right words and type; the sum of predicted and labelled entities."""
    matched, every = 0, 0
    for one, other, chosen in zip(predicted.cpu(), labels.cpu(), is_labelled.cpu(), strict=True):
        found, expected = (
            set(entities([tags[number] for number in part[chosen].tolist()])) for part in (one, other)
        )
        matched += len(found & expected)
        every += len(found) + len(expected)
    return torch.tensor(float(matched)), torch.tensor(float(every))


def _counts_by_tag(
    predicted: Tensor, labels: Tensor, is_labelled: Tensor, tags: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """The words of each tag predicted correctly, (C,); the sum of predicted and labelled words, (C,)."""
    chosen, expected = predicted[is_labelled], labels[is_labelled]
    by_tag = [
        torch.bincount(numbers, minlength=len(tags)).double()
        for numbers in (expected[chosen == expected], chosen, expected)
    ]
    return by_tag[0], by_tag[1] + by_tag[2]
