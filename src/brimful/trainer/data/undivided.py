"""Loaders that a `DistributedSampler` divides among ranks, as loaders of the whole global batch.

Source: torch/utils/data/distributed.py, DistributedSampler.__iter__ (2.13): rank r of N takes every Nth sample
from the rth on, in the order of the seed and the epoch. So the ranks' batches of b are N × b in that order.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


def undivided(data: Any) -> Any:
    """A loader whose batches are those of all ranks together; other data as they are.

    No sample is repeated or dropped to give each rank as many: the last batch of an epoch may be smaller. The
    `drop_last` of a DataLoader drops that batch; that of the sampler drops nothing.
    """
    batches = getattr(data, "batch_sampler", None)
    if not isinstance(data, DataLoader) or type(batches) is not BatchSampler:
        return data
    divided: Any = batches.sampler
    if type(divided) is not DistributedSampler or divided.num_replicas == 1:
        return data
    ranks = divided.num_replicas
    sampler: DistributedSampler[Any] = DistributedSampler(
        divided.dataset,
        num_replicas=1,
        rank=0,
        shuffle=divided.shuffle,
        seed=divided.seed,
        drop_last=divided.drop_last,
    )
    sampler.set_epoch(divided.epoch)
    whole = BatchSampler(sampler, ranks * batches.batch_size, batches.drop_last)
    loader = copy.copy(data)
    # a DataLoader refuses to have them set
    vars(loader).update(batch_sampler=whole, sampler=sampler, _iterator=None)
    if loader.batch_size is not None:
        vars(loader)["batch_size"] = whole.batch_size
    return loader
