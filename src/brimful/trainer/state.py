"""The state of a run: everything that its next step depends on, in one place.

`TrainState.state_dict()` is what a checkpoint holds beside parameters and buffers; `load_state_dict` resumes
from it. Each part saves and loads itself: optimizer, schedule, loss scaler, moving average, batch stream,
random numbers. To add a part, add it here and to `StateDict` in `storage/checkpoint.py`, which has its schema.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from brimful.distributed.deepspeed import ZeroOptimizer
from brimful.distributed.gather import divided_state
from brimful.distributed.ranks import Ranks
from brimful.distributed.strategies import DataParallel, data_parallel
from brimful.errors import ResumeError, UsageError
from brimful.execution.executor import StepExecutor
from brimful.execution.out_of_memory import out_of_memory, with_room
from brimful.execution.random_state import RandomState
from brimful.execution.setup import build_model, set_up_allocator
from brimful.optimizers import make_optimizer, set_implementation
from brimful.settings import Settings
from brimful.trainer.data.rng import random_state_now, seed_all
from brimful.trainer.data.stream import BatchStream
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start
from brimful.trainer.step.ema import MovingAverage
from brimful.trainer.step.not_finite import has_finite_parameters
from brimful.trainer.step.schedules import make_scheduler
from brimful.trainer.storage.checkpoint import Rates, StateDict
from brimful.trainer.storage.run_directory import SAVES
from brimful.trainer.storage.state_checks import (
    check_optimizer_state,
    check_scaler_state,
    check_scheduler_state,
)


@dataclass(slots=True, kw_only=True, eq=False)
class TrainState:
    """What a run has learned and where it is. Questions about all ranks are answered collectively."""

    executor: StepExecutor
    """Runs the steps; it has the model, the optimizer and the loss scaler."""
    scheduler: LRScheduler | None
    average: MovingAverage | None
    """Exponential moving average of the parameters; None keeps none."""
    stream: BatchStream
    """The batches, and the position in them."""
    ranks: Ranks
    parallel: DataParallel
    """How the ranks share the model."""
    rates: Rates
    """Learning rates and weight decays as the job's optimizer sets them."""
    seed: int
    settings: Settings
    """Those in force: a step that ran out of memory may have lowered them."""
    step: int = 0
    """Optimizer steps taken, those included that the loss scaler skipped."""
    updates: int = 0
    """Steps that changed the parameters."""
    skipped_in_a_row: int = 0
    """Steps that the loss scaler skipped since the last update."""

    @property
    def model(self) -> nn.Module:
        """The model on its device; under FSDP2 and ZeRO each rank has a shard of it."""
        return self.executor.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer over the model's parameters."""
        return self.executor.optimizer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.executor.device

    def state_dict(self) -> StateDict:
        """What `load_state_dict` resumes from; of sharded tensors, this rank's shards.

        Gathers the random numbers of all ranks, so every rank must call it.
        """
        return self.ranks.with_room(self._own_state, during="the state of the run is read").with_random(
            self.ranks.all_gather(random_state_now(self.device))
        )

    def _own_state(self) -> StateDict:
        scaler = self.executor.scaler
        return StateDict(
            step=self.step,
            updates=self.updates,
            skipped_in_a_row=self.skipped_in_a_row,
            settings=self.settings,
            optimizer_class=self._optimizer_class,
            optimizer=self.optimizer.state_dict(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            average=None if self.average is None else self.average.state_dict(),
            data=self.stream.state_dict(),
        )

    def load_state_dict(self, state: StateDict) -> None:
        """Resume from what `state_dict` returned. Random numbers follow once the data are opened.

        Args:
            state: Of a run with the same job and settings.

        Raises:
            ResumeError: It is of another optimizer, or only one of the two runs has a schedule or loss scaler.
        """
        if state.optimizer_class != self._optimizer_class:
            raise ResumeError(
                f"the saved run has the optimizer {state.optimizer_class}, and this one "
                f"{self._optimizer_class}. Resume with the optimizer of the saved run."
            )
        with self.executor.loading():
            self.ranks.with_room(partial(self._load_own, state), during="the saved state is loaded")
        self.step, self.updates = state.step, state.updates
        self.skipped_in_a_row = state.skipped_in_a_row
        self.stream.load_state_dict(state.data, then=partial(self._restore_random, state.random, state.step))

    def _load_own(self, state: StateDict) -> None:
        scaler = self.executor.scaler
        self._check_parts(state)
        try:
            self.optimizer.load_state_dict(divided_state(self.optimizer, state.optimizer))
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state.scheduler or {})
            if scaler is not None:
                scaler.load_state_dict(state.scaler or {})
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if out_of_memory(error) is not None:
                raise
            raise ResumeError(
                f"the saved state does not match this {self._optimizer_class}: {error}. Resume with "
                "the optimizer and schedule of the saved run."
            ) from error
        if self.settings.optimizer_implementation is not None:  # the saved groups brought the saved run's
            set_implementation(self.optimizer, self.settings.optimizer_implementation)
        if self.average is not None:
            self.average.load_state_dict(state.average)

    def _check_parts(self, state: StateDict) -> None:
        """Check that optimizer, schedule and loss scaler can load what was saved of them."""
        check_optimizer_state(self.optimizer, state.optimizer)
        for name, part, saved in (
            ("scheduler", self.scheduler, state.scheduler),
            ("scaler", self.executor.scaler, state.scaler),
        ):
            if (part is None) != (saved is None):
                had, has = ("a", "none") if part is None else ("no", "one")
                raise ResumeError(
                    f"the saved run had {had} {name}, and this one has {has}. Resume it as it was."
                )
        if self.scheduler is not None and state.scheduler is not None:
            check_scheduler_state(self.scheduler, state.scheduler)
        if state.scaler is not None:
            check_scaler_state(state.scaler)

    def _restore_random(self, of_ranks: Sequence[RandomState], step: int) -> None:
        """Set this rank's random numbers to those after its last step; seed them if it had no such rank."""
        if self.ranks.count != len(of_ranks):
            warnings.warn(
                f"the run was saved by {len(of_ranks)} ranks and resumes with {self.ranks.count}: dropout "
                "draws other numbers than it would have.",
                stacklevel=2,
            )
        if self.ranks.rank >= len(of_ranks):
            seed_all(self.seed + step, self.ranks.rank)
        else:
            of_ranks[self.ranks.rank].restore(self.device)

    @property
    def _optimizer_class(self) -> str:
        optimizer = self.optimizer
        return type(optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer).__name__

    def averaged(self) -> AbstractContextManager[None]:
        """Within, the model has the moving average for its parameters, if one is kept."""
        return nullcontext() if self.average is None else self.average.in_place()

    def is_finite(self) -> bool:
        """Whether no rank has a parameter that is NaN or infinite."""
        check = partial(has_finite_parameters, self.model)
        return not self.ranks.any(not with_room(check, during="weights are checked for NaN and infinity"))

    def broadcast_buffers(self) -> None:
        """Give every rank the first one's buffers; those of the others are of their own samples."""
        self.ranks.broadcast_buffers(self.model)

    def whole_model(self, run_dir: Path | None) -> nn.Module:
        """The model, or what of it can be written to `run_dir` where each rank has a shard."""
        folder = run_dir / SAVES if run_dir is not None and self.ranks.is_first else None
        return self.parallel.whole_model(self.model, folder)


def seeded_model(config: RunConfig, start: Start) -> nn.Module:
    """The model as the seed initializes it, on the device, in training mode, the same on every rank.

    One whose weights will be loaded from a checkpoint does not load the job's own first.
    """
    set_up_allocator(start.settings, config.device)
    job = config.job if start.saved is None else replace(config.job, weights=None)

    def built() -> nn.Module:
        seed_all(config.options.seed)
        return build_model(job).to(config.device).train()

    return with_room(built, during="the model is built")


def make_state(
    model: nn.Module,
    config: RunConfig,
    start: Start,
    ranks: Ranks,
    stream: BatchStream,
    *,
    total_steps: int | None,
) -> TrainState:
    """Shard a model over the ranks, load saved weights into it, and make its optimizer and schedule.

    Args:
        model: On the device, the same on each rank; its parameters may become shards.
        config: Of the run.
        start: From where; `load_state_dict` resumes the rest of it.
        ranks: All of them. Each draws random numbers of its own from here on.
        stream: The batches.
        total_steps: Of the run, for the schedule; None if it is not known.

    Returns:
        The state before the first step.

    Raises:
        UsageError: The options contradict each other.
        ResumeError: The checkpoint is of another model.
    """
    if ranks.rank:
        seed_all(config.options.seed, ranks.rank)  # dropout must differ between ranks
    options = config.options
    parallel = data_parallel(config.job, model, start.settings, config.device, ranks)
    if parallel.is_sharded and options.ema_decay is not None:
        raise UsageError("ema_decay is not supported under FSDP2 and ZeRO. Use DDP, or no ema_decay.")
    if start.saved is not None:
        with_room(partial(start.saved.load_model, model), during="the saved weights are loaded")
    average = None
    if options.ema_decay is not None:
        average = with_room(
            partial(MovingAverage, model, options.ema_decay), during="the average of the weights is made"
        )
    make = partial(make_optimizer, config.job, model, start.settings)
    optimizer = parallel.divided(with_room(make, during="the optimizer is made"))
    rates = _rates(optimizer)
    return TrainState(
        executor=StepExecutor(
            config.job,
            start.settings,
            model,
            optimizer,
            device=config.device,
            max_gradient_norm=options.max_gradient_norm,
        ),
        scheduler=make_scheduler(options.schedule, optimizer, total_steps),
        average=average,
        stream=stream,
        ranks=ranks,
        parallel=parallel,
        rates=rates,
        seed=config.options.seed,
        settings=start.settings,
    )


def _rates(optimizer: Optimizer) -> Rates:
    """Learning rate and weight decay of each group, before a schedule changes them."""
    return tuple(
        tuple(float(group[name]) for name in ("lr", "weight_decay") if group.get(name) is not None)
        for group in optimizer.param_groups
    )
