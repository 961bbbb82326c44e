"""A user's own training loop on fake tensors: captured as it is written.

What the loop keeps alive, where it clears gradients, how many optimizers it steps, whether it clips or averages
weights: all that is in the code, so it is run rather than described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from brimful.batches import named_tensors
from brimful.capture.captured_step import StepObservers
from brimful.capture.corrections.functions import CorrectedFunctions
from brimful.capture.marks import mark_gradients, mark_model, mark_state
from brimful.capture.own_loop.closures import ClosureSteps
from brimful.capture.paged_state import page_state
from brimful.errors import CaptureError
from brimful.execution.job_loop import LoopBatches
from brimful.job import Batch, Job
from brimful.trace import Category, Phase


def run_loop(
    job: Job,
    model: nn.Module,
    batch: Batch,
    observers: StepObservers,
    functions: CorrectedFunctions,
    *,
    steps: int,
    begin_step: Callable[[], None],
) -> LoopSteps:
    """Run a job's own loop over fake batches until it has made some optimizer steps, and record it.

    `model` has fake parameters, on the device already. The loop gets `batch`, on the host, again and again. It
    may make `steps` optimizer steps, and `begin_step` is called before each; optimizers that step on one batch
    make one step together. The recorder of `observers` is in force, and so are `functions`, which follow
    backward.

    Raises `CaptureError` if the loop took no batch, or never stepped an optimizer.
    """
    assert job.loop is not None
    recorder = observers.recorder
    recorder.position.enter(Phase.SETUP, 0)
    mark_model(model, recorder)
    if recorder.host_is_device:
        tensors = dict(named_tensors(batch))
        recorder.mark(tensors.values(), Category.INPUTS, tensors)

    def begin_batch() -> None:
        if batches.micro_batch == 0:
            begin_step()
        recorder.position.enter(Phase.FORWARD, batches.micro_batch, batches.steps)

    batches = LoopBatches(batch, steps, begin_batch, end=lambda: None)
    with _phases_followed(model, observers, functions, batches):
        batches.feed(job, model, CaptureError)
    return LoopSteps(steps=batches.steps, micro_batches=batches.micro_batches[-1])


class LoopSteps(NamedTuple):
    """Numbers of steps and batches that a job's own loop ran."""

    steps: int
    """Optimizer steps that the loop completed, at least 1."""
    micro_batches: int
    """Batches that the loop took for its last step."""


@contextmanager
def _phases_followed(
    model: nn.Module,
    observers: StepObservers,
    functions: CorrectedFunctions,
    batches: LoopBatches,
) -> Iterator[None]:
    """Let the recorder follow the phase of the loop: backward, an optimizer's step, else forward."""
    recorder, compiled = observers.recorder, observers.compiled
    closures = ClosureSteps(recorder)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        page_state(optimizer, recorder)
        mark_model(model, recorder)  # `model.to(dtype)` gives parameters other storages
        mark_gradients(model, recorder)
        at, is_last = batches.micro_batch, batches.is_last_step
        recorder.position.enter(Phase.OPTIMIZER, at)
        return closures.begin(optimizer, args, kwargs, micro_batch=at, is_last=is_last)

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        closures.end(optimizer)
        mark_gradients(model, recorder)
        mark_state(optimizer, model, recorder)
        batches.note_optimizer_step()
        recorder.position.enter(Phase.FORWARD, batches.micro_batch)

    def around_backward(begins: bool) -> None:
        recorder.position.enter(Phase.BACKWARD if begins else Phase.FORWARD, batches.micro_batch)
        if begins:
            compiled.begin_backward(model, recorder, are_kept_apart=False)
        else:
            compiled.end_backward(recorder)

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(before_step).remove)
        stack.callback(register_optimizer_step_post_hook(after_step).remove)
        stack.enter_context(functions.follow_backward(around_backward))
        yield
