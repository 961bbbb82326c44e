"""Random numbers of a training run: its seed, and a stream of their own for its data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from brimful.random_state import RandomState as RandomState


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


def generator_of(*numbers: int) -> torch.Generator:
    """A generator of its own for each seed, epoch and whatever else; neighbouring numbers share nothing."""
    (mixed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed) >> 1)


_HOST = torch.device("cpu")
