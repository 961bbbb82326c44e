"""A training step as a transaction: it is taken whole and recorded, or it leaves the model as it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.batches import count_samples, split_batch
from brimful.job import Batch, Job
from brimful.measuring import PeakMemory, peak_memory
from brimful.settings import Settings
from brimful.step import StepOutcome, copied_to, loss_weights, make_scaler, run_step
from brimful.train.buffers import BufferSnapshot
from brimful.training import StepRecord

MOST_SKIPPED_STEPS = 32
"""Steps in a row that the loss scaler may skip. Each halves the scale, 2**16 at first: it is 2**-16 by then."""


class NotFiniteStep(Exception):  # noqa: N818 - says what happened; the trainer makes an error of it
    """A step whose loss or gradient is no number; it was not taken.

    Args:
        record: The step, not updated.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        self.record = record


class Steps:
    """Takes optimizer steps on one model, one after the other.

    Args:
        job: Its loss and count.
        settings: Their micro-batch size and precision.
        model: In training mode, on the device, with the unit actions in force.
        optimizer: Over the parameters of `model`.
        scheduler: Stepped after each update.
        device: Where each micro-batch is copied to.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
    """

    def __init__(
        self,
        *,
        job: Job,
        settings: Settings,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        device: torch.device,
        max_gradient_norm: float | None,
    ) -> None:
        self._job = job
        self._settings = settings
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._device = device
        self._max_gradient_norm = max_gradient_norm
        self._move = copied_to(device)
        self._scaler = make_scaler(settings.precision, device.type)
        self._buffers = BufferSnapshot(model)
        self._skipped_in_a_row = 0
        self.taken = 0
        """Steps taken, those included that the loss scaler skipped."""
        self.updates = 0
        """Steps that changed the parameters."""
        self.peak: PeakMemory | None = None
        """What the step took whose memory was measured."""

    def take(self, batch: Batch, *, epoch: int, measure_memory: bool = False) -> StepRecord:
        """Take a step on a global batch.

        Args:
            batch: On the host, of any number of samples.
            epoch: For the record.
            measure_memory: Measure the peak memory of this step, which slows it down.

        Returns:
            What the step came to.

        Raises:
            NotFiniteStep: The loss or a gradient is NaN or infinite; parameters and buffers are as before.
            BatchError: The batch cannot be split.
            LossError: The loss is no scalar tensor or has no gradient.
        """
        self._buffers.take()
        start = time.perf_counter()
        micro_batches = split_batch(batch, self._settings.micro_batch_size)
        measuring = peak_memory(self._model, self._optimizer, self._device) if measure_memory else nullcontext()
        with measuring as peak:
            outcome = self._run(micro_batches)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        record = StepRecord(
            step=self.taken + 1,
            epoch=epoch,
            loss=float(outcome.loss),
            gradient_norm=float(outcome.gradient_norm),
            seconds=time.perf_counter() - start,
            samples=count_samples(batch),
            updated=outcome.updated,
            memory_measured=measure_memory,
        )
        self._settle(record)
        if record.updated and peak is not None:
            self.peak = peak
        return record

    def _run(self, micro_batches: list[Batch]) -> StepOutcome:
        return run_step(
            model=self._model,
            loss=self._job.loss,
            optimizer=self._optimizer,
            micro_batches=micro_batches,
            weights=loss_weights(self._job.count, micro_batches),
            precision=self._settings.precision,
            scaler=self._scaler,
            max_gradient_norm=self._max_gradient_norm,
            before_update=self._may_update,
            move=self._move,
        )

    def _may_update(self, loss: Tensor, gradient_norm: Tensor) -> bool:
        # Gradients that overflow under loss scaling are the scaler's to skip: a smaller scale mends them.
        finite_gradients = self._scaler is not None or math.isfinite(float(gradient_norm))
        return math.isfinite(float(loss)) and finite_gradients

    def _settle(self, record: StepRecord) -> None:
        """Count the step and let the schedule follow; or undo what it left behind and raise NotFiniteStep."""
        skipped_by_scaler = not record.updated and math.isfinite(record.loss) and self._scaler is not None
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped_by_scaler else 0
        if not record.updated and (not skipped_by_scaler or self._skipped_in_a_row > MOST_SKIPPED_STEPS):
            self._buffers.restore()
            raise NotFiniteStep(record)
        self._buffers.release()
        self.taken += 1
        if record.updated:
            self.updates += 1
            if self._scheduler is not None:
                self._scheduler.step()


MakeSchedule = Callable[[Optimizer], LRScheduler]
"""Makes the learning rate's schedule; it is stepped after each update, so its unit is the optimizer step."""
