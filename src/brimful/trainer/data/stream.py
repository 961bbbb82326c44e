"""The batches of a run, from its position in the data on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from brimful.distributed.ranks import Ranks
from brimful.errors import BrimfulError, DataError, OutOfMemoryError
from brimful.execution.out_of_memory import make_room, out_of_memory, with_room
from brimful.execution.random_state import RandomState
from brimful.job import Batch
from brimful.trainer.data.batches import Batches
from brimful.trainer.data.position import DataPosition
from brimful.trainer.data.rng import RandomStream
from brimful.trainer.storage.checkpoint import DataState


class BatchStream:
    """Reads the batches of epoch after epoch, with random numbers of their own, and keeps its position.

    These random numbers begin as the generators are when it is made, which must be alike on every rank.

    Args:
        batches: Of each epoch.
        ranks: All of them read the same.
    """

    def __init__(self, batches: Batches, *, ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._resumed: tuple[RandomState, Callable[[], None]] | None = None
        """How the next epoch's data are opened in a resumed run; None again once they are."""
        self.randomness = RandomStream()
        """Random numbers of the data."""
        self._before_batch: RandomState | None = None
        """Random numbers of the data before the batch was read that is not trained on yet."""
        self.position = self._first_of(1)
        """Of the next batch."""

    def state_dict(self) -> DataState:
        """What the same batches are read from again: position and random numbers."""
        return DataState(
            epoch=self.position.epoch,
            batches=self.position.batches,
            epoch_random=self.position.random,
            random=self._before_batch or (self._resumed[0] if self._resumed else self.randomness.state),
        )

    def load_state_dict(self, state: DataState, *, then: Callable[[], None]) -> None:
        """Resume from a saved position.

        Args:
            state: What `state_dict` returned.
            then: Called once the rest of its epoch is open, which may draw random numbers of its own.
        """
        self.position = DataPosition(epoch=state.epoch, batches=state.batches, random=state.epoch_random)
        self._resumed = state.random, then

    def advance(self) -> None:
        """Count the batch that was read last as trained on."""
        self.position.batches += 1
        self._before_batch = None

    def begin_next_epoch(self) -> None:
        """Move to the first batch of the next epoch."""
        self.position = self._first_of(self.position.epoch + 1)

    def rest_of_epoch(
        self, is_stopped: Callable[[], bool], on_out_of_memory: Callable[[str, float], None]
    ) -> Iterator[tuple[Batch, float]]:
        """The batches from the position on, each with the seconds spent waiting for it.

        All ranks get a batch or none does: a signal reaches a DataLoader's workers too, and then one
        rank may miss its worker before the others have heard of it.

        Where memory runs out, an iterator cannot be asked for the same batch again. The data are opened again
        and read up to the position, as in a resumed run; of several ranks none does so alone.

        Args:
            is_stopped: Asked after each is read; if any rank is, it was the last, and is not given.
            on_out_of_memory: Told of each time that memory ran out: what the error said, and the seconds lost.

        Yields:
            Global batches, on the host.

        Raises:
            DataError: They could not be read, on this rank or another.
            OutOfMemoryError: Memory ran out, in reading the same batch twice.
        """
        batches = self._opened()
        while True:
            start = time.perf_counter()
            self._before_batch = self.randomness.state
            batch, failure = self._read(batches)
            ran_out = None if failure is None or self._ranks.is_distributed else out_of_memory(failure)
            if ran_out is not None:
                del batches, failure  # which hold what was read ahead
                make_room(_HOST)
                batches = self._opened_again(self._before_batch)
                on_out_of_memory(ran_out, time.perf_counter() - start)
                batch, failure = self._read(batches)
            if self._is_over(batch, failure, is_stopped()):
                return
            assert batch is not None
            yield batch, time.perf_counter() - start

    def _first_of(self, epoch: int) -> DataPosition:
        return DataPosition(epoch=epoch, random=self.randomness.state)

    def _opened(self) -> Iterator[Batch]:
        """The rest of the epoch, before its first batch is read."""
        if self._resumed is None:
            return self._opened_at(0)
        (random, then), self._resumed = self._resumed, None
        rest = self._opened_again(random)
        then()
        return rest

    def _opened_again(self, before_batch: RandomState) -> Iterator[Batch]:
        """The same after the batches that were trained on, which are read again, and skipped.

        Args:
            before_batch: Random numbers that the next batch is read with.

        Returns:
            Global batches, on the host.
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
        """The next batch, or why there is none."""
        try:
            with self.randomness.drawn_from():
                return next(batches, None), None
        except Exception as error:
            return None, error

    def _is_over(self, batch: Batch | None, failure: Exception | None, is_stopped: bool) -> bool:
        """Whether the epoch is, on all ranks; or raise what ends the run."""
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
    """What ends a run whose data raised."""
    ran_out = out_of_memory(failure)
    if ran_out is not None:
        return OutOfMemoryError(
            f"memory ran out while the training data were read, after {position}: {ran_out}."
        )
    error = DataError(f"the training data failed after {position}: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


@contextmanager
def worker_errors() -> Iterator[None]:
    """Within, a DataLoader worker that dies raises DataError, whatever runs when its signal arrives."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker"):
            raise
        raise DataError(f"the training data failed: {error}") from error


_HOST = torch.device("cpu")
