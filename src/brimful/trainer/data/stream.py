"""The stream of batches of a run, and its position in the data."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from brimful.distributed.ranks import Ranks
from brimful.errors import BrimfulError, DataError, OutOfMemoryError
from brimful.execution.out_of_memory import free_frames, make_room, out_of_memory, with_room
from brimful.execution.random_state import RandomState
from brimful.job import Batch
from brimful.trainer.data.batches import Batches
from brimful.trainer.data.rng import RandomStream
from brimful.trainer.storage.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPosition:
    """An epoch, and the number of its global batches that the run has trained on."""

    epoch: int
    """Number of the epoch, from 1."""
    batches: int = 0
    """Number of batches of this epoch that the run has trained on."""
    random: RandomState
    """The random state at the start of the epoch, where a DataLoader draws the order of its samples."""

    def __str__(self) -> str:
        return f"{self.batches} batches of epoch {self.epoch}"


class BatchStream:
    """Reads the batches of each epoch from a separate random stream, and keeps its position.

    The stream starts from the random state at its creation, which must be the same on every rank: all ranks
    read the same batches.
    """

    def __init__(self, batches: Batches, *, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._resumed: tuple[RandomState, Callable[[], None]] | None = None
        """Random state and callback for opening the data of a resumed run; None once they are open."""
        self.randomness = RandomStream()
        """The random stream of the data."""
        self._before_batch: RandomState | None = None
        """The random state before the current batch was read; None once the run has trained on it."""
        self.position = self._first_of(1)
        """The position of the next batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of a checkpoint with which the same batches are read again."""
        return {
            "epoch": self.position.epoch,
            "batches": self.position.batches,
            "epoch_random": self.position.random,
            "data_random": self._before_batch or (self._resumed[0] if self._resumed else self.randomness.state),
        }

    def load_state_dict(self, saved: Checkpoint, *, then: Callable[[], None]) -> None:
        """Resume from the position that `state_dict` returned.

        `then` is called once the rest of the epoch is open; opening it may draw from the global generators.
        """
        self.position = DataPosition(epoch=saved.epoch, batches=saved.batches, random=saved.epoch_random)
        self._resumed = saved.data_random, then

    def advance(self) -> None:
        """Advance past the batch that was read last."""
        self.position = replace(self.position, batches=self.position.batches + 1)
        self._before_batch = None

    def begin_next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.position = self._first_of(self.position.epoch + 1)

    def rest_of_epoch(
        self, is_stopped: Callable[[], bool], on_out_of_memory: Callable[[str, float], None]
    ) -> Iterator[tuple[Batch, float]]:
        """Iterate over the batches from the position on, each with the seconds spent waiting for it.

        Either all ranks get a batch or none does: a signal also reaches a DataLoader's workers, and one rank
        may lose its worker before the other ranks stop.

        If memory runs out, this opens the data again and reads up to the position, as in a resumed run, since
        an iterator cannot repeat a batch. With several ranks the error ends the run.

        `is_stopped` is called after each read: True on any rank drops the batch and ends the iteration.
        `on_out_of_memory` is called with the message and the seconds lost. On return the data are open already,
        and a resumed run has its random states back.
        """
        return self._rest_of_epoch(self._opened(), is_stopped, on_out_of_memory)

    def _rest_of_epoch(
        self,
        batches: Iterator[Batch],
        is_stopped: Callable[[], bool],
        on_out_of_memory: Callable[[str, float], None],
    ) -> Iterator[tuple[Batch, float]]:
        while True:
            start = time.perf_counter()
            self._before_batch = self.randomness.state
            batch, failure = self._read(batches)
            ran_out = None
            if failure is not None and not self._ranks.is_distributed:
                ran_out = out_of_memory(failure, sys.exc_info()[1])
            if failure is not None and ran_out is not None:
                free_frames(failure)
                del batches, failure  # they keep batches alive that were read ahead
                make_room(_HOST)
                batches = self._opened_again(self._before_batch)
                on_out_of_memory(ran_out, time.perf_counter() - start)
                batch, failure = self._read(batches)
            if self._is_over(batch, failure, is_stopped()):
                return
            assert batch is not None
            yield batch, time.perf_counter() - start

    def restore_random(self) -> None:
        """Restore the random states of a resumed run, whose data are not opened."""
        if self._resumed is not None:
            self.randomness.state, restore = self._resumed
            restore()

    def _first_of(self, epoch: int) -> DataPosition:
        return DataPosition(epoch=epoch, random=self.randomness.state)

    def _opened(self) -> Iterator[Batch]:
        """Open the rest of the epoch."""
        if self._resumed is None:
            return self._opened_at(0)
        (random, then), self._resumed = self._resumed, None
        rest = self._opened_again(random)
        then()
        return rest

    def _opened_again(self, before_batch: RandomState) -> Iterator[Batch]:
        """Open the epoch again and skip the batches before the position.

        The next batch is read with the random state `before_batch`.
        """
        rest = self._opened_at(self.position.batches)
        self.randomness.state = before_batch
        return rest

    def _opened_at(self, batches: int) -> Iterator[Batch]:
        def opened() -> Iterator[Batch]:
            self.randomness.state = self.position.random
            with self.randomness.drawn_from():
                return self._batches.epoch(self.position.epoch, skip=batches)

        return with_room(opened, during=f"the training data of epoch {self.position.epoch} are opened")

    def _read(self, batches: Iterator[Batch]) -> tuple[Batch | None, Exception | None]:
        """The next batch, or the error that reading it raised; None and None at the end."""
        try:
            with self.randomness.drawn_from():
                return next(batches, None), None
        except Exception as error:
            return None, error

    def _is_over(self, batch: Batch | None, failure: Exception | None, is_stopped: bool) -> bool:
        """Whether the epoch is over on all ranks; raise if the run cannot continue."""
        failed, stopped, ended = self._ranks.all_reduce(
            failure is not None, is_stopped, failure is None and batch is None
        )
        if stopped or ended == self._ranks.count:
            return True
        if isinstance(failure, BrimfulError):
            raise failure
        if failure is not None:
            raise _reading_error(failure, self.position)
        if failed or ended:
            raise DataError(
                f"after {self.position} the training data failed on {failed:.0f} of {self._ranks.count} "
                f"ranks, and ended on {ended:.0f}. Every rank must read the same batches."
            )
        return False


def _reading_error(failure: Exception, position: DataPosition) -> DataError | OutOfMemoryError:
    """The error that ends a run whose data raised."""
    ran_out = out_of_memory(failure, sys.exc_info()[1])
    if ran_out is not None:
        return OutOfMemoryError(
            f"memory ran out while the training data were read, after {position}: {ran_out}."
        )
    error = DataError(f"the training data failed after {position}: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


@contextmanager
def worker_errors() -> Iterator[None]:
    """Raise DataError if a DataLoader worker dies, whatever runs when its signal arrives."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(f"the training data failed: {error}") from error


_HOST = torch.device("cpu")
