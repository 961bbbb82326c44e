"""Splits a global batch into the micro-batches of a rank, with the weights of their losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from brimful.batches import BatchLayout
from brimful.distributed.ranks import Ranks
from brimful.execution.losses import counting_parts, loss_counts, shares_of
from brimful.job import Batch, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatches:
    """The micro-batches of one rank in one step."""

    batches: list[Batch]
    weights: list[float]
    """The weight of each loss: the mean over the ranks of the weighted sums is the loss of the global batch."""
    terms: float
    """Number of terms of the loss in the global batch."""


def split_for_rank(
    batch: Batch, job: Job, layout: BatchLayout, ranks: Ranks, *, micro_batch_size: int
) -> MicroBatches:
    """Split a global batch into the micro-batches of this rank; every rank must call it, and gets as many.

    The batch is on the host, the same on every rank. The job's `count` and `reduction` determine the weights.
    Micro-batches without a term are dropped: their mean loss is NaN, even times 0. With several ranks they are
    replaced by one that has a term, so that all ranks run the same number.
    """
    parts = ranks.micro_batches(batch, micro_batch_size, layout)
    micro_batches = [part for part, _is_counted in parts]
    of_parts = loss_counts(job, [part for part, is_counted in parts if is_counted], whole=layout.whole)
    counts = of_parts + [0.0] * (len(parts) - len(of_parts))
    (terms,) = ranks.all_reduce(sum(counts))
    if job.reduction == "sum":
        shares = [float(is_counted) for _part, is_counted in parts]
    else:
        shares = shares_of(counts, terms)
    weights = [ranks.count * share for share in shares]
    if not all(weights) and not ranks.is_distributed:
        micro_batches, weights = counting_parts(micro_batches, weights)
    elif not all(weights) and job.count is not None:
        counting = _sample_with_terms(batch, job, layout)
        micro_batches = [
            part if weight else counting for part, weight in zip(micro_batches, weights, strict=True)
        ]
    return MicroBatches(batches=micro_batches, weights=weights, terms=terms)


def _sample_with_terms(batch: Batch, job: Job, layout: BatchLayout) -> Batch:
    """A sample of the batch that has a term of the loss, twice: BatchNorm refuses a single sample."""
    assert job.count is not None
    samples = (layout.take(batch, torch.tensor([index, index])) for index in range(layout.count(batch)))
    return next(sample for sample in samples if float(job.count(sample)) > 0)
