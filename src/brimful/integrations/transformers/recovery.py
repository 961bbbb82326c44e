"""Out-of-memory recovery in a Transformers `Trainer`: the same step again, then with smaller micro-batches.

The trainer's calls of `training_step` are the actions of a `StepJournal`, and so is what it does with the
gradients of all micro-batches: unscaling, clipping, and taking their norm.

Checked with transformers 5.23.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from brimful.errors import OutOfMemoryError
from brimful.execution.explained import Expected
from brimful.execution.retries import Retries
from brimful.execution.step_journal import StepJournal
from brimful.integrations.transformers.batches import layout_of_trainer
from brimful.integrations.transformers.coupling import why_not_divided
from brimful.integrations.transformers.loss import (
    DividedLoss,
    items_counter,
    joined_results,
    shares_of_loss,
)
from brimful.integrations.transformers.modules import TrainerState
from brimful.results import Recovery
from brimful.torch_utils.replaced import replace_attribute


class TrainerRecovery:
    """Retries a trainer's training, evaluation and optimizer steps in which memory runs out, in one process."""

    def __init__(
        self, trainer: Trainer, micro_batch_size: int, division: DividedLoss, expected: Expected | None
    ) -> None:
        self._trainer = trainer
        self._device = torch.device(trainer.args.device)
        self._retries = Retries(micro_batch_size, self._device, "micro-batch {}".format, expected=expected)
        self._layout = layout_of_trainer(trainer)
        self._count, self._division = items_counter(trainer, self._layout), division
        self._undivided = why_not_divided(trainer)
        self._couples = False

    @property
    def recoveries(self) -> list[Recovery]:
        """Attempts of steps and evaluations that were repeated."""
        return self._retries.recoveries

    def begin(self, module: nn.Module, optimizer: Optimizer, wrapper: Any) -> Callable[[], None]:
        """Watch a trainer's steps on the module that it trains; returns a function that ends that.

        `wrapper` is Accelerate's, of the optimizer.
        """
        trainer = self._trainer
        self._couples = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())
        journal = StepJournal(
            module,
            optimizer,
            self._retries,
            why_nothing_less="it ran out twice while gradients are unscaled or clipped",
            scaler=trainer.accelerator.scaler,
            wrapper=wrapper,
            snapshot=lambda: (
                TrainerState(trainer).restore
            ),  # metrics, which actions that run again collect again
        )
        changes = ExitStack()
        changes.callback(journal.remove)
        for name, method in (
            ("training_step", self._training_step),
            ("_clip_grad_norm", self._clip_grad_norm),
            ("_get_grad_norm", self._get_grad_norm),
        ):
            own = getattr(trainer, name)
            changes.callback(replace_attribute(trainer, name, partial(method, journal, own)))
        return changes.close

    def watch_evaluation(self) -> Callable[[], None]:
        """Retry evaluation and prediction; returns what ends that."""
        own = self._trainer.prediction_step
        return replace_attribute(self._trainer, "prediction_step", partial(self._prediction_step, own))

    def _training_step(
        self,
        journal: StepJournal,
        own: Callable[..., Tensor],
        model: nn.Module,
        inputs: Any,
        *others: Any,
        **kwargs: Any,
    ) -> Tensor:
        retries = self._retries
        before, retries.step = retries.how, self._trainer.state.global_step + 1

        def action() -> Tensor:
            return self._division.train(retries.how, own, model, inputs, *others, **kwargs)

        loss = journal.run(action, shrink=partial(self._half, inputs))
        if retries.how != before:
            warnings.warn(
                f"memory ran out again in a step: {retries.recoveries[-1].message}. From now on it takes "
                f"{retries.how} samples at a time in place of {before}.",
                stacklevel=2,
            )
        return loss

    def _clip_grad_norm(self, journal: StepJournal, own: Callable[..., Any], model: nn.Module) -> Any:
        return journal.run(partial(own, model))

    def _get_grad_norm(
        self, journal: StepJournal, own: Callable[..., Any], model: nn.Module, grad_norm: Any = None
    ) -> Any:
        """The norm that clipping found; without clipping (`max_grad_norm=0`) it is taken after unscaling."""
        if grad_norm is not None:
            return own(model, grad_norm=grad_norm)
        return journal.run(partial(own, model))

    def _half(self, inputs: Any, size: int) -> int:
        """Half the micro-batch size, if micro-batches may be divided so."""
        if size == 1:
            raise OutOfMemoryError("its micro-batch is one sample already")
        if self._undivided is not None:
            raise OutOfMemoryError(f"its micro-batch is not divided: {self._undivided}")
        if self._couples:
            raise OutOfMemoryError("BatchNorm couples the samples of its micro-batch")
        if (reason := self._layout.why_whole(inputs)) is not None:
            raise OutOfMemoryError(f"its micro-batch cannot be split: {reason}")
        return size // 2

    def _prediction_step(
        self, own: Callable[..., Any], model: nn.Module, inputs: Any, *others: Any, **kwargs: Any
    ) -> Any:
        """Evaluate a batch; where memory runs out, in halves whose results are joined."""

        def most(parts: list[Any]) -> int:
            return max(map(self._layout.count, parts))

        def halves(parts: list[Any]) -> list[Any]:
            if self._undivided is not None:
                raise OutOfMemoryError(f"its batch is not divided: {self._undivided}")
            if most(parts) == 1 or self._layout.why_whole(inputs) is not None:
                raise OutOfMemoryError("it evaluates one sample already")
            return self._layout.split(inputs, -(-most(parts) // 2))

        retries = Retries(
            [inputs],
            self._device,
            lambda parts: f"batch {most(parts)}",
            step=self._trainer.state.global_step,
            during="evaluation",
        )
        try:
            found = retries.run(lambda: [own(model, part, *others, **kwargs) for part in retries.how], halves)
        finally:
            self.recoveries.extend(retries.recoveries)
        return found[0] if len(found) == 1 else joined_results(found, shares_of_loss(retries.how, self._count))
