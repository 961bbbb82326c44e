"""A plan in force on a Transformers `Trainer`, and predicted beside measured at its end.

Checked with transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from brimful.errors import UsageError
from brimful.execution.explained import Expected
from brimful.execution.in_force import Prepared, unwrapped
from brimful.execution.out_of_memory import explaining
from brimful.integrations.transformers.batches import layout_of_trainer
from brimful.integrations.transformers.coupling import why_not_divided
from brimful.integrations.transformers.loss import DividedLoss
from brimful.integrations.transformers.modules import trained_module
from brimful.integrations.transformers.recovery import TrainerRecovery
from brimful.integrations.transformers.sharding import parallelism_of, reduce_each_micro_batch, shards
from brimful.integrations.transformers.trainer_job import (
    check_first_division,
    effective_batch_size,
    find_use_of_count,
    precision_of,
)
from brimful.planner import Plan
from brimful.results import Recovery
from brimful.torch_utils.replaced import replace_attribute
from brimful.utils.quantities import format_bytes, format_seconds

_WARM_STEPS = 2
"""Steps that are not timed: the allocator and libraries set themselves up in them."""


class AppliedPlan(TrainerCallback):
    """A plan in force on a trainer; see `integrations.transformers.apply`."""

    def __init__(self, plan: Plan, trainer: Trainer, *, recovers: bool, reports: bool, verifies: bool) -> None:
        _check_for(plan, trainer)
        self.plan = plan
        self.step_seconds: list[float] = []
        """Measured duration of each optimizer step, without loading data."""
        self.peak_allocated_bytes = 0
        """Highest measured peak of a step on a GPU; 0 on a CPU, where it is not measured."""
        self._trainer = trainer
        self._reports = reports
        self._began = 0.0
        self._on_cuda = torch.device(trainer.args.device).type == "cuda"
        layout, size = layout_of_trainer(trainer), plan.settings.micro_batch_size
        find_use_of_count(trainer)
        check = (
            partial(check_first_division, trainer, plan.settings) if verifies and not shards(trainer) else None
        )
        self._division = DividedLoss(trainer, layout, check)
        self._recovery: TrainerRecovery | None = None
        self._in_training, self._until_removed = ExitStack(), ExitStack()
        if recovers and trainer.args.world_size == 1:
            self._recovery = TrainerRecovery(trainer, size, self._division, Expected.of(plan))
            self._until_removed.callback(self._recovery.watch_evaluation())
        self._until_removed.callback(reduce_each_micro_batch(trainer))
        self._until_removed.callback(self._ending_with_errors())
        trainer.add_callback(self)
        self._until_removed.callback(trainer.remove_callback, self)

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Attempts of steps that were repeated: memory ran out, or a smaller micro-batch was refused."""
        return () if self._recovery is None else tuple(self._recovery.recoveries)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the plan's actions in force on the model and the optimizer that training begins with."""
        self._in_training.close()
        settings, wrapper, model = self.plan.settings, kwargs["optimizer"], kwargs["model"]
        _disable_cache(model, self._trainer)
        module, optimizer = trained_module(self._trainer, model), unwrapped(wrapper)
        with ExitStack() as changes:
            prepared = Prepared(
                settings,
                module,
                optimizer,
                planned=self.plan.sample_sizes,
                expected=Expected.of(self.plan),
            )
            changes.callback(prepared.remove)
            if self._recovery is not None:
                changes.callback(self._recovery.begin(module, optimizer, wrapper))
            else:
                own = self._trainer.training_step
                train = partial(self._division.train, settings.micro_batch_size, own)
                explained = explaining(Expected.of(self.plan))(train)
                changes.callback(replace_attribute(self._trainer, "training_step", explained))
            self._in_training = changes.pop_all()

    def _ending_with_errors(self) -> Callable[[], None]:
        """Undo `on_train_begin` where training raises, too; returns what ends that."""
        own = self._trainer._inner_training_loop

        @wraps(own)
        def trains(*args: Any, **named: Any) -> Any:
            try:
                return own(*args, **named)
            finally:
                self._in_training.close()

        return replace_attribute(self._trainer, "_inner_training_loop", trains)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure a step."""
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the time and the peak of a step."""
        if self._on_cuda:
            torch.cuda.synchronize()
            self.peak_allocated_bytes = max(self.peak_allocated_bytes, torch.cuda.max_memory_allocated())
        self.step_seconds.append(time.perf_counter() - self._began)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Undo `on_train_begin`; print the report on the first process, if one was requested."""
        self._in_training.close()
        if self._reports and self._trainer.is_world_process_zero():
            print(self.report_text())

    def remove(self) -> None:
        """Restore the trainer's own training loop."""
        self._in_training.close()
        self._until_removed.close()

    def report_text(self) -> str:
        """Predicted beside measured, in a few lines."""
        plan, timed = self.plan, self.step_seconds[_WARM_STEPS:]
        lines = [f"brimful: {plan.settings.describe()}"]
        peak = format_bytes(self.peak_allocated_bytes) if self.peak_allocated_bytes else "not measured on a CPU"
        lines.append(f"  peak memory  {format_bytes(plan.predicted_peak_allocated_bytes)} predicted, {peak}")
        if timed:
            measured = statistics.median(timed)
            lines.append(
                f"  step         {format_seconds(plan.predicted_step_seconds)} predicted, "
                f"{format_seconds(measured)} measured (median of {len(timed)})"
            )
        if self.recoveries:
            last = self.recoveries[-1]
            lines.append(
                f"  memory ran out, and steps were repeated {len(self.recoveries)} times; last in "
                f"{last.during} {last.step}: {last.before}, then {last.after}"
            )
        return "\n".join(lines)


def _disable_cache(model: nn.Module, trainer: Trainer) -> None:
    """Set the model's `use_cache` to that of the arguments, as the trainer does for all but `model_init`.

    A cache of keys and values would be filled a second time by a recomputation.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = trainer.args.use_cache


def _check_for(plan: Plan, trainer: Trainer) -> None:
    """Refuse a plan for another job than the trainer's."""
    settings, wanted = plan.settings, effective_batch_size(trainer)
    planned = settings.micro_batch_size * settings.gradient_accumulation_steps * settings.world_size
    if planned != wanted or settings.world_size != trainer.args.world_size:
        raise UsageError(
            f"the plan is for {planned} samples a step on {settings.world_size} processes, and the trainer has "
            f"{wanted} on {trainer.args.world_size}. Plan again: `plan(trainer, …)`."
        )
    own = parallelism_of(trainer)
    if (settings.world_size > 1 or shards(trainer)) and settings.parallelism is not own:
        raise UsageError(
            f"the plan is for {settings.parallelism.value}, and the trainer's processes train by {own.value}. "
            "Plan again: `plan(trainer, …)`."
        )
    reason, size = why_not_divided(trainer), trainer.args.train_batch_size
    if reason is not None and settings.micro_batch_size != size:
        raise UsageError(
            f"the plan runs {settings.micro_batch_size} samples at a time, and the trainer has "
            f"per_device_train_batch_size={size}, which must stay: {reason} Plan again: `plan(trainer, …)`."
        )
    if settings.micro_batch_size > size:
        raise UsageError(
            f"the plan runs {settings.micro_batch_size} samples at a time, and the trainer's batches have "
            f"{size}: a plan divides them, and joins none. Plan again: `plan(trainer, …)`."
        )
    if settings.precision.value != precision_of(trainer):
        raise UsageError(
            f"the plan is for {settings.precision.value}, and the trainer's arguments for "
            f"{precision_of(trainer)}. Plan again: `plan(trainer, …)`."
        )
    if settings.optimizer is not None or settings.offload_optimizer or settings.optimizer_in_backward:
        raise UsageError(
            f"a trainer cannot carry out {settings.describe()}: it makes and steps its own optimizer. Plan "
            "with `plan(trainer, …)`."
        )
