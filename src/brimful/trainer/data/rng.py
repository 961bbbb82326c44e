"""Random states of a training run: seeding, and a separate stream for its data."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from brimful.distributed.ranks import Ranks
from brimful.errors import PartialUpdateError
from brimful.execution.out_of_memory import with_room
from brimful.execution.random_state import RandomState


class RandomStream:
    """A separate state of the host's random generators.

    The data have one, so that the order of the samples does not depend on what the steps draw. It starts as a
    copy of the global state, without the generator of a GPU.
    """

    def __init__(self) -> None:
        self.state = random_state_now(_HOST)

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Draw random numbers from this stream within the context."""
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
    """Copy the state of all generators, of the host and of `device`; try again if memory runs out."""
    return with_room(partial(RandomState.now, device), during="the state of random generators is read")


def restore_random_state(state: RandomState, device: torch.device) -> None:
    """Restore what `random_state_now` returned for the device; try again if memory runs out."""
    try:
        with_room(partial(state.restore, device), during="random numbers are restored")
    except Exception as error:
        raise PartialUpdateError(
            f"random numbers could not be restored: {error} What follows would be another run, so it is not "
            "saved. Resume from the last save."
        ) from error


def restore_own(
    of_ranks: Sequence[RandomState], ranks: Ranks, device: torch.device, *, otherwise_seed: int
) -> None:
    """Restore the saved random state of this rank; seed a rank that the saved run did not have."""
    if ranks.count != len(of_ranks):
        warnings.warn(
            f"the run was saved by {len(of_ranks)} ranks and resumes with {ranks.count}: dropout "
            "draws other numbers than it would have.",
            stacklevel=2,
        )
    if ranks.rank >= len(of_ranks):
        seed_all(otherwise_seed, ranks.rank)
    else:
        of_ranks[ranks.rank].restore(device)


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed every generator, differently on each rank; rank 0 uses the seed itself."""
    if rank:
        seed = int(np.random.SeedSequence((seed, rank)).generate_state(1, np.uint64)[0]) >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_of(*numbers: int) -> torch.Generator:
    """A generator seeded with several numbers, such as seed and epoch; similar ones give unrelated streams."""
    (mixed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed) >> 1)


_HOST = torch.device("cpu")
