"""What learns in a run: the model on its device, how ranks share it, and what updates it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from brimful.distributed.ranks import Ranks
from brimful.distributed.strategies import DataParallel, data_parallel
from brimful.errors import UsageError
from brimful.execution.out_of_memory import with_room
from brimful.execution.setup import build_model, set_up_allocator
from brimful.optimizers import make_optimizer
from brimful.trainer.data.rng import seed_all
from brimful.trainer.options import Options
from brimful.trainer.resume import Start
from brimful.trainer.step.ema import MovingAverage
from brimful.trainer.step.not_finite import has_finite_parameters
from brimful.trainer.storage.checkpoint import Rates
from brimful.trainer.storage.run_directory import SAVES


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A model in training. What is not a question of this rank is asked of all ranks at once."""

    model: nn.Module
    ranks: Ranks
    parallel: DataParallel
    """How the ranks share the model."""
    average: MovingAverage | None
    optimizer: Optimizer
    rates: Rates
    """Learning rates and weight decays that were asked for."""

    def averaged(self) -> AbstractContextManager[None]:
        """Within, the model has the average for its parameters, if one is kept."""
        return nullcontext() if self.average is None else self.average.in_place()

    def is_finite(self) -> bool:
        """Whether no rank has a parameter that is NaN or infinite."""
        check = partial(has_finite_parameters, self.model)
        return not self.ranks.any(not with_room(check, during="weights are checked for NaN and infinity"))

    def take_buffers_of_first(self) -> None:
        """Give every rank the first one's buffers; the others' are of their own samples."""
        self.ranks.take_buffers_of_first(self.model)

    def whole_model(self, run_dir: Path | None) -> nn.Module:
        """The model, or what of it can be written to `run_dir` where each rank has a part."""
        folder = run_dir / SAVES if run_dir is not None and self.ranks.is_first else None
        return self.parallel.whole_model(self.model, folder)


def seeded_model(options: Options, start: Start) -> nn.Module:
    """The model as the seed has it, on the device, in training mode; one to be loaded has no weights yet.

    Every rank's is the same, and so are its random numbers.
    """
    set_up_allocator(start.settings, options.device)
    job = options.job if start.saved is None else replace(options.job, weights=None)

    def built() -> nn.Module:
        seed_all(options.seed)
        return build_model(job).to(options.device).train()

    return with_room(built, during="the model is built")


def make_learner(model: nn.Module, options: Options, start: Start, ranks: Ranks) -> Learner:
    """Share a model among the ranks, give it what was saved, and make its optimizer.

    Args:
        model: On the device, the same on each rank; its parameters may become parts of themselves.
        options: What was asked.
        start: From where; the optimizer's saved state is left to the steps.
        ranks: All of them. Each draws random numbers of its own from here on.

    Returns:
        What the steps are taken with.

    Raises:
        UsageError: The options do not go together.
        ResumeError: The save is of another model.
    """
    if ranks.rank:
        seed_all(options.seed, ranks.rank)  # dropout is not to be the same on every rank
    decay = options.updating.ema_decay
    parallel = data_parallel(options.job, model, start.settings, options.device, ranks)
    if parallel.is_sharded and decay is not None:
        raise UsageError("ema_decay is not kept under FSDP2 and ZeRO. Leave it out, or train by DDP.")
    if start.saved is not None:
        with_room(partial(start.saved.load_model, model), during="the saved weights are loaded")
    average = None
    if decay is not None:
        average = with_room(partial(MovingAverage, model, decay), during="the average of the weights is made")
    make = partial(make_optimizer, options.job, model, start.settings)
    optimizer = parallel.divided(with_room(make, during="the optimizer is made"))
    return Learner(
        model=model,
        ranks=ranks,
        parallel=parallel,
        average=average,
        optimizer=optimizer,
        rates=_rates(optimizer),
    )


def _rates(optimizer: Optimizer) -> Rates:
    """What was asked of the learning rate and the decay, before a schedule changes it."""
    return tuple(
        tuple(float(group[name]) for name in ("lr", "weight_decay") if group.get(name) is not None)
        for group in optimizer.param_groups
    )
