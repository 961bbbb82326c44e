"""A training step as a transaction: it is taken whole and recorded, or it leaves the model as it was.

Where memory runs out, the step is taken back (gradients, buffers, random numbers, what the loss scaler found)
and taken again: once as before, as the memory may have been lost to garbage or to another process, then with
settings that take less. The batch is on the host still, so that the whole of it is trained on, once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.batches import layout_of
from brimful.distributed.deepspeed import ZeroOptimizer
from brimful.distributed.gather import divided_state
from brimful.distributed.ranks import ALONE, Ranks
from brimful.distributed.strategies import DataParallel
from brimful.errors import HalfUpdatedError, OutOfMemoryError, ResumeError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.executor import StepExecutor, StepHooks
from brimful.execution.out_of_memory import (
    RanOut,
    despite_out_of_memory,
    make_room,
    out_of_memory,
    unless_out_of_memory,
    with_retries,
    with_room,
)
from brimful.execution.random_state import RandomState
from brimful.execution.step import StepOutcome, counting_parts, loss_counts, shares_of
from brimful.execution.update import SurvivingUpdate, WholeUpdate
from brimful.job import Batch, Job
from brimful.optimizers import has_implementation, set_implementation
from brimful.profiling import PeakMemory, peak_memory
from brimful.results import Recovery, StepRecord
from brimful.settings import OptimizerImplementation, Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.step.batch_norm import corrected_momentum
from brimful.trainer.step.ema import MovingAverage
from brimful.trainer.step.schedules import learning_rate
from brimful.trainer.storage.checkpoint import StepState
from brimful.trainer.storage.state_checks import (
    check_optimizer_state,
    check_scaler_state,
    check_scheduler_state,
)
from brimful.transforms import apply_units

MOST_SKIPPED_STEPS = 32
"""Steps in a row that the loss scaler may skip. Each halves the scale, 2**16 at first: it is 2**-16 by then."""

THRASHING_STEPS = 3
"""Steps in a row in which the CUDA allocator gave back its cache to find memory, after which less is taken:
each such search waits for the device. A choice: one may be due to a longer batch, three in a row are a
habit."""

HandOver = Callable[[Settings, Recovery], str]

Lower = Callable[[Settings], Settings]
"""Finds settings that take less memory for the same global batch; raises OutOfMemoryError if there are none."""


class NotFiniteStep(Exception):  # noqa: N818 - says what happened; the trainer makes an error of it
    """A step whose loss or gradient is no number; it was not taken.

    Args:
        record: The step, not updated.
    """

    def __init__(self, record: StepRecord) -> None:
        super().__init__(record)
        self.record = record


class Steps:
    """Takes optimizer steps on one model, one after the other, under the unit actions of its settings.

    Args:
        job: Its loss and count.
        settings: Micro-batch size, precision and unit actions; lowered where memory runs out.
        model: In training mode, on the device, without unit actions.
        optimizer: Over the parameters of `model`.
        scheduler: Stepped after each update.
        device: Where each micro-batch is copied to.
        max_gradient_norm: Gradients are scaled down to this norm; None leaves them.
        average: Folds the parameters in after each update; None keeps no average.
        corrects_batch_norm: Let running statistics go as far in a step of several micro-batches as in one of
            one.
        lower: Finds settings that take less.
        on_recovery: Told of each time that memory ran out.
        ranks: Those that take the steps together, each with its share of every batch.
        parallel: How they share the model; None where there is one.
        hand_over: Told with which settings the next launch is to go on, where memory ran out on one of several
            ranks; returns what to tell the user of that.
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
        average: MovingAverage | None = None,
        corrects_batch_norm: bool = False,
        lower: Lower,
        on_recovery: Callable[[Recovery], None],
        ranks: Ranks = ALONE,
        parallel: DataParallel | None = None,
        hand_over: HandOver = lambda _after, _recovery: "",
    ) -> None:
        self._job = job
        self._layout = layout_of(job, whole=settings.global_batch_size, expected=settings.global_batch_size)
        self._ranks = ranks
        self._parallel = parallel or DataParallel(job)
        self._hand_over = hand_over
        self._model = model
        self._optimizer = optimizer
        inner = optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer
        self._optimizer_class = type(inner).__name__
        self._scheduler = scheduler
        self._device = device
        self._average = average
        self._corrects_batch_norm = corrects_batch_norm
        self._lower = lower
        self._on_recovery = on_recovery
        self._executor = StepExecutor(
            job,
            settings,
            model,
            optimizer,
            device=device,
            max_gradient_norm=max_gradient_norm,
        )
        self._buffers = BufferSnapshot(model)
        self._update = self._update_of(optimizer)
        self._finite: tuple[float, float] = (math.nan, math.nan)
        self._terms = 0.0
        self._is_updated = False
        self._skipped_in_a_row = 0
        self._thrashed_in_a_row = 0
        self._allocator_retries = _allocator_retries(device)
        self._applied = apply_units(model, settings)
        self.settings = settings
        """Those in force."""
        self.taken = 0
        """Steps taken, those included that the loss scaler skipped."""
        self.updates = 0
        """Steps that changed the parameters."""
        self.peak: PeakMemory | None = None
        """What the step took whose memory was measured."""

    def close(self) -> None:
        """Give the model its own forward back, and let go of the other ranks."""
        self._applied.remove()
        self._parallel.close()

    def take(
        self, batch: Batch, *, epoch: int, data_seconds: float = 0.0, measure_memory: bool = False
    ) -> StepRecord:
        """Take a step on a global batch.

        Args:
            batch: On the host, of any number of samples, the same on every rank.
            epoch: For the record.
            data_seconds: For the record: waited for the batch.
            measure_memory: Measure the peak memory of this step, which slows it down.

        Returns:
            What the step came to.

        Raises:
            NotFiniteStep: The loss or a gradient is NaN or infinite; all is as before.
            BatchError: The batch cannot be split.
            LossError: The loss is not a scalar tensor or has no gradient.
            OutOfMemoryError: Memory ran out however little was taken; parameters and buffers are as before.
            HalfUpdatedError: Memory ran out in the update, which could not be finished.
        """
        random = random_state_now(self._device)
        rate = with_room(partial(learning_rate, self._optimizer), during="the learning rate is read")
        self._heed_thrashing(random)
        seconds, outcome, peak = self._surviving(
            "step", partial(self._attempt, batch, measure_memory=measure_memory), random
        )
        loss, gradient_norm = self._finite
        record = StepRecord(
            step=self.taken + 1,
            epoch=epoch,
            loss=loss,
            gradient_norm=gradient_norm,
            seconds=seconds,
            samples=self._layout.count(batch),
            updated=outcome.updated,
            data_seconds=data_seconds,
            memory_measured=measure_memory,
            terms=self._terms,
            learning_rate=rate,
        )
        try:
            self._settle(record)
        except NotFiniteStep:
            restore_random_state(random, self._device)
            raise
        if record.updated and peak is not None:
            self.peak = peak
        return record

    def state(self) -> StepState:
        """What the next step depends on; of what is divided, this rank's parts."""
        return StepState(
            taken=self.taken,
            updates=self.updates,
            skipped_in_a_row=self._skipped_in_a_row,
            settings=self.settings,
            optimizer_class=self._optimizer_class,
            optimizer=self._optimizer.state_dict(),
            scheduler=None if self._scheduler is None else self._scheduler.state_dict(),
            scaler=None if self._executor.scaler is None else self._executor.scaler.state_dict(),
            average=None if self._average is None else self._average.state(),
        )

    def loading(self) -> AbstractContextManager[object]:
        """Within, what the optimizer loads comes where its state belongs."""
        return self._executor.loading()

    def load_state(self, state: StepState) -> None:
        """Go on from what `state` gave; random numbers are the caller's to restore.

        Args:
            state: Of a run with the same job and settings.

        Raises:
            ResumeError: It is of another optimizer, or a schedule or loss scaler is in one of the runs only.
        """
        if state.optimizer_class != self._optimizer_class:
            raise ResumeError(
                f"the saved run has the optimizer {state.optimizer_class}, and this one "
                f"{self._optimizer_class}. Resume it as it was."
            )
        self._check_parts(state)
        try:
            self._optimizer.load_state_dict(divided_state(self._optimizer, state.optimizer))
            if self._scheduler is not None:
                self._scheduler.load_state_dict(state.scheduler or {})
            if self._executor.scaler is not None:
                self._executor.scaler.load_state_dict(state.scaler or {})
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if out_of_memory(error) is not None:
                raise
            raise ResumeError(
                f"the saved state is not that of this {self._optimizer_class}: {error}. Resume with "
                "the optimizer and schedule that the run was begun with."
            ) from error
        if self.settings.optimizer_implementation is not None:  # that of the saved run came with its groups
            set_implementation(self._optimizer, self.settings.optimizer_implementation)
        if self._average is not None:
            self._average.load_state(state.average)
        self.taken, self.updates = state.taken, state.updates
        self._skipped_in_a_row = state.skipped_in_a_row

    def _check_parts(self, state: StepState) -> None:
        """Check that optimizer, schedule and loss scaler can take over what was saved of such."""
        check_optimizer_state(self._optimizer, state.optimizer)
        for name, part, saved in (
            ("scheduler", self._scheduler, state.scheduler),
            ("scaler", self._executor.scaler, state.scaler),
        ):
            if (part is None) != (saved is None):
                had, has = ("a", "none") if part is None else ("no", "one")
                raise ResumeError(
                    f"the saved run had {had} {name}, and this one has {has}. Resume it as it was."
                )
        if self._scheduler is not None and state.scheduler is not None:
            check_scheduler_state(self._scheduler, state.scheduler)
        if state.scaler is not None:
            check_scaler_state(state.scaler)

    def rehearse(self, batch: Batch) -> None:
        """See that a step on a batch fits, and take less if it does not; nothing is learned from it.

        Args:
            batch: The one that takes most memory.

        Raises:
            OutOfMemoryError: It does not fit however little is taken.
        """
        random = random_state_now(self._device)
        self._surviving("rehearsal", partial(self._attempt, batch, updates=False), random)
        self._take_back(random)

    def _surviving(
        self,
        during: str,
        attempt: Callable[[], tuple[float, StepOutcome, PeakMemory | None]],
        random: RandomState,
    ) -> tuple[float, StepOutcome, PeakMemory | None]:
        """What an attempt comes to, made again from the same random numbers, and with less, as memory runs
        out."""
        start = time.perf_counter()

        def guarded() -> tuple[float, StepOutcome, PeakMemory | None]:
            nonlocal start
            self._is_updated = False
            self._executor.move.changed = frozenset()
            start = time.perf_counter()
            try:
                return attempt()
            except BaseException as error:
                if not isinstance(error, Exception) or out_of_memory(error) is None:
                    self._undo_failed(error, random)
                raise

        def recover(ran_out: RanOut, *, is_retry: bool) -> None:
            if self._ranks.are_several:
                raise self._ended_on_one_rank(during, ran_out.message, start)
            self._recover(during, ran_out.message, start, with_less=is_retry)
            restore_random_state(random, self._device)  # planning draws batches

        return with_retries(guarded, recover, self._device, undo=partial(self._undo_out_of_memory, random))

    def _undo_failed(self, error: BaseException, random: RandomState) -> None:
        """Leave everything as before an attempt that raised, or raise HalfUpdatedError."""
        if isinstance(error, HalfUpdatedError):
            return
        if not self._is_updated:
            self._take_back(random)  # the update itself is as before, too
        elif isinstance(error, Exception):
            raise HalfUpdatedError(
                f"an error came once parameters were updated: {type(error).__name__}: {error}. They are not "
                "saved. Resume from the last save."
            ) from error

    def _undo_out_of_memory(self, random: RandomState, ran_out: RanOut) -> None:
        """Leave everything as before an attempt in which memory ran out, or raise HalfUpdatedError."""
        if self._is_updated and self.settings.step_in_backward:
            raise HalfUpdatedError(
                "memory ran out in backward, where step_in_backward had updated parameters already: "
                f"{ran_out.message}. They are not saved. Resume from the last save, with less."
            )
        if self._is_updated:
            raise HalfUpdatedError(f"memory ran out after an update, in what follows it: {ran_out.message}.")
        if changed := self._executor.move.changed:
            raise HalfUpdatedError(
                f"memory ran out in a step whose loss had changed its batch in place "
                f"({', '.join(sorted(changed))}): {ran_out.message}. The step cannot be repeated. Resume from "
                "the last save, or let the loss work on a copy."
            )
        self._take_back(random)

    def _attempt(
        self, batch: Batch, *, measure_memory: bool = False, updates: bool = True
    ) -> tuple[float, StepOutcome, PeakMemory | None]:
        """Seconds, outcome and peak of a step that may fail."""
        start = time.perf_counter()
        if self._parallel.is_sharded:  # DDP does so itself
            self._ranks.take_buffers_of_first(self._model)
        parts = self._ranks.micro_batches(batch, self.settings.micro_batch_size, self._layout)
        weights = self._weights(parts)
        micro_batches = self._without_nothing(batch, [part for part, _counts in parts], weights)
        weights = weights if self._ranks.are_several else [weight for weight in weights if weight]
        self._buffers.take()
        measuring = self._measuring(batch) if measure_memory else nullcontext()
        forwards = len(micro_batches) if self._corrects_batch_norm else 1
        with measuring as peak, corrected_momentum(self._model, forwards):
            outcome = self._executor(micro_batches, weights, hooks=self._hooks(), updates=updates)
            if self.settings.step_in_backward and outcome.updated:
                self._check_gradients(outcome)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start, outcome, peak

    def _hooks(self) -> StepHooks:
        return StepHooks(
            before_update=self._may_update,
            call_update=self._call_update,
            after_update=partial(despite_out_of_memory, device=self._device),
            before_first_update=self._begin_update,
            synchronising=self._parallel.synchronising,
            clip=self._parallel.clip,
            loss=self._parallel.loss if self._job.embed is None else None,
        )

    def _without_nothing(self, batch: Batch, micro_batches: list[Batch], weights: list[float]) -> list[Batch]:
        """The micro-batches without those that count for nothing: their mean loss is no number, even times 0.

        Where ranks run together one is not left out but runs a sample of the batch that counts.
        """
        if all(weights):
            return micro_batches
        if not self._ranks.are_several:
            return counting_parts(micro_batches, weights)[0]
        count = self._job.count
        if count is None:
            return micro_batches
        samples = (
            self._layout.take(batch, torch.tensor([index, index])) for index in range(self._layout.count(batch))
        )
        counting = next(sample for sample in samples if float(count(sample)) > 0)
        return [part if weight else counting for part, weight in zip(micro_batches, weights, strict=True)]

    def _measuring(self, batch: Batch) -> AbstractContextManager[PeakMemory]:
        held = self._parallel.held_tensors()
        return peak_memory(self._model, self._optimizer, self._device, batch=batch, held_besides=held)

    def _weights(self, parts: list[tuple[Batch, bool]]) -> list[float]:
        """Weights for the losses, such that the mean over the ranks is that of the global batch."""
        of_parts = loss_counts(self._job, [part for part, counts in parts if counts], whole=self._layout.whole)
        counts = of_parts + [0.0] * (len(parts) - len(of_parts))
        (self._terms,) = self._ranks.sum(sum(counts))
        if self._job.reduction == "sum":
            return [float(self._ranks.count * part_counts) for _part, part_counts in parts]
        return [self._ranks.count * share for share in shares_of(counts, self._terms)]

    def _may_update(self, loss: Tensor, gradient_norm: Tensor) -> bool:
        (total,) = self._ranks.sum(float(loss))
        self._finite = total / self._ranks.count, float(gradient_norm)
        # Gradients that overflow under loss scaling are the scaler's to skip: a smaller scale mends them.
        return math.isfinite(self._finite[0]) and (
            self._executor.scaler is not None or math.isfinite(self._finite[1])
        )

    def _update_of(self, optimizer: Optimizer) -> SurvivingUpdate | WholeUpdate:
        on_host = self._executor.on_host
        if on_host is not None:  # which takes no memory of the device
            way_out = "Resume from the last save, on a host with more memory."
            return WholeUpdate("parameters on the host", lambda _message: way_out, lambda: on_host.has_begun)
        if self._parallel.is_sharded:
            return WholeUpdate("divided parameters", self._out_of_an_update)
        return SurvivingUpdate(optimizer, partial(make_room, self._device))

    def _out_of_an_update(self, message: str) -> str:
        """Leave to the next launch an update without temporaries as large as all parameters."""
        before = self.settings
        for_loop = OptimizerImplementation.FOR_LOOP
        of_torch = before.optimizer_implementation is None and self._device.type == "cuda"
        if before.optimizer_implementation is not OptimizerImplementation.FOREACH and not (
            of_torch and has_implementation(self._optimizer, for_loop)
        ):
            return "Resume from the last save, on more ranks or with an optimizer that has less state."
        return self._left("update", message, replace(before, optimizer_implementation=for_loop))

    def _left(self, during: str, message: str, after: Settings, seconds: float = 0.0) -> str:
        """What to tell once the next launch is left what to go on with, memory having run out on this rank."""
        recovery = Recovery(
            step=self.taken + 1,
            during=f"{during} on rank {self._ranks.rank}",
            message=message,
            before=self.settings.describe(),
            after=after.describe(),
            seconds=seconds,
        )
        return self._hand_over(after, recovery)

    def _begin_update(self) -> None:
        """From now on nothing can be taken back."""
        self._is_updated = True

    def _check_gradients(self, outcome: StepOutcome) -> None:
        """Gradients that were used already are looked at now."""
        self._finite = self._finite[0], float(outcome.gradient_norm)
        if not math.isfinite(self._finite[1]):
            raise HalfUpdatedError(
                f"a gradient is NaN or infinite in step {self.taken + 1}, and step_in_backward has updated "
                "parameters with it. They are not saved. Resume from the last save, without step_in_backward: "
                "then such a step is not taken."
            )

    def _call_update(self, update: Callable[[], object]) -> None:
        self._update.run(update)
        self._is_updated = True

    def _take_back(self, random: RandomState) -> None:
        """Leave everything as it was before the step, if there was no update yet; or raise HalfUpdatedError, so
        that what is in the model is not saved as if it were whole."""
        with _whole_or_partial("the step could not be taken back"):
            with_room(partial(self._restore_before, random), during="the step is taken back")

    def _restore_before(self, random: RandomState) -> None:
        self._buffers.restore()
        self._optimizer.zero_grad(set_to_none=True)
        random.restore(self._device)
        self._executor.reset_scaler()

    def _recover(self, during: str, message: str, since: float, *, with_less: bool) -> None:
        """Take less if that is wanted, and tell."""
        before = self.settings
        if with_less:
            self._applied.remove()
            try:
                self.settings = self._lower(before)
            finally:
                self._applied = apply_units(self._model, self.settings)
        self._on_recovery(
            Recovery(
                step=self.taken + 1,
                during=during,
                message=message,
                before=before.describe(),
                after=self.settings.describe(),
                seconds=time.perf_counter() - since,
            )
        )

    def _ended_on_one_rank(self, during: str, message: str, since: float) -> OutOfMemoryError:
        """Leave to the next launch what to go on with."""
        after = self._lower(self.settings)
        left = self._left(during, message, after, time.perf_counter() - since)
        return OutOfMemoryError(
            f"memory ran out on rank {self._ranks.rank} of {self._ranks.count} in step {self.taken + 1}: "
            f"{message}.\n  The other ranks wait for its gradients and cannot take the step back, so this "
            f"launch ends.\n  {left}"
        )

    def _heed_thrashing(self, random: RandomState) -> None:
        """Take less where the allocator has had to search for memory in each step; if nothing does, go on."""
        retries, self._allocator_retries = self._allocator_retries, _allocator_retries(self._device)
        if self._ranks.are_several:
            return  # what one of them would lower, all would have to
        found = self._allocator_retries - retries
        self._thrashed_in_a_row = self._thrashed_in_a_row + 1 if found else 0
        if self._thrashed_in_a_row < THRASHING_STEPS:
            return
        self._thrashed_in_a_row = 0
        make_room(self._device)
        what = f"the allocator gave back its cache to find memory in each of {THRASHING_STEPS} steps"
        with suppress(OutOfMemoryError):
            self._recover("allocator", what, time.perf_counter(), with_less=True)
        restore_random_state(random, self._device)

    def _settle(self, record: StepRecord) -> None:
        """Count the step, let average and schedule follow; or undo what it left and raise NotFiniteStep."""
        skipped_by_scaler = (
            not record.updated and math.isfinite(record.loss) and self._executor.scaler is not None
        )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped_by_scaler else 0
        if not record.updated and (not skipped_by_scaler or self._skipped_in_a_row > MOST_SKIPPED_STEPS):
            with _whole_or_partial("buffers could not be restored after a step that was not taken"):
                with_room(self._buffers.restore, during="buffers are restored")
            raise NotFiniteStep(record)
        self._buffers.release()
        self.taken += 1
        if record.updated:
            self.updates += 1
            if self._average is not None:
                with _whole_or_partial("the average of the weights could not follow an update"):
                    with_room(self._average.update, during="the average of the weights is updated")
            if self._scheduler is not None:
                self._step_schedule(self._scheduler)

    def _step_schedule(self, scheduler: LRScheduler) -> None:
        """Step the schedule, which is not stepped again where memory runs out in the midst of it."""
        found = unless_out_of_memory(scheduler.step)
        if isinstance(found, RanOut):
            raise HalfUpdatedError(
                f"memory ran out in {type(scheduler).__name__}.step, after an update: {found.message}. The "
                "learning rates may be changed in part; they are not saved. Resume from the last save."
            )


@contextmanager
def _whole_or_partial(what: str) -> Iterator[None]:
    """Within, any error leaves a model that is neither as before a step nor as after it."""
    try:
        yield
    except HalfUpdatedError:
        raise
    except Exception as error:
        raise HalfUpdatedError(
            f"{what}: {type(error).__name__}: {error} The model is not saved so. Resume from the last save."
        ) from error


def _allocator_retries(device: torch.device) -> int:
    """How often the CUDA allocator has given back its cache because a device had no more memory to give."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
