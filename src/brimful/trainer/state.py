"""The state of a run: everything that its next step depends on, in one place.

A checkpoint holds `TrainState.state_dict()` beside parameters and buffers; `load_state_dict` resumes from it.
Each part saves and loads itself: optimizer, schedule, loss scaler, moving average, batch stream, random states.
To add a part, add it here and to `Checkpoint` in `storage/checkpoint.py`, which has its schema.
"""

from __future__ import annotations

import sys
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
from brimful.execution.setup import build_model, set_up_allocator
from brimful.optimizers import make_optimizer, set_implementation
from brimful.results import SelfCorrection
from brimful.settings import Settings
from brimful.trainer.data.rng import random_state_now, restore_own, seed_all
from brimful.trainer.data.stream import BatchStream
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start
from brimful.trainer.step.ema import MovingAverage, check_average_fits
from brimful.trainer.step.schedules import make_scheduler
from brimful.trainer.storage.checkpoint import Checkpoint, Rates, check_parts
from brimful.trainer.storage.restore import SAVES
from brimful.transforms import AppliedFormat, apply_memory_format


@dataclass(slots=True, kw_only=True, eq=False)
class TrainState:
    """The state of a run on one rank; `Checkpoint` describes the last four fields."""

    executor: StepExecutor
    """Runs the steps. It has the model, the optimizer and the loss scaler."""
    scheduler: LRScheduler | None
    average: MovingAverage | None
    """Exponential moving average of the parameters; None without one."""
    stream: BatchStream
    """The batches, and the position in them."""
    ranks: Ranks
    parallel: DataParallel
    """How the ranks share the model."""
    layout: AppliedFormat
    """The memory format of the model, until the run ends."""
    rates: Rates
    """Learning rates and weight decays as the job's optimizer sets them."""
    seed: int
    settings: Settings
    """The settings in force; smaller ones replace them after a step ran out of memory."""
    step: int = 0
    updates: int = 0
    skipped_in_a_row: int = 0
    self_correction: SelfCorrection | None = None

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
        """The device of the model."""
        return self.executor.device

    def state_dict(self, config: RunConfig) -> Checkpoint:
        """Return what `load_state_dict` resumes from, with this rank's shards of sharded tensors.

        Every rank must call it: it gathers the random states of all ranks.
        """
        own = self.ranks.with_room(partial(self._own_state, config), during="the state of the run is read")
        return replace(own, random=tuple(self.ranks.all_gather(random_state_now(self.device))))

    def _own_state(self, config: RunConfig) -> Checkpoint:
        scaler = self.executor.scaler
        return Checkpoint(
            step=self.step,
            updates=self.updates,
            skipped_in_a_row=self.skipped_in_a_row,
            settings=self.settings,
            self_correction=self.self_correction,
            asked_settings=config.settings,
            seed=config.options.seed,
            about=config.about,
            rates=self.rates,
            schedule=config.schedule_name,
            validations=(),
            metrics_bytes=0,
            optimizer_class=_class_of(self.optimizer),
            optimizer=self.optimizer.state_dict(),
            scheduler=None if self.scheduler is None else self.scheduler.state_dict(),
            scaler=None if scaler is None else scaler.state_dict(),
            average=None if self.average is None else self.average.state_dict(),
            **self.stream.state_dict(),
        )

    def load_state_dict(self, saved: Checkpoint) -> None:
        """Load what `state_dict` returned, of a run with the same job and settings.

        Random states are restored once the data are open.
        """
        optimizer_class = _class_of(self.optimizer)
        if saved.optimizer_class != optimizer_class:
            raise ResumeError(
                f"the saved run has the optimizer {saved.optimizer_class}, and this one "
                f"{optimizer_class}. Resume with the optimizer of the saved run."
            )
        with self.executor.loading():
            self.ranks.with_room(partial(_load_own, self, saved), during="the saved state is loaded")
        self.step, self.updates = saved.step, saved.updates
        self.skipped_in_a_row = saved.skipped_in_a_row
        self.self_correction = saved.self_correction
        restore_random = partial(
            restore_own, saved.random, self.ranks, self.device, otherwise_seed=self.seed + saved.step
        )
        self.stream.load_state_dict(saved, then=restore_random)


def whole_model(state: TrainState, run_dir: Path | None) -> nn.Module:
    """A module whose `state_dict` has the whole tensors of a run's model, to write; every rank must call it.

    Files of gathered parameters are written under `run_dir`; None gathers no parameters.
    """
    folder = run_dir / SAVES if run_dir is not None and state.ranks.is_first else None
    return state.parallel.whole_model(state.model, folder)


def seeded_model(config: RunConfig, start: Start) -> nn.Module:
    """Build the model from the seed, on the device and in training mode, the same on every rank.

    A resumed run skips the weights of the job, since those of its checkpoint replace them.
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

    The parameters of the model, the same on every rank, may become shards. Each rank draws its own random
    numbers from here on. `TrainState.load_state_dict` loads the rest of a saved state.
    """
    if ranks.rank:
        seed_all(config.options.seed, ranks.rank)  # dropout must differ between ranks
    options = config.options
    layout = with_room(
        partial(apply_memory_format, model, start.settings),
        during="the model is converted to its memory format",
    )
    parallel = data_parallel(config.job, model, start.settings, config.device, ranks)
    if parallel.is_sharded and options.ema_decay is not None:
        raise UsageError("ema_decay is not supported under FSDP2 and ZeRO. Use DDP, or no ema_decay.")
    if start.saved is not None:
        with_room(partial(start.saved.load_model, model), during="the saved weights are loaded")
    average = None
    if options.ema_decay is not None:
        plan = config.plan
        if plan is not None and plan.device_kind == config.device.type and start.saved is None:
            check_average_fits(model, plan)
        average = with_room(
            partial(MovingAverage, model, options.ema_decay), during="the average of the weights is made"
        )
    make = partial(make_optimizer, config.job, model, start.settings)
    optimizer = parallel.divided(with_room(make, during="the optimizer is made"))
    layout.follow(optimizer)
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
        layout=layout,
        rates=rates,
        seed=config.options.seed,
        settings=start.settings,
    )


def _class_of(optimizer: Optimizer) -> str:
    return type(optimizer.inner if isinstance(optimizer, ZeroOptimizer) else optimizer).__name__


def _rates(optimizer: Optimizer) -> Rates:
    """Learning rate and weight decay of each group, before a schedule changes them."""
    return tuple(
        tuple(float(group[name]) for name in ("lr", "weight_decay") if group.get(name) is not None)
        for group in optimizer.param_groups
    )


def _load_own(run: TrainState, state: Checkpoint) -> None:
    scaler = run.executor.scaler
    check_parts(state, run.optimizer, run.scheduler, scaler)
    handled = sys.exc_info()[1]
    try:
        run.optimizer.load_state_dict(divided_state(run.optimizer, state.optimizer))
        if run.scheduler is not None:
            run.scheduler.load_state_dict(state.scheduler or {})
        if scaler is not None:
            scaler.load_state_dict(state.scaler or {})
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if out_of_memory(error, handled) is not None:
            raise
        raise ResumeError(
            f"the saved state does not match this {_class_of(run.optimizer)}: {error}. Resume with "
            "the optimizer and schedule of the saved run."
        ) from error
    if run.settings.optimizer_implementation is not None:  # loading replaced it by the saved run's
        set_implementation(run.optimizer, run.settings.optimizer_implementation)
    if run.average is not None:
        run.average.load_state_dict(state.average)
