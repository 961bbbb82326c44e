"""Losses and results of the parts that a micro-batch of a Transformers `Trainer` is divided into.

Checked with transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer
from transformers.trainer_pt_utils import nested_concat

from brimful.batches import BatchLayout
from brimful.errors import BatchError
from brimful.integrations.trainer_job import IGNORED_LABEL


def is_scaled_for_step(trainer: Trainer, items: Any) -> bool:
    """Whether `compute_loss` divides by the count of labels of the whole step, as `training_step` asks.

    Args:
        trainer: The trainer.
        items: The count, as `training_step` gets it; None without one.

    Returns:
        Whether it does.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return items is not None


def shares_of_loss(parts: list[Any], layout: BatchLayout) -> list[float]:
    """Each part's share in the mean loss of all: of labels that count, of tokens, else of samples.

    Args:
        parts: Of a batch.
        layout: Of the trainer's batches.

    Returns:
        The shares; they add up to 1.

    Raises:
        BatchError: No label counts.
    """
    labels = [part.get("labels") for part in parts]
    if all(isinstance(each, Tensor) and each.dim() > 1 and not each.is_floating_point() for each in labels):
        counts = [float(each.ne(IGNORED_LABEL).sum()) for each in labels]
    else:
        counts = [float(layout.count(part)) for part in parts]
    total = sum(counts)
    if not total:
        raise BatchError("a micro-batch has no labels that count, so its loss cannot be divided among parts.")
    return [count / total for count in counts]


def joined_results(found: list[Any], shares: list[float]) -> tuple[Any, Any, Any]:
    """What `prediction_step` returns of parts, as of one batch.

    Args:
        found: Loss, logits and labels of each part.
        shares: Of each part's loss.

    Returns:
        Loss, logits and labels; None for what a part lacks.
    """
    losses = [loss for loss, _, _ in found]
    loss = None
    if all(each is not None for each in losses):
        loss = sum(each * share for each, share in zip(losses, shares, strict=True))
    joined = []
    for place in (1, 2):
        values = [each[place] for each in found]
        whole = values[0]
        for value in values[1:]:
            whole = None if whole is None else nested_concat(whole, value, padding_index=IGNORED_LABEL)
        joined.append(whole)
    return loss, joined[0], joined[1]
