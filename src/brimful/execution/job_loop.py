"""The batches for a job's own training loop, until it has made enough optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

from torch import nn

from brimful.errors import BrimfulError, UsageError
from brimful.execution.precision import no_autocast_of_caller
from brimful.job import Batch, Job
from brimful.settings import Settings

MOST_MICRO_BATCHES = 64
"""Micro-batches of one optimizer step that a loop gets; each takes as long to capture as a whole step else."""


def check_loop_decides(job: Job, settings: Settings) -> None:
    """Raise `UsageError` if a job has a loop, and settings ask for more than a micro-batch size."""
    if job.loop is not None and settings != Settings(micro_batch_size=settings.micro_batch_size):
        raise UsageError(
            f"{job.name!r} brings its own training loop, which decides precision, accumulation and optimizer. "
            "Leave them out, or take the loop out of the job."
        )


class LoopBatches:
    """Replaces a loop's data loader: one host batch, again and again until enough optimizer steps are made.

    `begin_batch` is called before each batch, `end` after the last step, while the loop still holds what it
    keeps.
    """

    def __init__(
        self, batch: Batch, most_steps: int, begin_batch: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._batch, self._most_steps, self._begin_batch, self._end = batch, most_steps, begin_batch, end
        self._is_exhausted = False
        self._given = 0
        self._since_step = 0
        self.micro_batches: list[int] = []
        """Number of micro-batches of each optimizer step made."""

    def __len__(self) -> int:
        return self._most_steps * MOST_MICRO_BATCHES  # for schedules and the like, whose values do not matter

    def __iter__(self) -> Iterator[Batch]:
        while self.steps < self._most_steps and self._since_step < MOST_MICRO_BATCHES:
            self._since_step += 1
            self._given += 1
            self._begin_batch()
            yield self._batch
        if self._is_exhausted:
            raise _LoopEnded
        self._is_exhausted = True
        self._end()

    def feed(self, job: Job, model: nn.Module, error: type[BrimfulError]) -> None:
        """Run a job's loop on these batches, to its end or to theirs.

        `error` is raised if the loop takes no batch, or never steps an optimizer.
        """
        assert job.loop is not None
        with suppress(_LoopEnded), no_autocast_of_caller():
            try:
                job.loop(model, self)
            except (StopIteration, RuntimeError) as stop:  # a generator makes the second of the first
                is_end = StopIteration in (type(stop), type(stop.__cause__))
                if not (is_end and self._is_exhausted):
                    raise
        if self._given == 0:
            raise error(
                f"the loop of {job.name!r} took no batch from its iterator. "
                "It is called as loop(model, batches)."
            )
        if not self.micro_batches:
            raise error(
                f"the loop of {job.name!r} made no optimizer step in {self._given} micro-batches; it gets "
                f"{MOST_MICRO_BATCHES} at most. If it accumulates over more, let it do so over fewer here: "
                "from two micro-batches on the memory is the same."
            )

    def note_optimizer_step(self) -> None:
        """Count a step; optimizers that step on one batch count as one step."""
        if self._since_step:
            self.micro_batches.append(self._since_step)
            self._since_step = 0

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        return len(self.micro_batches)

    @property
    def is_last_step(self) -> bool:
        """Whether no step follows the one that is being made."""
        return self.steps == self._most_steps - 1

    @property
    def micro_batch(self) -> int:
        """Index of the latest batch within its step."""
        return max(self._since_step - 1, 0)


class _LoopEnded(BaseException):  # not an error: ends loops that iterate over the batches for ever
    """A loop requested batches after the last one."""
