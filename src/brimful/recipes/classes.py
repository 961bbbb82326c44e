"""Classes, of images or texts: the loss and what is counted, labels divided for validation, weights."""

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
"""What a model says of a batch, (samples, classes)."""


def loss(model: nn.Module, batch: Batch, *, logits_of: LogitsOf, class_weights: Tensor | None) -> Tensor:
    """The cross-entropy, a mean over samples, or over what their classes weigh."""
    logits = logits_of(model, batch)
    weights = None if class_weights is None else class_weights.to(logits.device)
    return F.cross_entropy(logits, batch["labels"], weight=weights)


def count(batch: Batch, *, class_weights: Tensor) -> Tensor:
    """What the classes of a batch weigh together."""
    return class_weights.to(batch["labels"].device)[batch["labels"]].sum()


def accuracy(model: nn.Module, batch: Batch, *, logits_of: LogitsOf) -> dict[str, Tensor]:
    """The share of samples whose class is said right."""
    return {"accuracy": (logits_of(model, batch).argmax(1) == batch["labels"]).float().mean()}


def split_by_class(labels: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Divide samples into those to train on and those to validate with, each class for itself.

    Args:
        labels: Of every sample, by index.
        fraction: For validation, of each class; rounded, but one sample at least where a class has two.
        seed: Decides which.

    Returns:
        The indices of either, ascending. A class with one sample is trained on.
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


def tell_without_validation(classes: Sequence[str], labels: Sequence[int]) -> None:
    """Warn of classes that no sample validates.

    Args:
        classes: Their names.
        labels: Of the samples to validate with.
    """
    without = [name for number, name in enumerate(classes) if number not in set(labels)]
    if without:
        what = "nothing is validated" if len(without) == len(classes) else "these are not validated"
        warnings.warn(
            f"{len(without)} of {len(classes)} classes have no sample for validation, so {what}: "
            f"{', '.join(without[:_MOST_NAMED])}{' …' if len(without) > _MOST_NAMED else ''}.",
            stacklevel=3,
        )


def balanced_weights(labels: Sequence[int], classes: int) -> Tensor:
    """What each class weighs so that all of them weigh the same together; their mean over samples is 1.

    Args:
        labels: Of the samples to train on.
        classes: How many there are.

    Returns:
        A weight for each class, float32.

    Source: King & Zeng 2001, "Logistic Regression in Rare Events Data", as scikit-learn's "balanced".
    """
    counts = torch.bincount(torch.tensor(labels), minlength=classes).clamp(min=1)
    return len(labels) / (classes * counts.float())
