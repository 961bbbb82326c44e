"""The batches of a run, from where it is in its data on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from brimful.errors import BrimfulError, DataError
from brimful.job import Batch
from brimful.train.data import Batches
from brimful.train.place import Place
from brimful.train.randomness import RandomState, RandomStream
from brimful.train.ranks import Ranks
from brimful.train.saves import Save


class Feed:
    """Reads the batches of epoch after epoch, from random numbers of their own, and knows how far it has come.

    These begin as the generators are when it is made, which must be the same on every rank.

    Args:
        batches: Of each epoch.
        ranks: All of them read the same.
        resumed: The save that the run goes on from; None begins it.
        restore_random: Sets this rank's random numbers to those that were saved.
    """

    def __init__(
        self, batches: Batches, *, ranks: Ranks, resumed: Save | None, restore_random: Callable[[Save], None]
    ) -> None:
        self._batches = batches
        self._ranks = ranks
        self._resumed = resumed
        """None again once the rest of its epoch is read."""
        self._restore_random = restore_random
        self._randomness = RandomStream()
        self._before_batch: RandomState | None = None
        """Random numbers of the data before the batch was read that is not trained on yet."""
        self.place = self._first_of(1) if resumed is None else Place.from_save(resumed.state["place"])
        """Where the next batch is."""

    def to_save(self) -> dict[str, Any]:
        """What the same batches are read from again: place and random numbers, in plain containers."""
        random = self._before_batch or self._randomness.state
        return {"data_random": random.to_save(), "place": self.place.to_save()}

    def drawn_from(self) -> AbstractContextManager[None]:
        """Within, random numbers are those of the data."""
        return self._randomness.drawn_from()

    def move_on(self) -> None:
        """Past the batch that was read last, which is trained on."""
        self.place.batches += 1
        self._before_batch = None

    def begin_next_epoch(self) -> None:
        """Go to the first batch of the epoch that follows."""
        self.place = self._first_of(self.place.epoch + 1)

    def rest_of_epoch(self, is_stopped: Callable[[], bool]) -> Iterator[tuple[Batch, float]]:
        """The batches from the place on, each with the seconds that were waited for it.

        All ranks go on with a batch or none does: a signal reaches a DataLoader's workers too, and then one
        rank may miss its worker before the others have heard of it.

        Args:
            is_stopped: Asked after each is read; if any rank is, it was the last, and is not given.

        Returns:
            Global batches, on the host.

        Raises:
            DataError: They could not be read, on this rank or another.
        """
        return self._waited_for(self._opened(), is_stopped)

    def _first_of(self, epoch: int) -> Place:
        return Place(epoch=epoch, random=self._randomness.state)

    def _opened(self) -> Iterator[Batch]:
        """The rest of the epoch, before its first batch is read."""
        if self._resumed is None:
            with self.drawn_from():
                return self._batches.epoch(self.place.epoch)
        resumed, self._resumed = self._resumed, None
        self._randomness.state = self.place.random
        with self.drawn_from():
            rest = self._batches.epoch(self.place.epoch, skip=self.place.batches)
        self._randomness.state = RandomState.from_save(resumed.state["data_random"])
        self._restore_random(resumed)
        return rest

    def _waited_for(
        self, batches: Iterator[Batch], is_stopped: Callable[[], bool]
    ) -> Iterator[tuple[Batch, float]]:
        while True:
            start = time.perf_counter()
            self._before_batch = self._randomness.state
            batch, failure = None, None
            try:
                with self.drawn_from():
                    batch = next(batches, None)
            except Exception as error:
                failure = error
            failed, stopped, ended = self._ranks.sum(
                failure is not None, is_stopped(), failure is None and batch is None
            )
            if stopped or ended == self._ranks.count:
                return
            if isinstance(failure, BrimfulError):
                raise failure
            if failure is not None:
                raise DataError(
                    f"the training data failed after {self.place}: {type(failure).__name__}: {failure}"
                ) from failure
            if failed or ended:
                raise DataError(
                    f"after {self.place} the training data failed on {failed:.0f} of {self._ranks.count} "
                    f"ranks, and ended on {ended:.0f}. Every rank must read the same batches."
                )
            yield batch, time.perf_counter() - start


@contextmanager
def dead_workers_told() -> Iterator[None]:
    """Within, a DataLoader worker that dies is an error of the data: a signal tells it amid whatever runs."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(f"the training data failed: {error}") from error
