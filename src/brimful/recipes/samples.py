"""Which samples of a recipe are for validation, which are evaluated beside them, and a digest of all."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from brimful.errors import UsageError
from brimful.trainer.data.rng import generator_of


def check_fraction(value: float) -> None:
    """Raise `UsageError` for a validation fraction that takes no samples or all of them."""
    if not 0 < value < 1:
        raise UsageError(f"validation_fraction is {value}; it must lie between 0 and 1.")


def split_at_random(samples: int, fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Choose training and validation samples at random; returns the indices of both, ascending.

    The number of validation samples is rounded, but at least one of two samples, and never all.
    """
    return _split(range(samples), fraction, generator_of(seed))


def split_by_class(labels: Sequence[int], fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Split samples into training and validation sets, stratified by class; returns ascending indices.

    `labels` has the label of every sample. `fraction` of each class is for validation: rounded, but at least
    one sample of a class with two. A class with a single sample is only trained on.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        by_class[label].append(index)
    training, validation = [], []
    for label, indices in by_class.items():
        for_training, for_validation = _split(indices, fraction, generator_of(seed, label))
        training += for_training
        validation += for_validation
    return sorted(training), sorted(validation)


def _split(indices: Sequence[int], fraction: float, generator: torch.Generator) -> tuple[list[int], list[int]]:
    count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
    order = [indices[place] for place in torch.randperm(len(indices), generator=generator).tolist()]
    return sorted(order[count:]), sorted(order[:count])


def sample(samples: int, count: int, seed: int) -> list[int]:
    """Choose `count` training samples, or all if there are fewer; returns their indices, ascending.

    They are evaluated beside as many validation samples.
    """
    order: list[int] = torch.randperm(samples, generator=generator_of(seed)).tolist()
    return sorted(order[:count])


def digest(parts: Iterable[str | memoryview]) -> str:
    """A digest that identifies the same data, also in another process: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.encode(errors="surrogatepass") + b"\0" if isinstance(part, str) else part)
    return found.hexdigest()[:16]
