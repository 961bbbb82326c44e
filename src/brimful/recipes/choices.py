"""Random choices of samples, for validation and to evaluate beside it."""

from __future__ import annotations

import torch

from brimful.trainer.data.rng import generator_of


def split_at_random(samples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Choose training and validation samples at random; returns the indices of both, ascending.

    The number of validation samples is rounded, but at least one of two samples, and never all.
    """
    count = min(max(round(fraction * samples), 1), samples - 1)
    order = torch.randperm(samples, generator=generator_of(seed)).tolist()
    return sorted(order[count:]), sorted(order[:count])


def sample(samples: int, count: int, seed: int) -> list[int]:
    """Choose `count` training samples, or all if there are fewer; returns their indices, ascending.

    They are evaluated beside as many validation samples.
    """
    order: list[int] = torch.randperm(samples, generator=generator_of(seed)).tolist()
    return sorted(order[:count])
