"""Settings in force on a model and its optimizer, for a loop that runs the steps itself.

Private torch API used here: `FakeTensor` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.execution.length_watch import InputWatch
from brimful.execution.loop_recovery import LoopRecovery
from brimful.execution.precision import device_of
from brimful.execution.scaled_update import enabled
from brimful.execution.setup import set_up_allocator
from brimful.optimizers import check_gaps, kept_implementation, set_implementation
from brimful.results import Recovery, SampleSize
from brimful.settings import Precision, Settings
from brimful.transforms import apply_memory_format, apply_units

_OF_THE_STEP = ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs", "offload_parameters")
"""Settings that the step itself carries out, not the model or the optimizer."""

Result = TypeVar("Result")


class Prepared:
    """Settings in force on a model and an optimizer until `remove`; see `brimful.prepare`.

    Args:
        settings: Of a plan.
        model: The model, before or after it is wrapped.
        optimizer: An optimizer, also in the wrapper of Accelerate or Lightning; None leaves its implementation.
        scaler: The loop's loss scaler for fp16; None takes that of Accelerate's wrapper.
        watches: Watch the optimizer's steps for `retry` from now on, not from its first call.
        planned: Sizes of the samples that were planned for; the first larger input of the model in training
            gives a warning.

    Raises:
        UsageError: The settings have what only `brimful.apply` carries out.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        watches: bool = False,
        planned: Sequence[SampleSize] = (),
    ) -> None:
        found = [name for name in _OF_THE_STEP if getattr(settings, name)]
        if found or settings.parallelism.is_zero:
            what = " and ".join(found) or f"parallelism {settings.parallelism.value}"
            raise UsageError(
                f"{what} is carried out by the step of `bf.apply` or by `bf.fit`, not in a loop of your own. "
                "Plan without it."
            )
        self.settings = settings
        """The settings: divide each global batch into micro-batches of `settings.micro_batch_size`."""
        self._model, self._optimizer = model, None if optimizer is None else unwrapped(optimizer)
        self._wrapper = optimizer
        self._scaler = enabled(scaler or getattr(optimizer, "scaler", None))
        self._recovery: LoopRecovery | None = None
        if not _is_captured(model):  # an estimate leaves the process's allocator as it is
            set_up_allocator(settings, device_of(model))
        self._changes = put_in_force(settings, model, self._optimizer)
        if planned:
            watch = InputWatch(planned)
            hook = model.register_forward_pre_hook(watch.before_forward, with_kwargs=True)
            self._changes.callback(hook.remove)
        if watches and self._can_retry():
            self._watch()

    def __repr__(self) -> str:
        return f"Prepared({self.settings.describe()})"

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Steps in which memory ran out and that were taken again by `retry`."""
        return () if self._recovery is None else tuple(self._recovery.recoveries)

    def retry(self, action: Callable[..., Result], *arguments: Any) -> Result:
        """Run a part of an optimizer step; where memory runs out in it, run the step so far again.

            def forward_backward(batch):
                loss = compute_loss(model, batch) / plan.settings.gradient_accumulation_steps
                loss.backward()
                return loss.detach()

            for batch in loader:
                loss = prepared.retry(forward_backward, batch)

        brimful clears the step's gradients, restores random numbers and buffers, and runs all parts of the step
        again, once. An `optimizer.step` in which memory runs out is completed. The next call after
        `optimizer.step` or `optimizer.zero_grad` begins the next step.

        With fp16, pass the loop's scaler to `prepare`: its `unscale_`, inside an action or outside, is repeated
        with the step. Without it nothing is retried. Nor is it with several processes, which would wait for
        each other.

        Args:
            action: Runs forward and backward of a micro-batch, or clips gradients. It may run again later in
                the step: it must not change its arguments, nor depend on variables that change.
            *arguments: Of `action`: the micro-batch.

        Returns:
            What `action` returns.

        Raises:
            UsageError: `prepare` was called without an optimizer, or an action depends on variables that have
                changed.
            torch.OutOfMemoryError: Memory ran out again, or there were gradients before the step. In the former
                case model and optimizer are as before the step.
        """
        if not self._can_retry():
            return action(*arguments)
        return (self._recovery or self._watch()).run(action, *arguments)

    def remove(self) -> None:
        """Restore the model and the optimizer; calling it again does nothing."""
        self._changes.close()

    def _can_retry(self) -> bool:
        is_known = self.settings.precision is not Precision.FP16 or self._scaler is not None
        return is_known and not _is_one_of_several()

    def _watch(self) -> LoopRecovery:
        if self._optimizer is None:
            raise UsageError("retry needs the optimizer: bf.prepare(plan, model, optimizer).")
        self._recovery = LoopRecovery(
            self._model,
            self._optimizer,
            self.settings.micro_batch_size,
            scaler=self._scaler,
            wrapper=self._wrapper,
        )
        self._changes.callback(self._recovery.remove)
        return self._recovery


def put_in_force(settings: Settings, model: nn.Module, optimizer: Optimizer | None) -> ExitStack:
    """Memory format, the optimizer's implementation and unit actions; closing the stack undoes them.

    If one fails, the others are undone.
    """
    with ExitStack() as changes:
        changes.callback(apply_memory_format(model, settings, optimizer).remove)
        if optimizer is not None:
            if settings.optimizer_implementation is not None:
                changes.callback(kept_implementation(optimizer))
                set_implementation(optimizer, settings.optimizer_implementation)
            check_gaps(optimizer)
        changes.callback(apply_units(model, settings).remove)
        return changes.pop_all()


def _is_captured(model: nn.Module) -> bool:
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def _is_one_of_several() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer in the wrappers of Accelerate and Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer
