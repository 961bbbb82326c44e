"""The rule by which steps are retried: once as before, then with less and less memory.

`out_of_memory.with_retries` repeats an attempt; `Retries` decides what the next one is made with, and records
it. `bf.apply` and a Transformers `Trainer` divide their micro-batches; a loop of one's own does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from brimful.errors import OutOfMemoryError
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, with_retries
from brimful.results import Recovery
from brimful.settings import Settings

How = TypeVar("How")
Result = TypeVar("Result")

Shrink = Callable[[How], How]
"""Finds what takes less memory for the same batch: settings, a micro-batch size, or the parts of a batch.

Raises `OutOfMemoryError`, whose message is the reason, if nothing does."""


class Retries(Generic[How]):
    """What attempts are made with, and what became of those in which memory ran out.

    Args:
        how: What the first attempt is made with. What takes less stays in use.
        device: Where memory runs out.
        describe: Says `how` in a few words.
        step: Number of the running step, for the record; the caller advances it.
        during: What is attempted, for the record.
        way_out: What the user can do if nothing takes less; ends the error.
    """

    def __init__(
        self,
        how: How,
        device: torch.device,
        describe: Callable[[How], str],
        *,
        step: int = 1,
        during: str = "step",
        way_out: str = "Plan for a smaller budget.",
    ) -> None:
        self.how, self.step = how, step
        self.recoveries: list[Recovery] = []
        self._device, self._describe = device, describe
        self._during, self._way_out = during, way_out

    def run(
        self,
        attempt: Callable[[], Result],
        shrink: Shrink[How],
        undo: Callable[[RanOut], object] = lambda _ran_out: None,
    ) -> Result:
        """Run an attempt, which uses `how`; where memory runs out in it, undo it and run it again.

        `undo` raises `OutOfMemoryError` with the reason if the attempt cannot be repeated. If the attempts end
        in an error, `how` is as before. Raises `StepOutOfMemoryError` if nothing takes less.
        """
        before, began = self.how, 0.0

        def timed() -> Result:
            nonlocal began
            began = time.perf_counter()
            return attempt()

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            taken = self.how
            try:
                undo(ran_out)
                self.how = shrink(taken) if is_retry else taken
            except StepOutOfMemoryError:
                raise
            except OutOfMemoryError as reason:
                raise self._nothing_less(ran_out, reason) from reason
            self._record(ran_out, taken, time.perf_counter() - began)

        try:
            return with_retries(timed, recover, self._device)
        except BaseException:
            self.how = before
            raise

    def _record(self, ran_out: RanOut, before: How, seconds: float) -> None:
        after = self._describe(self.how)
        if ran_out.refused:
            self.recoveries[-1] = replace(self.recoveries[-1], after=after)
            return
        self.recoveries.append(
            Recovery(
                step=self.step,
                during=self._during,
                message=ran_out.message,
                before=self._describe(before),
                after=after,
                seconds=seconds,
            )
        )

    def _nothing_less(self, ran_out: RanOut, reason: OutOfMemoryError) -> StepOutOfMemoryError:
        ran_out_with, why = self._describe(self.how), str(reason)
        if ran_out.refused:
            why = f"with {ran_out_with} it raised {ran_out.refused}"
            ran_out_with = self.recoveries[-1].before
        return StepOutOfMemoryError(
            f"memory ran out in a {self._during} with {ran_out_with}: {ran_out.message.rstrip('.')}. It cannot "
            f"run with less, because {why.rstrip('.')}.\n  Model and optimizer are as before the step. "
            f"{self._way_out}"
        )


def micro_batch_text(samples: int) -> str:
    """A micro-batch size in words."""
    return f"micro-batch {samples}"


def smaller_micro_batch(settings: Settings) -> Settings:
    """The settings with the next smaller micro-batch that divides the batch."""
    whole = settings.rank_batch_size
    for size in range(settings.micro_batch_size - 1, 0, -1):
        if whole % size == 0:
            return settings.with_micro_batch_size(size)
    raise OutOfMemoryError("its micro-batch is one sample already.")


def is_one_of_several() -> bool:
    """Whether other processes train too, which would wait for one that retries."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
