"""A plan in a training loop of one's own: one call is one optimizer step."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer

from brimful.applying.apply import apply_units
from brimful.applying.host_update import UpdateOnHost
from brimful.applying.input_copies import copied_ahead_to
from brimful.batches import count_samples, split_batch
from brimful.coupled import check_coupled, loss_of
from brimful.job import Batch, Job
from brimful.local import set_up_allocator
from brimful.optimizers import check_gaps, set_implementation
from brimful.settings import Settings
from brimful.step import (
    StepOutcome,
    at_once,
    copied_to,
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
    whole batch.

    Args:
        settings: The plan's settings; their unit actions are applied to `model` until `remove`.
        job: Its loss and count are used; its model and optimizer are not.
        model: In training mode, on its device.
        optimizer: Over the parameters of `model`; it is carried out as the plan says, fused for instance.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_gradient_norm: float | None = None,
    ) -> None:
        check_coupled(job, settings)
        planned = settings.optimizer
        if planned is not None and type(optimizer).__name__.lower() != planned:
            warnings.warn(
                f"the plan is for the optimizer {planned!r}, and the one given is {type(optimizer).__name__}. "
                "What it takes of memory is not what the plan predicts.",
                stacklevel=3,
            )
        if settings.step_in_backward and max_gradient_norm is not None:
            raise clipped_in_backward(max_gradient_norm)
        self._in_backward = UpdateInBackward(optimizer) if settings.step_in_backward else None
        self._on_host = UpdateOnHost(optimizer) if settings.optimizer_on_host else None
        if settings.optimizer_implementation is not None:
            set_implementation(optimizer, settings.optimizer_implementation)
        check_gaps(optimizer)
        self._settings = settings
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._max_gradient_norm = max_gradient_norm
        self._scaler = make_scaler(settings.precision, device_of(model).type)
        set_up_allocator(settings, device_of(model))
        self._applied = apply_units(model, settings)

    def __call__(self, global_batch: Batch) -> StepOutcome:
        """Train on one global batch; of one with more samples than are planned for, a warning tells.

        Args:
            global_batch: On the host; each micro-batch is copied to the model's device as it is used.

        Returns:
            The loss of the whole batch and what became of the step.

        Raises:
            BatchError: The batch cannot be split.
            LossError: The loss is no scalar tensor or has no gradient.
        """
        samples = count_samples(global_batch)
        if samples > self._settings.rank_batch_size and self._in_backward is None:  # that refuses it
            warnings.warn(
                f"a batch has {samples} samples, and the plan is for {self._settings.rank_batch_size}: it is "
                f"split into micro-batches of {self._settings.micro_batch_size} all the same, but the step may "
                "take more memory than is predicted.",
                stacklevel=2,
            )
        micro_batches = split_batch(global_batch, self._settings.micro_batch_size)
        with matmul_precision(self._settings.precision):
            return run_step(
                model=self._model,
                loss=loss_of(self._job),
                optimizer=self._optimizer,
                micro_batches=micro_batches,
                weights=loss_weights(self._job.count, micro_batches),
                precision=self._settings.precision,
                scaler=self._scaler,
                max_gradient_norm=self._max_gradient_norm,
                move=copied_to(device_of(self._model)),
                begin_move=copied_ahead_to(device_of(self._model)) if self._settings.copies_ahead else None,
                carry_out=at_once if self._on_host is None else self._on_host.run,
                in_backward=self._in_backward,
            )

    def loading(self) -> AbstractContextManager[object]:
        """Within, a state that the optimizer loads comes where the plan has it, on the host perhaps."""
        return nullcontext() if self._on_host is None else self._on_host.loading()

    def remove(self) -> None:
        """Leave the model as it was before; calling it again does nothing."""
        self._applied.remove()
