"""A user's own training loop on fake tensors: captured as it is written.

What the loop keeps alive, where it clears gradients, how many optimizers it steps, whether it clips or averages
weights: all that is in the code, so it is run rather than described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from brimful.capture.corrections import CorrectedFunctions
from brimful.capture.marks import mark_gradients, mark_model, mark_state
from brimful.capture.recorder import Recorder
from brimful.errors import CaptureError
from brimful.job import Batch, Job
from brimful.trace import Phase

MOST_MICRO_BATCHES = 64
"""Micro-batches of one optimizer step of a loop that are captured; each takes as long as a whole step else."""


class LoopEnded(BaseException):  # no error: it ends loops that would go on for ever
    """A loop asked for batches after the last one had been given out."""


def run_loop(
    job: Job,
    model: nn.Module,
    batch: Batch,
    recorder: Recorder,
    functions: CorrectedFunctions,
    *,
    steps: int,
    begin_step: Callable[[], None],
) -> LoopSteps:
    """Run a job's own loop over fake batches until it has made some optimizer steps, and record it.

    Args:
        job: Its `loop` is called.
        model: With fake parameters, on the device already.
        batch: A fake batch on the host; the loop gets it again and again.
        recorder: Is in force.
        functions: In force too; tells when backward runs.
        steps: How many optimizer steps it may make. Optimizers that step on one batch make one together.
        begin_step: Called before each.

    Returns:
        What it did.

    Raises:
        CaptureError: The loop took no batch, or never stepped an optimizer.
    """
    assert job.loop is not None
    recorder.at(Phase.SETUP, 0)
    mark_model(model, recorder)
    batches = _Batches(batch, steps, recorder, begin_step)
    with _phases_followed(model, recorder, functions, batches), suppress(LoopEnded):
        job.loop(model, batches)
    if batches.given == 0:
        raise CaptureError(
            f"the loop of {job.name!r} asked for no batch. It is called as loop(model, batches)."
        )
    if not batches.micro_batches:
        raise CaptureError(
            f"the loop of {job.name!r} made no optimizer step in {batches.given} micro-batches; it gets "
            f"{MOST_MICRO_BATCHES} at most. If it accumulates over more, let it do so over fewer here: "
            "from two micro-batches on the memory is the same."
        )
    return LoopSteps(steps=len(batches.micro_batches), micro_batches=batches.micro_batches[-1])


class LoopSteps(NamedTuple):
    """What a loop did."""

    steps: int
    """Optimizer steps it completed, at least 1."""
    micro_batches: int
    """Batches that it took for the last of them."""


class _Batches:
    """What stands for the data loader: one host batch, given out until enough optimizer steps are made."""

    def __init__(self, batch: Batch, steps: int, recorder: Recorder, begin_step: Callable[[], None]) -> None:
        self._batch, self._steps, self._recorder, self._begin_step = batch, steps, recorder, begin_step
        self._is_exhausted = False
        self.given = 0
        self.micro_batches: list[int] = []
        """Of each optimizer step made."""
        self._since_step = 0

    def __len__(self) -> int:
        return self._steps * MOST_MICRO_BATCHES  # what it is used for, a schedule say, is nothing we look at

    def __iter__(self) -> Iterator[Batch]:
        while len(self.micro_batches) < self._steps and self._since_step < MOST_MICRO_BATCHES:
            if self._since_step == 0:
                self._begin_step()
            self._recorder.at(Phase.FORWARD, self._since_step, len(self.micro_batches))
            self.given += 1
            self._since_step += 1
            yield self._batch
        if self._is_exhausted:
            raise LoopEnded
        self._is_exhausted = True

    def note_optimizer_step(self) -> None:
        """Optimizers that step on one batch make one step together."""
        if self._since_step:
            self.micro_batches.append(self._since_step)
            self._since_step = 0

    @property
    def micro_batch(self) -> int:
        return max(self._since_step - 1, 0)


@contextmanager
def _phases_followed(
    model: nn.Module, recorder: Recorder, functions: CorrectedFunctions, batches: _Batches
) -> Iterator[None]:
    """Say what phase the loop is in: backward, an optimizer's step, else forward."""

    def before_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mark_model(model, recorder)  # `model.to(dtype)` gives parameters other storages
        mark_gradients(model, recorder)
        recorder.at(Phase.OPTIMIZER, batches.micro_batch)

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mark_state(optimizer, model, recorder)
        batches.note_optimizer_step()
        recorder.at(Phase.FORWARD, batches.micro_batch)

    def around_backward(begins: bool) -> None:
        recorder.at(Phase.BACKWARD if begins else Phase.FORWARD, batches.micro_batch)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        stack.enter_context(functions.backward_told(around_backward))
        yield
