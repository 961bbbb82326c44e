"""A plan in a training loop of one's own: one call is one optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn
from torch.optim import Optimizer

from brimful.applying.apply import apply_units
from brimful.coupled import check_coupled, embeds_twice, loss_of
from brimful.errors import UsageError
from brimful.execution.host_optimizer import UpdateOnHost
from brimful.execution.prefetch import copied_ahead_to
from brimful.execution.transaction import StepTransaction
from brimful.inputs import InputMover
from brimful.job import Batch, Job
from brimful.layout import layout_of
from brimful.local import set_up_allocator
from brimful.optimizers import (
    check_dense_gradients,
    check_gaps,
    check_needs_no_closure,
    check_parameters,
    set_implementation,
)
from brimful.settings import Settings
from brimful.step import (
    StepOutcome,
    counting_parts,
    device_of,
    loss_weights,
    make_scaler,
    matmul_precision,
    run_step,
)
from brimful.updating import UpdateInBackward, clipped_in_backward


class PlannedStep:
    """Carries out a plan's settings on a model and an optimizer of one's own.

    Calling it with a global batch splits it into micro-batches, runs forward and backward on each under the
    plan's precision and unit actions, and makes one optimizer step. The loss and the gradients are those of the
    whole batch. Gradients that are there before the call are added to them, as `backward` does, and are cleared
    with them after the update.

    A call that raises, for whatever reason, leaves everything as before it: parameters, buffers, gradients, the
    optimizer's state, the loss scaler's, and the random numbers of Python, NumPy, torch and the GPU. So
    `try: step(batch)`, `except torch.OutOfMemoryError: continue` skips a batch and nothing else. In detail:

    - An update in which memory runs out is finished, and the call returns.
    - Any other error inside `optimizer.step` is undone in the first two updates of a parameter, for which
      parameters and state are copied to the host's memory. Later it is undone as long as nothing is written, as
      in a hook before the step. From then on it is a `HalfUpdatedError`: load your last checkpoint.
    - So is an error with `step_in_backward` or `optimizer_on_host` once an update has begun, and one after a
      forward pass wrote for the first time to a parameter, or to a buffer that the first step left alone.
    - Ctrl-C, and what handlers of SIGTERM and SIGALRM raise, is delayed while the optimizer updates: it is
      raised when the step is complete.
    - What the loss function keeps to itself, such as a counter, is not set back.

    Args:
        settings: The plan's settings; their unit actions are applied to `model` until `remove`.
        job: Its loss and count are used; its model and optimizer are not.
        model: In training mode, on its device.
        optimizer: Over the parameters of `model`; it is carried out as the plan says, fused for instance.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        check: Called with the first global batch before it is trained on; what it raises ends the call.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_gradient_norm: float | None = None,
        check: Callable[[Batch], None] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{job.name}: the plan is to be applied to an object of type {type(model).__name__}, not to an "
                "nn.Module."
            )
        check_coupled(job, settings)
        check_parameters(optimizer, model.parameters(), job=job.name)
        check_needs_no_closure(optimizer, job=job.name)
        check_dense_gradients(optimizer, model)
        planned = settings.optimizer
        if planned is not None and type(optimizer).__name__.lower() != planned:
            warnings.warn(
                f"the plan is for the optimizer {planned!r}, and the one given is {type(optimizer).__name__}. "
                "What it takes of memory is not what the plan predicts.",
                stacklevel=3,
            )
        if settings.step_in_backward and max_gradient_norm is not None:
            raise clipped_in_backward(max_gradient_norm)
        self._on_host = UpdateOnHost(optimizer) if settings.optimizer_on_host else None
        if settings.optimizer_implementation is not None:
            set_implementation(optimizer, settings.optimizer_implementation)
        check_gaps(optimizer)
        self._settings = settings
        self._job = job
        self._layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
        self._model = model
        self._optimizer = optimizer
        self._max_gradient_norm = max_gradient_norm
        self._check = check
        device = device_of(model)
        self._transaction = StepTransaction(
            model,
            optimizer,
            device=device,
            scaler=make_scaler(settings.precision, device.type),
            on_host=self._on_host,
        )
        self._in_backward = None
        if settings.step_in_backward:
            begin_update = self._transaction.begin_update_in_backward
            self._in_backward = UpdateInBackward(optimizer, before_first=begin_update)
        set_up_allocator(settings, device)
        self._move = InputMover.to(device)
        self._begin_move = copied_ahead_to(device) if settings.copies_ahead and device.type != "cpu" else None
        self._applied = apply_units(model, settings)

    def __call__(self, global_batch: Batch) -> StepOutcome:
        """Train on one global batch; of one with more samples than are planned for, a warning tells.

        Args:
            global_batch: On the host; each micro-batch is copied to the model's device as it is used. A model
                on the CPU works on the batch itself.

        Returns:
            The loss of the whole batch and what became of the step.

        Raises:
            BatchError: The batch cannot be split.
            LossError: The loss is no scalar tensor or has no gradient.
            HalfUpdatedError: An error was raised that could not be undone; see the class.
        """
        samples = self._layout.count(global_batch)
        if samples > self._settings.rank_batch_size and self._in_backward is None:  # that refuses it
            warnings.warn(
                f"a batch has {samples} samples, and the plan is for {self._settings.rank_batch_size}: it is "
                f"split into micro-batches of {self._settings.micro_batch_size} all the same, but the step may "
                "take more memory than is predicted.",
                stacklevel=2,
            )
        if self._check is not None:
            self._check(global_batch)
            self._check = None
        return self._transaction.run(partial(self._step, global_batch))

    def _step(self, global_batch: Batch) -> StepOutcome:
        parts = self._layout.split(global_batch, self._settings.micro_batch_size)
        micro_batches, weights = counting_parts(parts, loss_weights(self._job, parts))
        repeats = embeds_twice(self._job, micro_batches)
        with matmul_precision(self._settings.precision), self._move.one_step(repeats=repeats):
            return run_step(
                model=self._model,
                loss=loss_of(self._job),
                optimizer=self._optimizer,
                micro_batches=micro_batches,
                weights=weights,
                precision=self._settings.precision,
                scaler=self._transaction.scaler,
                max_gradient_norm=self._max_gradient_norm,
                before_update=self._transaction.before_update,
                move=self._move,
                begin_move=self._begin_move,
                carry_out=self._transaction.carry_out,
                follow_up=self._transaction.follow_up,
                in_backward=self._in_backward,
            )

    def loading(self) -> AbstractContextManager[object]:
        """Within, a state that the optimizer loads comes where the plan has it, on the host perhaps."""
        return nullcontext() if self._on_host is None else self._on_host.loading()

    def remove(self) -> None:
        """Leave the model as it was before; calling it again does nothing."""
        self._applied.remove()
