"""The losses of micro-batches: their weights in the loss of the global batch, and checks of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from brimful.batches import layout_of
from brimful.errors import BatchError, LossError
from brimful.job import Batch, Job


def loss_weights(job: Job, micro_batches: Sequence[Batch]) -> list[float]:
    """Factors for the losses of micro-batches, such that they sum to the loss of the global batch.

    For a mean, they are shares of the terms that `job.count` counts (None: samples) and sum to 1; for a sum,
    and for a single micro-batch without `count`, each is exactly 1. Raises `BatchError` if a count is not a
    number, negative or not finite, or if the global batch has nothing to count.
    """
    if job.reduction == "sum" or (job.count is None and len(micro_batches) == 1):
        return [1.0] * len(micro_batches)
    counts = loss_counts(job, micro_batches)
    return shares_of(counts, sum(counts))


def counting_parts(micro_batches: Sequence[Batch], weights: Sequence[float]) -> tuple[list[Batch], list[float]]:
    """The micro-batches and their weights, without those of weight 0.

    The mean loss of a micro-batch without terms is NaN, even times 0.
    """
    parts = [part for part, weight in zip(micro_batches, weights, strict=True) if weight]
    return parts, [weight for weight in weights if weight]


def loss_counts(job: Job, micro_batches: Sequence[Batch], *, whole: int = 1) -> list[float]:
    """Number of terms in the mean loss of each micro-batch, at least 0; without `job.count`, of samples.

    `whole` is the number of samples that a batch counts as if it cannot be split. Raises `BatchError` if a
    count is not a number, negative or not finite.
    """
    count = job.count or layout_of(job, whole=whole).count
    counts = [_number(count(micro_batch)) for micro_batch in micro_batches]
    if not all(math.isfinite(terms) and terms >= 0 for terms in counts):
        raise BatchError(f"the counts of the micro-batches are {counts}; each must be finite and at least 0.")
    return counts


def _number(found: Any) -> float:
    """The result of a job's `count` as a number; text with digits is not accepted."""
    if isinstance(found, Tensor) and (found.numel() != 1 or found.is_complex()):
        raise _no_number(f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {tuple(found.shape)}")
    what = f"an object of type {type(found).__name__}"
    if isinstance(found, str | bytes):
        raise _no_number(what)
    try:
        return float(found)
    except (TypeError, ValueError) as error:
        raise _no_number(what) from error


def _no_number(what: str) -> BatchError:
    return BatchError(
        f"count(batch) returned {what}. It must return one number: over how many terms the mean loss of the "
        "batch is, such as (labels != -100).sum()."
    )


def shares_of(counts: Sequence[float], total: float) -> list[float]:
    """Each count as a fraction of the global batch's `total`. Raises `BatchError` if the total is 0."""
    if total == 0:
        raise BatchError(
            f"the mean over the global batch is over nothing: the counts of its {len(counts)} micro-batches "
            "sum to 0. Leave such batches out, or check `count`: do all labels have the value it ignores?"
        )
    return [terms / total for terms in counts]


def check_loss(value: Any) -> None:
    """Raise `LossError` if a loss is not a tensor, not a real scalar, or has no gradient."""
    if not isinstance(value, Tensor):
        raise LossError(
            f"the loss is a {type(value).__name__}, not a tensor. Return the scalar tensor itself, without "
            "`.item()`; of a Transformers model that is `model(**batch).loss`."
        )
    if value.numel() != 1:
        raise LossError(
            f"the loss has shape {tuple(value.shape)}; it must be a scalar. Reduce it: `loss.mean()`."
        )
    if value.is_complex():
        raise LossError(
            f"the loss is complex ({str(value.dtype).removeprefix('torch.')}), and only a real number can be "
            "minimized. Return a real one: `loss.abs()`, or `loss.real`."
        )
    if not value.requires_grad:
        raise LossError(
            "the loss has no gradient. It was computed under no_grad, detached, or from frozen parameters only."
        )
