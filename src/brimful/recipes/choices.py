"""Random choices of samples, for validation and to evaluate beside it."""

from __future__ import annotations

import torch

from brimful.trainer.data.rng import generator_of


def split_at_random(samples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split samples into training and validation sets.

    Args:
        samples: Number of samples.
        fraction: Fraction for validation; rounded, but at least one of two samples.
        seed: Seed of the random choice.

    Returns:
        The indices of the training and of the validation samples, ascending.
    """
    count = min(max(round(fraction * samples), 1), samples - 1)
    order = torch.randperm(samples, generator=generator_of(seed)).tolist()
    return sorted(order[count:]), sorted(order[:count])


def sample(samples: int, count: int, seed: int) -> list[int]:
    """Choose some of the training samples, to evaluate beside as many validation samples.

    Args:
        samples: Number of training samples.
        count: Samples to choose; all if there are fewer.
        seed: Seed of the random choice.

    Returns:
        Their indices, ascending.
    """
    order: list[int] = torch.randperm(samples, generator=generator_of(seed)).tolist()
    return sorted(order[:count])
