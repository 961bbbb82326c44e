"""A user's own training loop on fake tensors: captured as it is written.

What the loop keeps alive, where it clears gradients, how many optimizers it steps, whether it clips or averages
weights: all that is in the code, so it is run rather than described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from brimful.capture.corrections import CorrectedFunctions
from brimful.capture.marks import mark_gradients, mark_model, mark_state
from brimful.capture.recorder import Recorder
from brimful.capture.replaced import replaced
from brimful.errors import CaptureError
from brimful.job import Batch, Job
from brimful.trace import Phase


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
) -> None:
    """Run a job's own loop over some fake batches and record it.

    Args:
        job: Its `loop` is called.
        model: With fake parameters, on the device already.
        batch: A fake batch on the host; the loop gets it once a step.
        recorder: Is in force.
        functions: In force too; tells when backward runs.
        steps: How many batches the loop is given.
        begin_step: Called before each.

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
    if not batches.steps_done:
        raise CaptureError(
            f"the loop of {job.name!r} made no optimizer step in {batches.given} batches. "
            f"Give at least as many steps as it accumulates gradients over."
        )


class _Batches:
    """What stands for the data loader: one host batch, given out a few times."""

    def __init__(self, batch: Batch, count: int, recorder: Recorder, begin_step: Callable[[], None]) -> None:
        self._batch, self._count, self._recorder, self._begin_step = batch, count, recorder, begin_step
        self._is_exhausted = False
        self.given = 0
        self.steps_done = 0
        self._since_step = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        while self.given < self._count:
            self._begin_step()
            self._recorder.at(Phase.FORWARD, self._since_step, self.steps_done)
            self.given += 1
            self._since_step += 1
            yield self._batch
        if self._is_exhausted:
            raise LoopEnded
        self._is_exhausted = True

    def note_optimizer_step(self) -> None:
        """Optimizers that step on one batch make one step together."""
        if self._since_step:
            self.steps_done += 1
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
        mark_gradients(model, recorder)
        recorder.at(Phase.OPTIMIZER, batches.micro_batch)
        recorder.item_value = 1.0  # optimizers read their step count

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
        stack.enter_context(_no_overflow_found(recorder))
        yield


@contextmanager
def _no_overflow_found(recorder: Recorder) -> Iterator[None]:
    """A loss scaler that reads whether a gradient overflowed reads 0: none did."""
    decide = GradScaler._maybe_opt_step

    def decided(*args: Any, **kwargs: Any) -> Any:
        recorder.item_value = 0.0
        try:
            return decide(*args, **kwargs)
        finally:
            recorder.item_value = 1.0

    with replaced(GradScaler, "_maybe_opt_step", decided):
        yield
