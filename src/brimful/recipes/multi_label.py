"""Classification with several labels per sample, or none: loss, F1 and the weights of rare labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from brimful.job import Batch
from brimful.recipes.classes import LogitsOf, Objective, count_samples

# B samples, C classes

Targets = NDArray[np.float32]
"""1 for each label that a sample has, else 0; (C,)."""


def targets_of(labels: Sequence[str], classes: Sequence[str]) -> Targets:
    """The targets of a sample: 1 for each class that is among its labels, else 0; (C,)."""
    return np.array([name in labels for name in classes], dtype=np.float32)


def positive_weights(targets: Sequence[Targets]) -> Tensor:
    """Weights with which the samples that have a label weigh as much as those that do not.

    `targets` are those of the training samples. The weights are the negatives per positive of each class, (C,);
    1 where all samples have a label or none has it: there is nothing to balance, and a weight of 0 would leave
    the label without a gradient.

    Source: torch.nn.BCEWithLogitsLoss, `pos_weight`.
    """
    positives = torch.from_numpy(np.stack(targets)).sum(0)
    has_both = (positives > 0) & (positives < len(targets))
    return torch.where(has_both, (len(targets) - positives) / positives.clamp(min=1), 1.0)


def several_labels(targets: Sequence[Targets], *, logits_of: LogitsOf, balances: bool) -> Objective:
    """The objective of samples with several labels or none; `targets` are those of the training samples.

    With `balances` the loss has `positive_weights`.
    """
    weights = positive_weights(targets) if balances else None
    return Objective(
        loss=partial(_loss, logits_of=logits_of, label_weights=weights),
        count=count_samples,
        metrics=partial(multi_label_counts, logits_of=logits_of),
        summarize=multi_label_scores,
    )


def _loss(model: nn.Module, batch: Batch, *, logits_of: LogitsOf, label_weights: Tensor | None) -> Tensor:
    """The binary cross-entropy, as a mean over samples and classes."""
    logits = logits_of(model, batch)
    weights = None if label_weights is None else label_weights.to(logits.device)
    return F.binary_cross_entropy_with_logits(logits, batch["labels"], pos_weight=weights)


def multi_label_counts(model: nn.Module, batch: Batch, *, logits_of: LogitsOf) -> dict[str, Tensor]:
    """Means over samples from which `multi_label_scores` computes F1; a label is predicted above 50 %."""
    predicted = logits_of(model, batch) > 0  # (B, C)
    labels = batch["labels"] > 0.5
    return {
        "true_positives": (predicted & labels).double().mean(0),
        "predicted": predicted.double().mean(0),
        "labels": labels.double().mean(0),
        "exact": (predicted == labels).all(1).double().mean(),
    }


def multi_label_scores(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """F1 of all predictions, the mean of the classes' F1, and the fraction of samples without an error.

    `means` are those of `multi_label_counts`. A class that is neither a label nor predicted has F1 0.

    Source: scikit-learn, `f1_score` with average="micro" and "macro" and zero_division=0.
    """
    right, every = means["true_positives"], means["predicted"] + means["labels"]
    return {
        "micro_f1": _f1(right.sum(), every.sum()),
        "macro_f1": _f1(right, every).mean(),
        "exact_match": means["exact"],
    }


def _f1(true_positives: Tensor, predicted_and_labels: Tensor) -> Tensor:
    """F1, the harmonic mean of precision and recall; 0 where nothing is predicted and there are no labels.

    `true_positives` is the number or fraction of what is predicted correctly; `predicted_and_labels` is the sum
    of those of predictions and of labels.
    """
    is_some = predicted_and_labels > 0
    return torch.where(is_some, 2 * true_positives / predicted_and_labels.where(is_some, 1), 0)
