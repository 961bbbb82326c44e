"""Classification of images or texts: loss, accuracy, F1, the split for validation, class weights."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Batch
from brimful.trainer.data.rng import generator_of

_MOST_NAMED = 6

LogitsOf = Callable[[nn.Module, Batch], Tensor]
"""Computes the logits of a batch, (samples, classes)."""


def loss(model: nn.Module, batch: Batch, *, logits_of: LogitsOf, class_weights: Tensor | None) -> Tensor:
    """The cross-entropy, as a mean over samples, weighted by class if `class_weights` are given."""
    logits = logits_of(model, batch)
    weights = None if class_weights is None else class_weights.to(logits.device)
    return F.cross_entropy(logits, batch["labels"], weight=weights)


def count(batch: Batch, *, class_weights: Tensor) -> Tensor:
    """The sum of the class weights of a batch's samples."""
    return class_weights.to(batch["labels"].device)[batch["labels"]].sum()


def count_samples(batch: Batch) -> int:
    """The number of samples of a batch."""
    return len(batch["labels"])


def accuracy(model: nn.Module, batch: Batch, *, logits_of: LogitsOf) -> dict[str, Tensor]:
    """The fraction of samples whose class is predicted correctly."""
    return {"accuracy": (logits_of(model, batch).argmax(1) == batch["labels"]).float().mean()}


def f1(true_positives: Tensor, predicted_and_labels: Tensor) -> Tensor:
    """F1, the harmonic mean of precision and recall; 0 where nothing is predicted and there are no labels.

    `true_positives` is the number or fraction of what is predicted correctly; `predicted_and_labels` is the sum
    of those of predictions and of labels.
    """
    is_some = predicted_and_labels > 0
    return torch.where(is_some, 2 * true_positives / predicted_and_labels.where(is_some, 1), 0)


def split_by_class(labels: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split samples into training and validation sets, stratified by class; returns ascending indices.

    `labels` has the label of every sample. `fraction` of each class is for validation: rounded, but at least
    one sample of a class with two. A class with a single sample is only trained on.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        by_class[label].append(index)
    training, validation = [], []
    for label, indices in sorted(by_class.items()):
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        order = torch.randperm(len(indices), generator=generator_of(seed, label)).tolist()
        validation += [indices[place] for place in order[:count]]
        training += [indices[place] for place in order[count:]]
    return sorted(training), sorted(validation)


def warn_without_validation(classes: Sequence[str], labels: Sequence[int]) -> None:
    """Warn about classes that are not among `labels`, those of the validation samples."""
    without = [name for number, name in enumerate(classes) if number not in set(labels)]
    if without:
        what = "nothing is validated" if len(without) == len(classes) else "these are not validated"
        warnings.warn(
            f"{len(without)} of {len(classes)} classes have no sample for validation, so {what}: "
            f"{', '.join(without[:_MOST_NAMED])}{' …' if len(without) > _MOST_NAMED else ''}.",
            stacklevel=3,
        )


def balanced_weights(labels: Sequence[int], classes: int) -> Tensor:
    """Class weights with which all classes have the same total weight; their mean over samples is 1.

    `labels` are those of the training samples. The weights are float32, one per class.

    Source: King & Zeng 2001, "Logistic Regression in Rare Events Data", as scikit-learn's "balanced".
    """
    counts = torch.bincount(torch.tensor(labels), minlength=classes).clamp(min=1)
    return len(labels) / (classes * counts.float())
