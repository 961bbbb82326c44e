"""The rule by which steps are retried: once as before, then with less and less memory.

`out_of_memory.with_retries` repeats an attempt; `Retries` decides what the next one is made with, and records
it. `bf.apply` and a Transformers `Trainer` divide their micro-batches; a loop of one's own does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from brimful.errors import OutOfMemoryError
from brimful.execution.explained import Expected
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
        during: What is attempted, for the record.
        step: Number of the running step, for the record; the caller advances it.
        way_out: What the user can do if nothing takes less; ends the error.
        expected: What a plan predicted, for the explanation of an error.
        ends: Errors that end the attempts, even after memory ran out.
        on_recovery: Called with each record.
    """

    def __init__(
        self,
        how: How,
        device: torch.device,
        describe: Callable[[How], str],
        *,
        during: str = "step",
        step: int = 1,
        way_out: str = "Plan for a smaller budget.",
        expected: Expected | None = None,
        ends: tuple[type[Exception], ...] = (),
        on_recovery: Callable[[Recovery], object] = lambda _recovery: None,
    ) -> None:
        self.how, self.during, self.step = how, during, step
        self._began = 0.0
        """Start of the latest attempt."""
        self.recoveries: list[Recovery] = []
        self._device, self._describe, self._ends = device, describe, ends
        self._way_out, self._on_recovery = way_out, on_recovery
        self._expected = expected

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
        before, ran_out_with = self.how, ""

        def timed() -> Result:
            self._began = time.perf_counter()
            return attempt()

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            nonlocal ran_out_with
            taken, words, refused = self.how, self._describe(self.how), ""
            if ran_out.refused:
                refused = f"with {words} the {self.during} raised {ran_out.refused.rstrip('.')}"
            else:
                ran_out_with = words
            try:
                undo(ran_out)
                if is_retry:
                    self.how = shrink(taken)
            except StepOutOfMemoryError:
                raise
            except OutOfMemoryError as error:
                reason = f"{refused}, and {error}" if refused else str(error)
                raise StepOutOfMemoryError(
                    f"memory ran out in the {self.during} with {ran_out_with}: {ran_out.message.rstrip('.')}. "
                    f"It cannot run with less, because {reason.rstrip('.')}.\n  Model and optimizer are as "
                    f"before the {self.during}. {self._way_out}"
                ) from error
            self.record(f"{ran_out.message}; {refused}" if refused else ran_out.message, taken)

        try:
            return with_retries(
                *(timed, recover, self._device),
                but=self._ends,
                expected=self._expected,
                is_only=is_one_of_several(),
            )
        except BaseException:
            self.how = before
            raise

    def record(self, message: str, before: How) -> None:
        """Keep the record of a recovery after which attempts are made with `how`, and pass it on."""
        recovery = self.recovery(message, before, self.how)
        self.recoveries.append(recovery)
        self._on_recovery(recovery)

    def recovery(self, message: str, before: How, after: How) -> Recovery:
        """The record of a recovery in the running step."""
        return Recovery(
            step=self.step,
            during=self.during,
            message=message,
            before=self._describe(before),
            after=self._describe(after),
            seconds=time.perf_counter() - self._began,
        )


def smaller_micro_batch(settings: Settings) -> Settings:
    """The settings with the next smaller micro-batch that divides the batch."""
    whole = settings.rank_batch_size
    for size in range(settings.micro_batch_size - 1, 0, -1):
        if whole % size == 0:
            return settings.with_micro_batch_size(size)
    raise OutOfMemoryError("its micro-batch is one sample already")


def is_one_of_several() -> bool:
    """Whether other processes train too, which would wait for one that retries."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
