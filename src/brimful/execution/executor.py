"""One optimizer step under some settings, wired in one place for capture, measuring, verifying and training.

    Settings, Job, model, optimizer → StepExecutor(micro_batches, weights) → StepOutcome

What the callers differ in is in `StepHooks` (`hooks.py`). The algorithm of a step is `step.run_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful.batches import InputMover
from brimful.execution.coupled_loss import check_coupled, embeds_twice, loss_of
from brimful.execution.hooks import NO_HOOKS, StepHooks
from brimful.execution.host_optimizer import UpdateOnHost
from brimful.execution.precision import make_scaler, matmul_precision, no_autocast_of_caller, unused_scaler
from brimful.execution.prefetch import prefetch_to
from brimful.execution.step import StepOutcome, StepParts, run_step
from brimful.execution.update_in_backward import UpdateInBackward, clipped_in_backward
from brimful.job import Batch, Job
from brimful.settings import Settings
from brimful.transforms import batch_in_format


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """How a step moves data between host and device; None uses the device's default."""

    move: InputMover | None = None
    """Brings micro-batches to the device. Default: copies them, or on a CPU lends them."""
    prefetch: Callable[[Batch], Callable[[], Batch]] | None = None
    """With `prefetch_inputs`, starts the copy of a micro-batch. Default: on a stream of its own, on a GPU."""
    converted: Callable[[str, Tensor], None] = lambda _path, _tensor: None
    """With a `memory_format`, called with the path and the copy of each input that is converted."""
    around_host_update: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around the part of the update that an optimizer on the host runs there."""


class StepExecutor:
    """Runs optimizer steps on one model under some settings.

    Unit actions (`apply_units`) and the model's memory format (`apply_memory_format`) are the caller's to
    apply, and the batch is the caller's to split. Micro-batches are converted to the memory format here.

    Args:
        job: Provides the loss.
        settings: How the step runs.
        model: In training mode, on `device`.
        optimizer: Over parameters of the model; with `offload_optimizer` its state moves to the host.
        device: Where micro-batches are computed.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        transfers: Moves data between host and device.

    Raises:
        UsageError: The settings contradict the job, the optimizer or each other.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        device: torch.device,
        max_gradient_norm: float | None = None,
        transfers: Transfers = Transfers(),  # frozen
    ) -> None:
        check_coupled(job, settings)
        if settings.optimizer_in_backward and max_gradient_norm is not None:
            raise clipped_in_backward(max_gradient_norm)
        self.job = job
        self.settings = settings
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self._hooks = NO_HOOKS
        """Hooks of the running step; reset afterwards, because their owner holds this executor."""
        self.move = transfers.move or InputMover.to(device)
        self.scaler: GradScaler | None = make_scaler(settings.precision, device.type)
        """Loss scaler for fp16; None for other precisions."""
        self.on_host: UpdateOnHost | None = None
        if settings.offload_optimizer:
            self.on_host = UpdateOnHost(optimizer, around_host=transfers.around_host_update)
        self._max_gradient_norm = max_gradient_norm
        self._loss = loss_of(job)
        self._in_backward = UpdateInBackward(optimizer) if settings.optimizer_in_backward else None
        prefetch = transfers.prefetch
        if prefetch is None and device.type != "cpu":
            prefetch = prefetch_to(device)
        self._prefetch = prefetch if settings.prefetch_inputs else None
        self._converted = transfers.converted

    def __call__(
        self,
        micro_batches: Sequence[Batch],
        weights: Sequence[float],
        *,
        hooks: StepHooks = NO_HOOKS,
        updates: bool = True,
        last_repeats: int = 1,
    ) -> StepOutcome:
        """Run one step.

        Args:
            micro_batches: The global batch in parts, on the host.
            weights: Factors for their losses; see `losses.loss_weights`.
            hooks: What the caller adds to the step.
            updates: False runs forward and backward, and leaves parameters and optimizer state as they are.
            last_repeats: How many micro-batches the last one stands for, where nothing is truly computed.

        Returns:
            The loss of the global batch and what became of the step.

        Raises:
            LossError: The loss is not a scalar tensor or has no gradient.
            UsageError: The batch is in several parts, and parameters are to be updated in backward.
        """
        before_update = hooks.before_update
        if self._in_backward is not None:
            self._in_backward.updates = updates
            self._in_backward.before_first = hooks.before_first_update
            self._in_backward.around = hooks.around_parameter_update
        elif not updates:
            before_update = _decline
        repeats = embeds_twice(self.job, micro_batches)
        with (
            self._within(hooks),
            no_autocast_of_caller(),
            matmul_precision(self.settings.precision),
            self.move.one_step(repeats=repeats),
        ):
            return run_step(
                StepParts(
                    model=self.model,
                    loss=hooks.loss or self._loss,
                    optimizer=self.optimizer,
                    precision=self.settings.precision,
                    scaler=self.scaler,
                    max_gradient_norm=self._max_gradient_norm,
                    move=lambda micro_batch: self.in_format(self.move(micro_batch)),
                    prefetch=None
                    if self._prefetch is None
                    else partial(_begun, self._prefetch, self.in_format),
                    in_backward=self._in_backward,
                ),
                micro_batches,
                weights,
                hooks=replace(hooks, before_update=before_update, call_update=self.call_update),
                last_repeats=last_repeats,
            )

    def in_format(self, micro_batch: Batch) -> Batch:
        """A micro-batch on the device in the memory format of the settings."""
        return batch_in_format(micro_batch, self.settings.memory_format, self._converted)

    def call_update(self, update: Callable[[], object]) -> None:
        """Run `update`, which calls `optimizer.step`, on the host if the optimizer state is there."""
        self._hooks.call_update(update if self.on_host is None else partial(self.on_host.run, update))

    def loading(self) -> AbstractContextManager[object]:
        """Context in which `optimizer.load_state_dict` puts the state where the settings keep it."""
        return nullcontext() if self.on_host is None else self.on_host.loading()

    def reset_scaler(self) -> None:
        """Discard what the loss scaler recorded in a step without an update; keep its scale."""
        if self.scaler is not None:
            self.scaler = unused_scaler(self.scaler, self.device.type)

    @contextmanager
    def _within(self, hooks: StepHooks) -> Iterator[None]:
        self._hooks = hooks
        try:
            yield
        finally:
            self._hooks = NO_HOOKS
            if self._in_backward is not None:
                self._in_backward.before_first = NO_HOOKS.before_first_update
                self._in_backward.around = NO_HOOKS.around_parameter_update


def _decline(_loss: Tensor, _gradient_norm: Tensor) -> bool:
    return False


def _begun(
    prefetch: Callable[[Batch], Callable[[], Batch]], after: Callable[[Batch], Batch], micro_batch: Batch
) -> Callable[[], Batch]:
    """Start the copy of a micro-batch; returns a function that waits for the copy and applies `after` to it."""
    coming = prefetch(micro_batch)
    return lambda: after(coming())
