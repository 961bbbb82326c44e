"""Classification with several labels per sample, or none: loss, F1 and the weights of rare labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from brimful.job import Batch
from brimful.recipes.classes import LogitsOf, f1

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


def multi_label_loss(
    model: nn.Module, batch: Batch, *, logits_of: LogitsOf, positive_weights: Tensor | None
) -> Tensor:
    """The binary cross-entropy, as a mean over samples and classes."""
    logits = logits_of(model, batch)
    weights = None if positive_weights is None else positive_weights.to(logits.device)
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
        "micro_f1": f1(right.sum(), every.sum()),
        "macro_f1": f1(right, every).mean(),
        "exact_match": means["exact"],
    }
