"""A plan in your own training loop: one call is one optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from brimful.batches import layout_of
from brimful.errors import BrimfulError, OutOfMemoryError, PartialUpdateError, UsageError
from brimful.execution.executor import StepExecutor
from brimful.execution.explained import Expected
from brimful.execution.in_force import put_in_force
from brimful.execution.label_watch import LabelWatch, Refuse
from brimful.execution.length_watch import LengthWatch
from brimful.execution.losses import counting_parts, loss_weights
from brimful.execution.out_of_memory import RanOut, explaining
from brimful.execution.precision import device_of
from brimful.execution.retries import Retries, is_one_of_several, smaller_micro_batch
from brimful.execution.setup import limit_reserved, set_up_allocator
from brimful.execution.step import StepOutcome
from brimful.execution.transaction import StepTransaction
from brimful.job import Batch, Job
from brimful.optimizers import (
    check_dense_gradients,
    check_needs_no_closure,
    check_parameters,
)
from brimful.results import SampleSize
from brimful.settings import Settings
from brimful.torch_utils.module_names import check_runs_on_one_device

CheckBatch = Callable[[Settings, Batch], bool]
"""Checks a real batch before training on it under some settings; raises an error to refuse it. False if the
next batch is to be checked too."""


class CheckSplit(Protocol):
    """Checks that a batch may be divided further; raises an error to refuse it."""

    def __call__(self, settings: Settings, global_batch: Batch, /, *, is_split: bool) -> bool:
        """Check a batch under smaller settings; returns whether it had enough samples for the check.

        `is_split` says whether a batch in micro-batches has been checked before.
        """


class PlannedStep:
    """Runs optimizer steps under a plan's settings, on your own model and optimizer.

    Calling it with a global batch splits it into micro-batches, runs forward and backward on each under the
    plan's precision and unit actions, and makes one optimizer step. The loss and the gradients are those of the
    whole batch. Existing gradients accumulate, as in `backward`, and are cleared after the update.

    **Out of memory.** Where memory runs out before the update, the step is undone, cached memory is
    released, and the step runs again: once as before, then with smaller and smaller micro-batches, which
    stay in use. `outcome.recoveries` lists what happened. If the smallest does not fit either, or the batch
    cannot be split, or the model refuses what is smaller (BatchNorm refuses one sample), the call raises an
    error that is a `torch.OutOfMemoryError` as well, and the next call begins with the micro-batch of
    before. Under `torch.distributed` with several ranks nothing is retried, because the other ranks would
    wait.

    **Errors.** A call that raises leaves everything as before it, except `PartialUpdateError`: parameters,
    buffers, gradients, the optimizer's state, the loss scaler's, and the random numbers of Python, NumPy, torch
    and the GPU. So `try: step(batch)`, `except torch.OutOfMemoryError: continue` skips a batch and nothing
    else:

    - An update in which memory runs out is finished, and the call returns.
    - Any other error inside `optimizer.step` is undone in the first two updates of a parameter, for which
      parameters and state are copied to the host's memory. Later it is undone as long as nothing is written, as
      in a hook before the step. From then on it is a `PartialUpdateError`: load your last checkpoint.
    - So is an error with `optimizer_in_backward` or `offload_optimizer` once an update has begun, and one after
      a forward pass wrote for the first time to a parameter, or to a buffer that the first step left alone.
    - Ctrl-C, and what handlers of SIGTERM, SIGALRM and SIGCHLD raise, is delayed while the optimizer updates:
      it is raised when the step is complete.
    - What the loss function keeps to itself, such as a counter, is not restored.

    Args:
        settings: The plan's settings; their unit actions and memory format are applied to `model` until
            `remove`.
        job: Provides the loss, what it averages over, and how its batches are split; its model, weights,
            optimizer and data are not used.
        model: The model in training mode, on its device.
        optimizer: An optimizer over the parameters of `model`; it runs in the plan's implementation,
            such as fused, until `remove`.
        max_gradient_norm: Clip gradients to this norm; None does not clip.
        check: Called with each global batch that is split, before it is trained on, until it returns True.
        check_split: Called before a batch, or micro-batches, are divided because memory ran out.
        check_labels: Called with each batch that has ignored labels until it returns; not with several ranks,
            where one alone would raise.
        recover: Whether a step in which memory runs out is retried.
        planned: Sizes of the samples of the batch that was planned for; the first larger one gives a warning.
        expected: What the plan predicted: its budget limits what torch may reserve on CUDA until `remove`, and
            an out-of-memory error is compared with it.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        max_gradient_norm: float | None = None,
        check: CheckBatch | None = None,
        check_split: CheckSplit | None = None,
        check_labels: Refuse | None = None,
        recover: bool = True,
        planned: Sequence[SampleSize] = (),
        expected: Expected | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{job.name}: the plan is to be applied to an object of type {type(model).__name__}, not to an "
                "nn.Module."
            )
        check_runs_on_one_device(model, job=job.name)
        check_parameters(optimizer, model.parameters(), job=job.name)
        check_needs_no_closure(optimizer, job=job.name)
        check_dense_gradients(optimizer, model)
        name = settings.optimizer
        if name is not None and type(optimizer).__name__.lower() != name:
            warnings.warn(
                f"the plan is for the optimizer {name!r}, and the one given is {type(optimizer).__name__}. "
                "Its memory is not what the plan predicts.",
                stacklevel=5,
            )
        device = device_of(model)
        if device.type == "meta":
            raise UsageError(
                f"{job.name}: the parameters of the model are on the meta device, which holds no values. Give "
                "them some first: model.to_empty(device=…), then model.load_state_dict(…)."
            )
        self._executor = StepExecutor(
            job, settings, model, optimizer, device=device, max_gradient_norm=max_gradient_norm
        )
        self._retries = Retries(
            settings,
            device,
            Settings.describe,
            way_out="Plan for a smaller budget, or skip the batch.",
            expected=expected,
        )
        self._expected = expected
        self._layout = layout_of(job, whole=settings.rank_batch_size, expected=settings.rank_batch_size)
        self._lengths = LengthWatch(planned, self._layout)
        refuse = None if is_one_of_several() else check_labels  # each rank has a batch of its own
        self._labels = LabelWatch.of_job(job, self._layout, refuse)
        self._check = check
        """Checks the next batch that is split; None once one had enough samples for that."""
        self._is_checked = False
        self._check_split = check_split
        self._recovers = recover
        self._transaction = StepTransaction(self._executor)
        set_up_allocator(settings, device)
        self._changes = put_in_force(settings, model, optimizer)
        if expected is not None:
            self._changes.callback(limit_reserved(expected.reserved_limit_bytes, device))

    def __repr__(self) -> str:
        return f"PlannedStep({self.settings.describe()})"

    @property
    def settings(self) -> Settings:
        """The current settings: the plan's, with a smaller micro-batch after memory ran out."""
        return self._retries.how

    def __call__(self, global_batch: Batch) -> StepOutcome:
        """Train on one global batch; one with more or larger samples than planned for gives a warning.

        Args:
            global_batch: On the host; each micro-batch is copied to the model's device as it is used. A model
                on the CPU works on the batch itself.

        Returns:
            The outcome of the step, with the loss of the whole batch.

        Raises:
            BatchError: The batch cannot be split.
            EquivalenceError: Micro-batches of it are known not to train as the batch does.
            LossError: The loss is not a scalar tensor or has no gradient.
            OutOfMemoryError: Memory ran out, and no smaller micro-batch is left to try; all is as before.
            PartialUpdateError: An error was raised that could not be undone; see the class.
        """
        samples = self._layout.count(global_batch)
        if (
            samples > self.settings.rank_batch_size and not self.settings.optimizer_in_backward
        ):  # `optimizer_in_backward` refuses it
            warnings.warn(
                f"a batch has {samples} samples, and the plan is for {self.settings.rank_batch_size}: it is "
                f"split into micro-batches of {self.settings.micro_batch_size} all the same, but the step may "
                "take more memory than is predicted.",
                stacklevel=2,
            )
        if (larger := self._lengths.larger(global_batch)) is not None:
            warnings.warn(larger, stacklevel=2)
        if self._check is not None and self.settings.gradient_accumulation_steps > 1:
            if self._check(self.settings, global_batch):
                self._check, self._is_checked = None, True
        elif (ignored := self._labels.ignored(global_batch, self.settings)) is not None:
            warnings.warn(ignored, stacklevel=2)
        attempt = partial(self._transaction.run, partial(self._step, global_batch))
        if not self._recovers or is_one_of_several():
            with explaining(self._expected):
                return attempt()
        retries, before = self._retries, self.settings
        retries.recoveries = []
        outcome = retries.run(attempt, partial(self._divided_further, global_batch), self._check_unchanged)
        retries.step += 1
        if self.settings != before:
            warnings.warn(
                f"memory ran out again in a step: {retries.recoveries[-1].message}. From now on batches are "
                f"split into micro-batches of {self.settings.micro_batch_size} in place of "
                f"{before.micro_batch_size}.",
                stacklevel=2,
            )
        return replace(outcome, recoveries=tuple(retries.recoveries)) if retries.recoveries else outcome

    def _step(self, global_batch: Batch) -> StepOutcome:
        parts = self._layout.split(global_batch, self.settings.micro_batch_size)
        micro_batches, weights = counting_parts(parts, loss_weights(self._executor.job, parts))
        hooks = replace(self._transaction.hooks, synchronising=self._synchronising)
        return self._executor(micro_batches, weights, hooks=hooks)

    def _synchronising(self, is_last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch: DDP reduces the gradients of a step once, in the last one."""
        model = self._executor.model
        if is_last or not isinstance(model, DistributedDataParallel) or model.static_graph:
            return nullcontext()  # `no_sync` in the first step of a static graph ends in an error (torch 2.13)
        return model.no_sync()

    def _check_unchanged(self, _ran_out: RanOut) -> None:
        if changed := self._executor.move.changed:
            raise OutOfMemoryError(f"its loss has changed its batch in place ({', '.join(sorted(changed))})")

    def _divided_further(self, global_batch: Batch, settings: Settings) -> Settings:
        """The settings with the next smaller micro-batch, if the batch may be divided so."""
        is_split = settings.gradient_accumulation_steps > 1
        if not is_split and (reason := self._layout.why_whole(global_batch)) is not None:
            raise OutOfMemoryError(f"its batch cannot be split: {reason}")
        try:
            lowered = smaller_micro_batch(settings)
            if self._check_split is None:
                return lowered
            self._is_checked = self._check_split(lowered, global_batch, is_split=is_split and self._is_checked)
        except (OutOfMemoryError, PartialUpdateError):
            raise
        except BrimfulError as error:
            raise OutOfMemoryError(f"its batch may not be split: {error}") from error
        self._check = None if self._is_checked else partial(self._check_split, is_split=False)
        return lowered

    def loading(self) -> AbstractContextManager[object]:
        """Within, `optimizer.load_state_dict` puts the state where the plan keeps it, such as on the host."""
        return self._executor.loading()

    def remove(self) -> None:
        """Restore the model's forward and memory format, the optimizer's implementation, and torch's limit.

        Calling it again does nothing.
        """
        self._changes.close()
