"""Out-of-memory recovery in a Transformers `Trainer`: the same step again, then with smaller micro-batches.

The trainer fetches all micro-batches of an optimizer step before it trains on the first. So where memory runs
out in one of them, the gradients of the step are cleared, random numbers and buffers are restored to those of
its start, and all micro-batches up to this one are run again. The same happens where memory runs out
when gradients are unscaled or clipped, or their norm is taken.

Checked with transformers 5.23.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from brimful.execution.buffers import BufferSnapshot
from brimful.execution.loop_recovery import completed_update
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, with_retries
from brimful.execution.random_state import RandomState
from brimful.execution.scaled_update import ScaledUpdates, enabled, replace_step
from brimful.integrations.transformers.batches import layout_of_trainer
from brimful.integrations.transformers.coupling import why_not_divided
from brimful.integrations.transformers.loss import DividedLoss, items_counter, joined_results, shares_of_loss
from brimful.integrations.transformers.modules import TrainerState
from brimful.replaced import replace_attribute
from brimful.results import Recovery

Result = TypeVar("Result")


class TrainerRecovery:
    """Retries a trainer's training, evaluation and optimizer steps in which memory runs out, in one process."""

    def __init__(self, trainer: Trainer, micro_batch_size: int, division: DividedLoss) -> None:
        self.recoveries: list[Recovery] = []
        self._trainer = trainer
        self._device = torch.device(trainer.args.device)
        self._size = micro_batch_size
        self._layout = layout_of_trainer(trainer)
        self._count, self._division = items_counter(trainer, self._layout), division
        self._module: nn.Module = trainer.model
        self._undivided = why_not_divided(trainer)
        self._buffers: BufferSnapshot | None = None
        self._random: RandomState | None = None
        self._batches: list[Any] = []
        self._done = 0
        """Micro-batches of the current step whose gradients are complete."""
        self._reruns = False
        self._couples = False
        self._forget_scaled: Callable[[], None] = lambda: None
        """Clears what a loss scaler noted of a step that is retried."""
        self._run_micro_batch: Callable[[Any], object] = lambda _batch: None
        """Forward and backward of a micro-batch of the current step."""
        self._after_backward: list[Callable[[], object]] = []
        """What the current step has done with the gradients of all micro-batches."""
        self._is_within = False
        """Whether a micro-batch or one of `_after_backward` is running."""

    def begin(self, module: nn.Module, optimizer: Optimizer, wrapper: Any) -> Callable[[], None]:
        """Watch a trainer's steps on the module that it trains; returns a function that ends that.

        `wrapper` is Accelerate's, of the optimizer.
        """
        trainer = self._trainer
        self._module = module
        self._buffers = BufferSnapshot(module)
        self._couples = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        changes = ExitStack()
        fetch, train = trainer.get_batch_samples, trainer.training_step
        get_batch_samples = partial(self._get_batch_samples, fetch)
        changes.callback(replace_attribute(trainer, "get_batch_samples", get_batch_samples))
        changes.callback(replace_attribute(trainer, "training_step", partial(self._training_step, train)))
        clip, norm = trainer._clip_grad_norm, trainer._get_grad_norm
        changes.callback(replace_attribute(trainer, "_clip_grad_norm", partial(self._clip_grad_norm, clip)))
        changes.callback(replace_attribute(trainer, "_get_grad_norm", partial(self._get_grad_norm, norm)))
        changes.callback(replace_step(optimizer, wrapper, self._resumable_step(optimizer)))
        if (scaler := enabled(trainer.accelerator.scaler)) is not None:
            run = self._run_after_backward
            scaled = ScaledUpdates(scaler, optimizer, self._device, run, end_step=lambda: None)
            changes.callback(scaled.remove)
            self._forget_scaled = scaled.forget
        return changes.close

    def watch_evaluation(self) -> Callable[[], None]:
        """Retry evaluation and prediction; returns what ends that."""
        own = self._trainer.prediction_step
        return replace_attribute(self._trainer, "prediction_step", partial(self._prediction_step, own))

    def _resumable_step(self, optimizer: Optimizer) -> Callable[..., None]:
        """The optimizer's `step`, which is completed where memory runs out in it."""
        update, own = completed_update(optimizer, self._device), optimizer.step

        @wraps(own)  # with the mark of a learning-rate scheduler, which counts the steps
        def step(*args: Any, **kwargs: Any) -> None:
            update(partial(own, *args, **kwargs))

        return step

    def _get_batch_samples(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        self._batches, self._done, self._after_backward = found[0], 0, []
        return found

    def _training_step(
        self, own: Callable[..., Tensor], model: nn.Module, inputs: Any, *others: Any, **kwargs: Any
    ) -> Tensor:
        assert self._buffers is not None
        if self._done == 0:
            if self._random is not None:
                self._buffers.release()
            self._random = RandomState.now(self._device)
            self._buffers.take()
        self._reruns = False
        began = time.perf_counter()
        state = TrainerState(self._trainer)

        def run(batch: Any) -> Tensor:
            return self._division.train(self._size, own, model, batch, *others, **kwargs)

        self._run_micro_batch = run

        def attempt() -> Tensor:
            if self._reruns:
                for earlier in self._batches[: self._done]:
                    run(earlier)
                state.restore()  # metrics that were collected in the attempt before and in these again
            return run(inputs)

        size = self._size
        try:
            with self._within():
                loss = with_retries(attempt, partial(self._recover, inputs, began), self._device)
        except BaseException:
            self._size = size
            raise
        self._done += 1
        return loss

    def _clip_grad_norm(self, own: Callable[..., Any], model: nn.Module) -> Any:
        return self._run_after_backward(partial(own, model))

    def _get_grad_norm(self, own: Callable[..., Any], model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm that clipping found; without clipping (`max_grad_norm=0`) it is taken after unscaling."""
        if grad_norm is not None:
            return own(model, grad_norm=grad_norm)
        return self._run_after_backward(partial(own, model))

    def _run_after_backward(self, action: Callable[[], Result]) -> Result:
        """Unscale or clip gradients; where memory runs out, run the step again, as some may have changed."""
        if self._is_within:
            return action()
        began, reruns = time.perf_counter(), False
        state = TrainerState(self._trainer)

        def attempt() -> Result:
            if reruns:
                for micro_batch in self._batches[: self._done]:
                    self._run_micro_batch(micro_batch)
                for earlier in self._after_backward:
                    earlier()
                state.restore()
            return action()

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            nonlocal reruns
            self._undo()
            reruns = True
            if is_retry:
                raise self._out_of_memory(ran_out, "it ran out twice while gradients are unscaled or clipped")
            self._record(ran_out, began, before=self._size)

        with self._within():
            found = with_retries(attempt, recover, self._device)
        self._after_backward.append(action)
        return found

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False

    def _recover(self, inputs: Any, began: float, ran_out: RanOut, *, is_retry: bool) -> None:
        """Undo the step so far; from the second time on, halve the micro-batch."""
        before = self._size
        self._undo()
        self._reruns = True
        if is_retry:
            self._size = self._smaller(inputs, ran_out)
        if ran_out.refused:
            self.recoveries[-1] = replace(self.recoveries[-1], after=f"micro-batch {self._size}")
            return
        if is_retry:
            warnings.warn(
                f"memory ran out again in a step: {ran_out.message}. From now on it takes {self._size} samples "
                f"at a time in place of {before}.",
                stacklevel=2,
            )
        self._record(ran_out, began, before=before)

    def _undo(self) -> None:
        """Clear the gradients of the step, and restore buffers and random numbers of its start."""
        assert self._buffers is not None
        assert self._random is not None
        self._module.zero_grad(set_to_none=True)
        self._forget_scaled()
        self._buffers.restore()
        self._buffers.take()
        self._random.restore(self._device)

    def _record(self, ran_out: RanOut, began: float, *, before: int) -> None:
        self.recoveries.append(
            Recovery(
                step=self._trainer.state.global_step + 1,
                during="step",
                message=ran_out.message,
                before=f"micro-batch {before}",
                after=f"micro-batch {self._size}",
                seconds=time.perf_counter() - began,
            )
        )

    def _smaller(self, inputs: Any, ran_out: RanOut) -> int:
        if self._size == 1:
            raise self._out_of_memory(ran_out, "its micro-batch is one sample already")
        if self._undivided is not None:
            raise self._out_of_memory(ran_out, f"its micro-batch is not divided: {self._undivided}")
        if self._couples:
            raise self._out_of_memory(ran_out, "BatchNorm couples the samples of its micro-batch")
        if (reason := self._layout.why_whole(inputs)) is not None:
            raise self._out_of_memory(ran_out, f"its micro-batch cannot be split: {reason}")
        return self._size // 2

    def _out_of_memory(self, ran_out: RanOut, reason: str) -> StepOutOfMemoryError:
        if ran_out.refused:
            reason = f"with less it raised {ran_out.refused}"
        return StepOutOfMemoryError(
            f"memory ran out in a training step of {self._size} samples at a time: {ran_out.message}. It "
            f"cannot run with less, because {reason}.\n  Model and optimizer are as before the step. Plan for "
            "a smaller budget."
        )

    def _prediction_step(
        self, own: Callable[..., Any], model: nn.Module, inputs: Any, *others: Any, **kwargs: Any
    ) -> Any:
        """Evaluate a batch; where memory runs out, in halves whose results are joined."""
        began = time.perf_counter()
        parts = [inputs]

        def attempt() -> list[Any]:
            return [own(model, part, *others, **kwargs) for part in parts]

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            samples = max(map(self._layout.count, parts))
            if is_retry:
                if self._undivided is not None:
                    raise self._out_of_memory(ran_out, f"its batch is not divided: {self._undivided}")
                if samples == 1 or self._layout.why_whole(inputs) is not None:
                    raise self._out_of_memory(ran_out, "it evaluates one sample already")
                parts[:] = self._layout.split(inputs, -(-samples // 2))
            self.recoveries.append(
                Recovery(
                    step=self._trainer.state.global_step,
                    during="evaluation",
                    message=ran_out.message,
                    before=f"batch {samples}",
                    after=f"batch {max(map(self._layout.count, parts))}",
                    seconds=time.perf_counter() - began,
                )
            )

        found = with_retries(attempt, recover, self._device)
        return found[0] if len(found) == 1 else joined_results(found, shares_of_loss(parts, self._count))
