"""Losses and results of the parts that a micro-batch of a Transformers `Trainer` is divided into.

Checked with transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.trainer_pt_utils import nested_concat

from brimful.errors import BatchError

IGNORED_LABEL = -100
"""Labels that do not count. Source: transformers 5.23, `Trainer._get_num_items_in_batch`."""


def shares_of_loss(parts: list[Any], count: Callable[[Any], float]) -> list[float]:
    """Each part's share in the mean loss of all parts of a batch; the shares add up to 1.

    `count` is one of `trainer_loss.items_counter`. Raises `BatchError` if no label counts.
    """
    counts = [count(part) for part in parts]
    total = sum(counts)
    if not total:
        raise BatchError("a micro-batch has no labels that count, so its loss cannot be divided among parts.")
    return [each / total for each in counts]


def joined_results(found: list[Any], shares: list[float]) -> tuple[Any, Any, Any]:
    """Join what `prediction_step` returns for the parts of a batch: loss, logits and labels of each.

    `shares` are those of each part's loss. Loss, logits or labels are None if a part lacks them.
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
