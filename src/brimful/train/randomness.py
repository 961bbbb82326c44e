"""The state of every generator of random numbers that a step may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Generators of Python, NumPy and torch, as they were at one moment."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    host: Tensor
    """Of torch on the host."""
    cuda: Tensor | None
    """Of the device in use; None on a CPU."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """The state of all generators.

        Args:
            device: Whose generator counts beside the host's.

        Returns:
            A copy.
        """
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=True),  # type: ignore[arg-type]
            host=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def restore(self, device: torch.device) -> None:
        """Set all generators back.

        Args:
            device: As in `now`.
        """
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.host)
        if self.cuda is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda, device)

    def to_save(self) -> dict[str, Any]:
        """The state in plain numbers, lists and tensors, as a file may hold that runs no code when loaded."""
        version, numbers, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": [version, list(numbers), gauss],
            "numpy": [name, keys.tolist(), position, has_gauss, cached],
            "host": self.host,
            "cuda": self.cuda,
        }

    @classmethod
    def from_save(cls, saved: dict[str, Any]) -> Self:
        """The state that `to_save` gave."""
        version, numbers, gauss = saved["python"]
        name, keys, *rest = saved["numpy"]
        return cls(
            python=(version, tuple(numbers), gauss),
            numpy=(name, np.array(keys, dtype=np.uint32), *rest),
            host=saved["host"],
            cuda=saved["cuda"],
        )


class RandomStream:
    """Random numbers for one purpose, which nothing that is drawn elsewhere changes.

    The data have one: so the order of the samples is the same whatever a plan or another rank draws in a step.
    It begins as the generators are when it is made; a GPU's own is no part of it.
    """

    def __init__(self) -> None:
        self.state = RandomState.now(_HOST)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Within, random numbers come from here."""
        elsewhere = RandomState.now(_HOST)
        self.state.restore(_HOST)
        try:
            yield
        finally:
            self.state = RandomState.now(_HOST)
            elsewhere.restore(_HOST)


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed every generator, each rank's otherwise.

    Args:
        seed: At least 0.
        rank: That of the first is the seed itself.
    """
    if rank:
        seed = int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]) >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_of(seed: int, epoch: int) -> torch.Generator:
    """A generator of its own for each pair; neighbouring seeds and epochs share nothing."""
    (mixed,) = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed) >> 1)


_HOST = torch.device("cpu")
