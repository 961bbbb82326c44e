"""One training step: it completes and is recorded, or it leaves everything as it was.

`StepRunner.run` is the page to read. A failed step is undone by `execution/transaction.py`, as in `bf.apply`;
`recovery.py` says what happens when memory runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from brimful.batches import layout_of
from brimful.errors import PartialUpdateError
from brimful.execution.hooks import StepHooks
from brimful.execution.losses import counting_parts, loss_counts, shares_of
from brimful.execution.out_of_memory import RanOut, unless_out_of_memory, with_room
from brimful.execution.step import StepOutcome
from brimful.execution.transaction import StepTransaction
from brimful.job import Batch, Job
from brimful.profiling import PeakMemory, peak_memory
from brimful.results import Recovery, StepRecord
from brimful.trainer.state import TrainState
from brimful.trainer.step.batch_norm import corrected_momentum
from brimful.trainer.step.recovery import OomRecovery, ScheduleFallback, Shrink, update_of
from brimful.trainer.step.schedules import learning_rate
from brimful.transforms import apply_units

MOST_SKIPPED_STEPS = 32
"""Steps in a row that the loss scaler may skip. Each halves the scale, 2**16 at first: it is 2**-16 by then."""


class NotFiniteStep(Exception):  # noqa: N818 - says what happened; the trainer makes an error of it
    """A step whose loss or gradient is NaN or infinite; it was undone.

    Args:
        record: The step, not updated.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        self.record = record


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What a step came to that can still be undone."""

    record: StepRecord
    skipped_in_a_row: int
    peak: PeakMemory | None


class StepRunner:
    """Runs the optimizer steps of a run, one after the other, under the unit actions of its settings.

    Args:
        job: Its loss and count.
        state: Model, optimizer and counters, which each step advances.
        shrink: Finds settings that take less memory.
        on_recovery: Called each time that memory ran out.
        corrects_batch_norm: Update running statistics in a step of several micro-batches as far as in a step of
            one.
        schedule_fallback: Called with the settings for the next launch, where memory ran out on one of several
            ranks; returns what the error says about it.
    """

    def __init__(
        self,
        job: Job,
        state: TrainState,
        *,
        shrink: Shrink,
        on_recovery: Callable[[Recovery], None],
        corrects_batch_norm: bool = False,
        schedule_fallback: ScheduleFallback = lambda _after, _recovery: "",
    ) -> None:
        whole = state.settings.global_batch_size
        self._job = job
        self._layout = layout_of(job, whole=whole, expected=whole)
        self._state = state
        self._corrects_batch_norm = corrects_batch_norm
        self._recovery = OomRecovery(
            state,
            apply_units(state.model, state.settings),
            shrink=shrink,
            on_recovery=on_recovery,
            schedule_fallback=schedule_fallback,
        )
        self._transaction = StepTransaction(
            state.executor,
            update=update_of(state, self._recovery),
            keeps_parameters=False,
            holds_signals=False,  # the first only sets a flag (`stop.py`), and must do so at once
        )
        self._finite: tuple[float, float] = (math.nan, math.nan)
        """Loss and gradient norm of the step that is running."""
        self._terms = 0.0
        self.peak: PeakMemory | None = None
        """Of the step whose memory was measured."""

    def close(self) -> None:
        """Remove the unit actions from the model, and the connections to other ranks."""
        self._recovery.applied.remove()
        self._state.parallel.close()

    def run(
        self, batch: Batch, *, epoch: int, data_seconds: float = 0.0, measure_memory: bool = False
    ) -> StepRecord:
        """Run a step on a global batch.

        Args:
            batch: On the host, of any number of samples, the same on every rank.
            epoch: For the record.
            data_seconds: For the record: time spent waiting for the batch.
            measure_memory: Measure the peak memory of this step, which slows it down.

        Returns:
            The record of the step.

        Raises:
            NotFiniteStep: The loss or a gradient is NaN or infinite; all is as before.
            BatchError: The batch cannot be split.
            LossError: The loss is not a scalar tensor or has no gradient.
            OutOfMemoryError: Memory ran out, and nothing that takes less is left to try; all is as before.
            PartialUpdateError: An error was raised in the update, which could not be completed.
        """
        state = self._state
        rate = with_room(partial(learning_rate, state.optimizer), during="the learning rate is read")
        self._recovery.shrink_if_thrashing()
        unfinished = StepRecord(
            step=state.step + 1,
            epoch=epoch,
            loss=math.nan,
            gradient_norm=math.nan,
            seconds=0.0,
            samples=self._layout.count(batch),
            updated=False,
            data_seconds=data_seconds,
            memory_measured=measure_memory,
            learning_rate=rate,
        )
        step = partial(self._attempt, batch, unfinished)
        done = self._recovery.with_retries("step", partial(self._transaction.run, step))
        self._complete(done)
        return done.record

    def dry_run(self, batch: Batch) -> None:
        """Check that a step on a batch fits in memory, and shrink the settings if it does not; then undo it.

        Args:
            batch: The one that takes most memory.

        Raises:
            OutOfMemoryError: It does not fit, and nothing that takes less is left to try.
        """
        step = partial(self._outcome, batch, measure_memory=False, updates=False)
        self._recovery.with_retries("rehearsal", partial(self._transaction.dry_run, step))

    def _attempt(self, batch: Batch, unfinished: StepRecord) -> _Attempt:
        """Run a step that may fail, and check that its loss and gradients are finite."""
        start = time.perf_counter()
        outcome, peak = self._outcome(batch, measure_memory=unfinished.memory_measured)
        loss, gradient_norm = self._finite
        record = replace(
            unfinished,
            loss=loss,
            gradient_norm=gradient_norm,
            seconds=time.perf_counter() - start,
            updated=outcome.updated,
            terms=self._terms,
        )
        has_scaler = self._state.executor.scaler is not None
        is_skip = not record.updated and math.isfinite(loss) and has_scaler
        skipped = self._state.skipped_in_a_row + 1 if is_skip else 0
        if not record.updated and (not is_skip or skipped > MOST_SKIPPED_STEPS):
            raise NotFiniteStep(record)
        return _Attempt(record=record, skipped_in_a_row=skipped, peak=peak)

    def _outcome(
        self, batch: Batch, *, measure_memory: bool, updates: bool = True
    ) -> tuple[StepOutcome, PeakMemory | None]:
        state = self._state
        if state.parallel.is_sharded:  # DDP broadcasts them itself
            state.broadcast_buffers()
        micro_batches, weights = self._micro_batches(batch)
        measuring = self._measuring(batch) if measure_memory else nullcontext()
        forwards = len(micro_batches) if self._corrects_batch_norm else 1
        with measuring as peak, corrected_momentum(state.model, forwards):
            outcome = state.executor(micro_batches, weights, hooks=self._hooks(), updates=updates)
            if state.settings.optimizer_in_backward and outcome.updated:
                self._check_gradients(outcome)
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
        return outcome, peak

    def _complete(self, done: _Attempt) -> None:
        """Count a step that can no longer be undone; average and schedule follow an update."""
        state, record = self._state, done.record
        state.skipped_in_a_row = done.skipped_in_a_row
        state.step += 1
        if not record.updated:
            return
        state.updates += 1
        if done.peak is not None:
            self.peak = done.peak
        if state.average is not None:
            with _partial_update("the average of the weights could not follow an update"):
                with_room(state.average.update, during="the average of the weights is updated")
        if state.scheduler is not None:
            found = unless_out_of_memory(state.scheduler.step)  # not called again: it may be stepped in part
            if isinstance(found, RanOut):
                raise PartialUpdateError(
                    f"memory ran out in {type(state.scheduler).__name__}.step, after an update: "
                    f"{found.message}. "
                    "The learning rates may be changed in part; they are not saved. Resume from the last save."
                )

    def _hooks(self) -> StepHooks:
        parallel, hooks = self._state.parallel, self._transaction.hooks

        def before_update(loss: Tensor, gradient_norm: Tensor) -> bool:
            assert hooks.before_update is not None
            return hooks.before_update(loss, gradient_norm) and self._is_finite(loss, gradient_norm)

        return StepHooks(
            before_update=before_update,
            call_update=hooks.call_update,
            after_update=hooks.after_update,
            before_first_update=hooks.before_first_update,
            synchronising=parallel.synchronising,
            clip=parallel.clip,
            loss=parallel.loss if self._job.embed is None else None,
        )

    def _micro_batches(self, batch: Batch) -> tuple[list[Batch], list[float]]:
        """This rank's micro-batches with the weights of their losses, without those that count for nothing.

        The mean loss of such is NaN, even times 0. All ranks must run the same number of micro-batches, so with
        several ranks it is replaced by one with a sample of the batch that counts.
        """
        ranks = self._state.ranks
        parts = ranks.micro_batches(batch, self._state.settings.micro_batch_size, self._layout)
        weights = self._weights(parts)
        micro_batches = [part for part, _counts in parts]
        if all(weights):
            return micro_batches, weights
        if not ranks.is_distributed:
            return counting_parts(micro_batches, weights)
        count = self._job.count
        if count is None:
            return micro_batches, weights
        samples = (
            self._layout.take(batch, torch.tensor([index, index])) for index in range(self._layout.count(batch))
        )
        counting = next(sample for sample in samples if float(count(sample)) > 0)
        pairs = zip(micro_batches, weights, strict=True)
        return [part if weight else counting for part, weight in pairs], weights

    def _weights(self, parts: list[tuple[Batch, bool]]) -> list[float]:
        """Weights for the losses, such that the mean over the ranks is that of the global batch."""
        ranks = self._state.ranks
        of_parts = loss_counts(self._job, [part for part, counts in parts if counts], whole=self._layout.whole)
        counts = of_parts + [0.0] * (len(parts) - len(of_parts))
        (self._terms,) = ranks.all_reduce(sum(counts))
        if self._job.reduction == "sum":
            return [float(ranks.count * part_counts) for _part, part_counts in parts]
        return [ranks.count * share for share in shares_of(counts, self._terms)]

    def _measuring(self, batch: Batch) -> AbstractContextManager[PeakMemory]:
        state = self._state
        held = state.parallel.held_tensors()
        return peak_memory(state.model, state.optimizer, state.device, batch=batch, held_besides=held)

    def _is_finite(self, loss: Tensor, gradient_norm: Tensor) -> bool:
        ranks = self._state.ranks
        (total,) = ranks.all_reduce(float(loss))
        self._finite = total / ranks.count, float(gradient_norm)
        # Gradients that overflow under loss scaling are the scaler's to skip: it then lowers the scale.
        has_scaler = self._state.executor.scaler is not None
        return math.isfinite(self._finite[0]) and (has_scaler or math.isfinite(self._finite[1]))

    def _check_gradients(self, outcome: StepOutcome) -> None:
        """Check gradients that were used already."""
        self._finite = self._finite[0], float(outcome.gradient_norm)
        if not math.isfinite(self._finite[1]):
            raise PartialUpdateError(
                f"a gradient is NaN or infinite in step {self._state.step + 1}, and optimizer_in_backward has "
                "updated parameters with it. They are not saved. Resume from the last save, without "
                "optimizer_in_backward: then such a step is not taken."
            )


@contextmanager
def _partial_update(what: str) -> Iterator[None]:
    """Within, any error leaves a model that is neither as before a step nor as after it."""
    try:
        yield
    except PartialUpdateError:
        raise
    except Exception as error:
        raise PartialUpdateError(
            f"{what}: {type(error).__name__}: {error} The model is not saved so. Resume from the last save."
        ) from error
