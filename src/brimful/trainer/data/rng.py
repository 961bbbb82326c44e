"""Random numbers of a training run: its seed, and a stream of their own for its data."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from brimful.errors import PartialUpdateError
from brimful.execution.out_of_memory import with_room
from brimful.execution.random_state import RandomState


class RandomStream:
    """Random numbers for one purpose, which nothing that is drawn elsewhere changes.

    The data have one: so the order of the samples is the same whatever a plan or another rank draws in a step.
    It begins as the generators are when it is made; a GPU's own is no part of it.
    """

    def __init__(self) -> None:
        self.state = random_state_now(_HOST)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Within, random numbers come from here.

        Raises:
            PartialUpdateError: The numbers of elsewhere could not be restored.
        """
        elsewhere = random_state_now(_HOST)
        try:
            with_room(partial(self.state.restore, _HOST), during="random numbers are restored")
        except BaseException:
            restore_random_state(elsewhere, _HOST)
            raise
        try:
            yield
        finally:
            try:
                self.state = random_state_now(_HOST)
            finally:
                restore_random_state(elsewhere, _HOST)


def random_state_now(device: torch.device) -> RandomState:
    """The state of all generators, even where memory runs out once.

    Args:
        device: Whose generator counts beside the host's.

    Returns:
        A copy.
    """
    return with_room(partial(RandomState.now, device), during="the state of random generators is read")


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Set all generators back, even where memory runs out once.

    Args:
        state: Of all generators.
        device: Whose generator counts beside the host's.

    Raises:
        PartialUpdateError: They could not be set back: what follows would draw other numbers, saved or not.
    """
    try:
        with_room(partial(state.restore, device), during="random numbers are restored")
    except Exception as error:
        raise PartialUpdateError(
            f"random numbers could not be restored: {error} What follows would be another run, so it is not "
            "saved. Resume from the last save."
        ) from error


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
