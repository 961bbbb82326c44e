"""Classification of images or texts with one label each: loss, accuracy and class weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Batch

_MOST_NAMED = 6

LogitsOf = Callable[[nn.Module, Batch], Tensor]
"""Computes the logits of a batch, (samples, classes)."""


class Objective(TypedDict):
    """The fields of a job that say what a classifier learns and how it is evaluated."""

    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[Batch], Tensor | int]
    metrics: Callable[[nn.Module, Batch], dict[str, Tensor]]
    summarize: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None


def one_label(labels: Sequence[int], classes: int, *, logits_of: LogitsOf, balances: bool) -> Objective:
    """The objective of samples with one label each; `labels` are those of the training samples.

    With `balances` each sample is weighted by the inverse frequency of its class.
    """
    weights = balanced_weights(labels, classes) if balances else None
    return Objective(
        loss=partial(_loss, logits_of=logits_of, class_weights=weights),
        count=count_samples if weights is None else partial(_count, class_weights=weights),
        metrics=partial(_accuracy, logits_of=logits_of),
        summarize=None,
    )


def _loss(model: nn.Module, batch: Batch, *, logits_of: LogitsOf, class_weights: Tensor | None) -> Tensor:
    """The cross-entropy, as a mean over samples, weighted by class if `class_weights` are given."""
    logits = logits_of(model, batch)
    weights = None if class_weights is None else class_weights.to(logits.device)
    return F.cross_entropy(logits, batch["labels"], weight=weights)


def _count(batch: Batch, *, class_weights: Tensor) -> Tensor:
    """The sum of the class weights of a batch's samples."""
    return class_weights.to(batch["labels"].device)[batch["labels"]].sum()


def count_samples(batch: Batch) -> int:
    """The number of samples of a batch."""
    return len(batch["labels"])


def _accuracy(model: nn.Module, batch: Batch, *, logits_of: LogitsOf) -> dict[str, Tensor]:
    """The fraction of samples whose class is predicted correctly."""
    return {"accuracy": (logits_of(model, batch).argmax(1) == batch["labels"]).float().mean()}


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
