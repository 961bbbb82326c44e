"""One training step: it completes, or the state stays as before.

Start reading at `StepRunner.run`. `execution/transaction.py` undoes a failed step, as in `bf.apply`;
`recovery.py` retries a step that ran out of memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from brimful.batches import layout_of
from brimful.errors import PartialUpdateError
from brimful.execution.explained import Expected
from brimful.execution.hooks import StepHooks
from brimful.execution.out_of_memory import RanOut, unless_out_of_memory, with_room
from brimful.execution.retries import Shrink
from brimful.execution.step import StepOutcome
from brimful.execution.transaction import StepTransaction
from brimful.job import Batch, Job
from brimful.profiling import PeakMemory, larger_peak, peak_memory
from brimful.results import Recovery, StepRecord
from brimful.settings import Settings
from brimful.trainer.state import TrainState
from brimful.trainer.step.batch_norm import corrected_momentum
from brimful.trainer.step.epoch_peak import EpochPeak
from brimful.trainer.step.micro_batches import split_for_rank
from brimful.trainer.step.not_finite import NotFiniteStep
from brimful.trainer.step.recovery import OomRecovery, StoreFallback
from brimful.trainer.step.schedules import learning_rate

MOST_SKIPPED_STEPS = 32
"""Steps in a row that the loss scaler may skip. Each halves the scale, 2**16 at first: it is 2**-16 by then."""


class StepRunner:
    """Runs the optimizer steps of a run, with the unit actions of its settings applied to the model.

    Each step advances the counters of `state`. `shrink` finds settings that take less memory; `on_ran_out` and
    `on_recovery` are called each time that memory ran out. `store_fallback` stores settings for the next launch
    if memory runs out on one of several ranks. `corrects_batch_norm` corrects BatchNorm's momentum under
    gradient accumulation; see `batch_norm.py`.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState,
        *,
        shrink: Shrink[Settings],
        on_recovery: Callable[[Recovery], None],
        corrects_batch_norm: bool = False,
        store_fallback: StoreFallback = lambda _after, _recovery: "",
        on_ran_out: Callable[[RanOut], None] = lambda _ran_out: None,
        expected: Expected | None = None,
    ) -> None:
        whole = state.settings.global_batch_size
        self._job = job
        self._layout = layout_of(job, whole=whole, expected=whole)
        self._state = state
        self._corrects_batch_norm = corrects_batch_norm
        self.recovery = OomRecovery(
            state,
            shrink=shrink,
            on_recovery=on_recovery,
            store_fallback=store_fallback,
            on_ran_out=on_ran_out,
            expected=expected,
        )
        """Retries what ran out of memory."""
        self._transaction = StepTransaction(
            state.executor,
            is_sharded=state.parallel.is_sharded,
            way_out=self.recovery.after_interrupted_update,
            keeps_parameters=False,
            holds_signals=False,  # the handler only sets a flag (`stop.py`), and must do so at once
        )
        self._loss_and_norm: tuple[float, float] = (math.nan, math.nan)
        """The loss and gradient norm of the current step."""
        self._terms = 0.0
        self.peak: PeakMemory | None = None
        """The highest peak of the measured steps, and of the longest batch; None before them."""
        self.epoch_peak = EpochPeak(state.device)
        """The peak of the epoch in progress."""
        self.peak_is_as_planned = True
        """Whether `peak` is of batches of the lengths that were planned."""

    def close(self) -> None:
        """Restore the model's forward and memory format, and close the connections to other ranks."""
        self.recovery.applied.remove()
        self._state.parallel.close()
        if not self._state.parallel.is_sharded:  # shards have replaced what was converted
            self._state.layout.remove()

    def run(
        self, batch: Batch, *, epoch: int, data_seconds: float = 0.0, measure_memory: bool = False
    ) -> StepRecord:
        """Run a step on a global batch, which is on the host, of any size, and the same on every rank.

        `epoch` and `data_seconds`, the time spent waiting for the batch, are for the record. `measure_memory`
        measures the peak of this step, which slows it down. Raises `NotFiniteStep` if the loss or a gradient is
        NaN or infinite, and OutOfMemoryError if no settings take less; the step is undone then. Raises
        PartialUpdateError if the update raised and could not be completed.
        """
        state = self._state
        rate = with_room(partial(learning_rate, state.optimizer), during="the learning rate is read")
        self.recovery.shrink_if_thrashing()
        record_of = partial(
            StepRecord,
            step=state.step + 1,
            epoch=epoch,
            samples=self._layout.count(batch),
            data_seconds=data_seconds,
            memory_measured=measure_memory,
            learning_rate=rate,
        )
        step = partial(self._attempt, batch, record_of, measure_memory=measure_memory)
        record, peak = self.recovery.with_retries("step", partial(self._transaction.run, step))
        self._complete(record, peak)
        return record

    def dry_run(self, batch: Batch, *, measure_memory: bool = False) -> None:
        """Check that a step on a batch fits in memory: run it and undo it; shrink the settings if it does not.

        With `measure_memory`, its peak is kept as `peak` if it is above those of the measured steps. Raises
        OutOfMemoryError if the step does not fit, and no settings take less.
        """
        step = partial(self._outcome, batch, measure_memory=measure_memory, updates=False)
        _, peak = self.recovery.with_retries("rehearsal", partial(self._transaction.run, step, keeps=False))
        self._add_peak(peak)

    def _attempt(
        self, batch: Batch, record_of: Callable[..., StepRecord], *, measure_memory: bool
    ) -> tuple[StepRecord, PeakMemory | None]:
        """Run a step once, and check that its loss and gradients are finite."""
        start = time.perf_counter()
        outcome, peak = self._outcome(batch, measure_memory=measure_memory)
        loss, gradient_norm = self._loss_and_norm
        record = record_of(
            loss=loss,
            gradient_norm=gradient_norm,
            seconds=time.perf_counter() - start,
            updated=outcome.updated,
            terms=self._terms,
        )
        is_skip = math.isfinite(loss) and self._state.executor.scaler is not None
        if not record.updated and not (is_skip and self._state.skipped_in_a_row < MOST_SKIPPED_STEPS):
            raise NotFiniteStep(record)
        return record, peak

    def _outcome(
        self, batch: Batch, *, measure_memory: bool, updates: bool = True
    ) -> tuple[StepOutcome, PeakMemory | None]:
        state = self._state
        if state.parallel.is_sharded:  # DDP broadcasts buffers itself
            state.ranks.broadcast_buffers(state.model)
        parts = split_for_rank(
            batch, self._job, self._layout, state.ranks, micro_batch_size=state.settings.micro_batch_size
        )
        self._terms = parts.terms
        measuring = self._measuring(batch) if measure_memory else nullcontext()
        forwards = len(parts.batches) if self._corrects_batch_norm else 1
        with measuring as peak, corrected_momentum(state.model, forwards):
            outcome = state.executor(parts.batches, parts.weights, hooks=self._hooks(), updates=updates)
            if state.settings.optimizer_in_backward and outcome.updated:
                self._check_gradients(outcome)
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        return outcome, peak

    def _complete(self, record: StepRecord, peak: PeakMemory | None) -> None:
        """Count a step, which can no longer be undone; after an update, step moving average and schedule."""
        state = self._state
        state.skipped_in_a_row = 0 if record.updated else state.skipped_in_a_row + 1
        state.step += 1
        if not record.updated:
            return
        state.updates += 1
        self._add_peak(peak)
        if state.average is not None:
            try:
                with_room(state.average.update, during="the average of the weights is updated")
            except PartialUpdateError:
                raise
            except Exception as error:
                raise PartialUpdateError(
                    "the average of the weights could not follow an update: "
                    f"{type(error).__name__}: {str(error).rstrip('.')}. The model is not saved. Resume from "
                    "the last save."
                ) from error
        if state.scheduler is not None:
            found = unless_out_of_memory(state.scheduler.step)  # not retried: it may have stepped in part
            if isinstance(found, RanOut):
                raise PartialUpdateError(
                    f"memory ran out in {type(state.scheduler).__name__}.step, after an update: "
                    f"{found.message}. "
                    "The learning rates may be changed in part; they are not saved. Resume from the last save."
                )

    def _add_peak(self, peak: PeakMemory | None) -> None:
        """Add the peak of a step, if it was measured, to those of the run and of the epoch."""
        if peak is not None:
            self.peak = larger_peak(self.peak, peak)
            self.epoch_peak.add(peak)

    def _hooks(self) -> StepHooks:
        parallel, hooks = self._state.parallel, self._transaction.hooks

        def before_update(loss: Tensor, gradient_norm: Tensor) -> bool:
            assert hooks.before_update is not None
            return hooks.before_update(loss, gradient_norm) and self._is_finite(loss, gradient_norm)

        return replace(
            hooks,
            before_update=before_update,
            synchronising=parallel.synchronising,
            clip=parallel.clip,
            loss=parallel.loss if self._job.embed is None else None,
        )

    def _measuring(self, batch: Batch) -> AbstractContextManager[PeakMemory]:
        state = self._state
        average = {} if state.average is None else state.average.state_dict()
        held = (*state.parallel.held_tensors(), *average.values())
        self.epoch_peak.before_reset()
        return peak_memory(state.model, state.optimizer, state.device, batch=batch, held_besides=held)

    def _is_finite(self, loss: Tensor, gradient_norm: Tensor) -> bool:
        ranks = self._state.ranks
        (total,) = ranks.all_reduce(float(loss))
        self._loss_and_norm = total / ranks.count, float(gradient_norm)
        # Under loss scaling the scaler skips gradients that overflow, and lowers the scale.
        has_scaler = self._state.executor.scaler is not None
        return math.isfinite(self._loss_and_norm[0]) and (has_scaler or math.isfinite(self._loss_and_norm[1]))

    def _check_gradients(self, outcome: StepOutcome) -> None:
        """Check the gradients of optimizer_in_backward, which have updated parameters already."""
        self._loss_and_norm = self._loss_and_norm[0], float(outcome.gradient_norm)
        if not math.isfinite(self._loss_and_norm[1]):
            raise PartialUpdateError(
                f"a gradient is NaN or infinite in step {self._state.step + 1}, and optimizer_in_backward has "
                "updated parameters with it. They are not saved. Resume from the last save, without "
                "optimizer_in_backward: then such a step is not taken."
            )
