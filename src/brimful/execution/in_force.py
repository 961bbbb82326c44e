"""Settings in force on a model and its optimizer, for a loop that runs the steps itself.

Private torch API used here: `FakeTensor`, and the mark of a scheduled optimizer (checked: torch 2.13).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful.batches import BatchLayout
from brimful.errors import BatchError, UsageError
from brimful.execution.explained import Expected
from brimful.execution.label_watch import LabelWatch
from brimful.execution.length_watch import InputWatch
from brimful.execution.losses import shares_of
from brimful.execution.out_of_memory import explaining
from brimful.execution.precision import device_of
from brimful.execution.retries import Retries, is_one_of_several
from brimful.execution.scaled_update import enabled
from brimful.execution.setup import limit_reserved, set_up_allocator
from brimful.execution.step_journal import StepJournal
from brimful.job import Batch
from brimful.optimizers import check_gaps, kept_implementation, set_implementation
from brimful.results import Recovery, SampleSize
from brimful.settings import Precision, Settings
from brimful.transforms import apply_memory_format, apply_units

_OF_THE_STEP = ("offload_optimizer", "optimizer_in_backward", "prefetch_inputs", "offload_parameters")
"""Settings that the step itself carries out, not the model or the optimizer."""

_SCHEDULED = "_wrapped_by_lr_sched"
"""Attribute of the `step` of an optimizer that has a schedule (torch 2.13, `LRScheduler.__init__`)."""

Result = TypeVar("Result")


class Prepared:
    """Settings in force on a model and an optimizer until `remove`; see `brimful.prepare`.

    Args:
        settings: Of a plan.
        model: The model, before or after it is wrapped.
        optimizer: An optimizer, also in the wrapper of Accelerate or Lightning; None leaves its implementation.
        scaler: The loop's loss scaler for fp16; None takes that of Accelerate's wrapper.
        watches: Watch the optimizer's steps for `retry` from now on, not from its first call.
        warns_of_schedules: Warn of a learning-rate schedule whose steps may be counted in micro-batches.
        planned: Sizes of the samples that were planned for; the first larger input of the model in training
            gives a warning.
        expected: What the plan predicted; see `PlannedStep`.

    Raises:
        UsageError: The settings have what only `brimful.apply` carries out.
    """

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizer: Optimizer | HoldsOptimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        watches: bool = False,
        warns_of_schedules: bool = False,
        planned: Sequence[SampleSize] = (),
        expected: Expected | None = None,
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
        self._journal: StepJournal | None = None
        self._expected = expected
        if not _is_captured(model):  # an estimate leaves the process's allocator as it is
            set_up_allocator(settings, device_of(model))
        self._changes = put_in_force(settings, model, self._optimizer)
        if expected is not None and not _is_captured(model):
            self._changes.callback(limit_reserved(expected.reserved_limit_bytes, device_of(model)))
        self._has_divided = False
        self._layout = BatchLayout(expected=settings.rank_batch_size)
        self._labels = LabelWatch(self._layout, counts_by="micro_batches(batch, count={count})")
        if warns_of_schedules and settings.gradient_accumulation_steps > 1 and self._optimizer is not None:
            before_first = self._optimizer.register_step_pre_hook(lambda *_: self._warn_of_schedule())
            self._ends_warning = before_first.remove
            self._changes.callback(self._ends_warning)
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
        return () if self._journal is None else tuple(self._journal.retries.recoveries)

    def micro_batches(
        self, batch: Batch, *, count: Callable[[Batch], Tensor | float] | None = None
    ) -> Iterator[tuple[Batch, float]]:
        """Divide a batch of your loader into the plan's micro-batches::

            for batch in loader:  # of as many samples as a step has
                for part, share in prepared.micro_batches(batch):
                    (compute_loss(model, part) * share).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        The loader stays as it is, so its length is the number of steps, and schedules are those of the loop
        without a plan. A smaller last batch is one step too.

        Args:
            batch: Nested tensors with samples in their first dimension.
            count: Counts what the loss is a mean over, such as labels that are not ignored. Default: samples;
                the first batch with labels of -100 gives a warning.

        Yields:
            Each micro-batch, and its share in the mean loss of the batch.

        Raises:
            BatchError: The batch cannot be divided, or there is nothing that counts.
        """
        if count is not None and not callable(count):
            raise UsageError(f"count is {count!r}; it must be a function of the batch, or None.")
        self._has_divided = True
        layout = self._layout
        if self.settings.gradient_accumulation_steps > 1 and (reason := layout.why_whole(batch)) is not None:
            raise BatchError(f"the batch cannot be divided into micro-batches: {reason}")
        if count is None and (ignored := self._labels.ignored(batch, self.settings)) is not None:
            warnings.warn(ignored, stacklevel=2)
        parts = layout.split(batch, self.settings.micro_batch_size)
        counts = [float((count or layout.count)(part)) for part in parts]
        for part, share in zip(parts, shares_of(counts, sum(counts)), strict=True):
            if share:
                yield part, share

    def _warn_of_schedule(self) -> None:
        """Before the first update, warn how a schedule counts steps, unless `micro_batches` is in use."""
        self._ends_warning()
        if self._has_divided or not hasattr(self._optimizer.step, _SCHEDULED):  # type: ignore[union-attr]
            return
        parts = self.settings.gradient_accumulation_steps
        warnings.warn(
            f"a learning-rate schedule is attached to the optimizer, and the plan makes a step of {parts} "
            f"micro-batches. A loader of micro-batches is {parts} times as long as the number of steps: a "
            f"schedule built of len(loader) runs {parts} times too slowly, and one stepped after each "
            f"micro-batch {parts} times too fast. Let the loader give the batches of a step, and divide them "
            "by `for part, share in prepared.micro_batches(batch)`. Or build the schedule of "
            f"len(loader) // {parts}, and step it after optimizer.step().",
            stacklevel=2,
        )

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
            with explaining(self._expected):
                return action(*arguments)
        return (self._journal or self._watch()).run(action, *arguments)

    def remove(self) -> None:
        """Restore the model and the optimizer; calling it again does nothing."""
        self._changes.close()

    def _can_retry(self) -> bool:
        is_known = self.settings.precision is not Precision.FP16 or self._scaler is not None
        return is_known and not is_one_of_several()

    def _watch(self) -> StepJournal:
        if self._optimizer is None:
            raise UsageError("retry needs the optimizer: bf.prepare(plan, model, optimizer).")
        self._journal = StepJournal(
            self._model,
            self._optimizer,
            Retries(
                self.settings.micro_batch_size,
                device_of(self._model),
                "micro-batch {}".format,
                way_out="Plan for a smaller budget, or use `bf.apply`, which divides the micro-batch.",
                expected=self._expected,
            ),
            why_nothing_less="the loop divides its batches itself",
            scaler=self._scaler,
            wrapper=self._wrapper,
        )
        self._changes.callback(self._journal.remove)
        return self._journal


def put_in_force(settings: Settings, model: nn.Module, optimizer: Optimizer | None) -> ExitStack:
    """Put memory format, optimizer implementation and unit actions in force; closing the stack undoes them.

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


@runtime_checkable
class HoldsOptimizer(Protocol):
    """An optimizer in a wrapper of Accelerate or Lightning."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, or the next wrapper."""


def unwrapped(optimizer: Optimizer | HoldsOptimizer) -> Optimizer:
    """The optimizer inside of the wrappers of Accelerate and Lightning."""
    found: Any = optimizer
    while isinstance(inner := getattr(found, "optimizer", None), Optimizer):
        found = inner
    return found
