"""Builds everything that a run has before its first step, in the order that its random numbers need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from brimful.batches import layout_of
from brimful.distributed.ranks import Ranks
from brimful.job import Data
from brimful.results import EquivalenceReport
from brimful.trainer.data.batches import Batches, check_validation, find_data, refuse_single_samples
from brimful.trainer.data.stream import BatchStream
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.monitor.mfu import Utilisation
from brimful.trainer.monitor.progress import make_progress
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start, find_start, schedule_fallback
from brimful.trainer.state import TrainState, make_state, seeded_model
from brimful.trainer.step.fallback import MemoryFallback
from brimful.trainer.step.runner import StepRunner
from brimful.trainer.storage.saves import Saves
from brimful.trainer.verify import certified


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A run before its first step."""

    config: RunConfig
    ranks: Ranks
    start: Start
    data: Data
    batches: Batches
    """Of the training data."""
    utilisation: Utilisation
    certificate: EquivalenceReport | None
    state: TrainState

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if that is not known."""
        return self.config.length.total_steps(self.batches.steps_per_epoch)


def set_up_run(config: RunConfig, ranks: Ranks) -> RunContext:
    """Set up a run from its beginning or from a checkpoint: its data, model and optimizer.

    The seed decides the weights, then the random numbers of the data, which are alike on every rank; from
    there on those of the ranks differ.

    Args:
        config: What was asked.
        ranks: All of them call this together.

    Returns:
        What the run is made of.

    Raises:
        UsageError: There are no data, or they, the model or the loss are none.
        RunDirectoryError: The run directory is not empty or cannot be written to.
        ResumeError: No save is whole, or they are of another run.
        EquivalenceError: The plan does not compute what plain training does.
    """
    start = find_start(config, ranks)
    data = find_data(config.job, config.options.data)
    layout = layout_of(config.job, whole=start.settings.global_batch_size)
    batches = Batches(
        data.train,
        global_batch_size=start.settings.global_batch_size,
        seed=config.options.seed,
        layout=layout,
        device=config.device,
        warns=ranks.is_first,
    )
    if data.validation is not None:
        check_validation(data.validation, layout)
    refuse_single_samples(config.job, data, batches, start.settings.micro_batch_size)
    utilisation = Utilisation(config.plan, config.job)
    model = seeded_model(config, start)
    if ranks.is_first:
        batches.warn_small_batches(model)
    certificate = certified(model, config, ranks) if start.saved is None else None
    state = make_state(
        model,
        config,
        start,
        ranks,
        BatchStream(batches, ranks=ranks),
        total_steps=config.length.total_steps(batches.steps_per_epoch),
    )
    return RunContext(
        config=config,
        ranks=ranks,
        start=start,
        data=data,
        batches=batches,
        utilisation=utilisation,
        certificate=certificate,
        state=state,
    )


def make_logger(run: RunContext) -> RunLogger:
    """The logger of a run, which the first rank alone writes, but for saves of which each has a part."""
    config = run.config
    return RunLogger(
        run_dir=config.run_dir if run.ranks.is_first else None,
        plan=config.plan or config.settings,
        job=config.job,
        progress=make_progress(run.total_steps, show=config.shows_progress, loss_unit=config.loss_unit),
        keep_saves=config.options.keep_saves,
        may_resume=config.options.resume,
        resumed=run.start.saved,
        saves=_saves_of_parts(run),
    )


def make_runner(run: RunContext, logger: RunLogger) -> StepRunner:
    """What runs the steps, and reports to the logger where memory ran out."""
    config = run.config
    return StepRunner(
        config.job,
        run.state,
        corrects_batch_norm=config.options.correct_batch_norm,
        shrink=MemoryFallback(config.job, config.plan, config.device),
        on_recovery=logger.add_recovery,
        schedule_fallback=partial(schedule_fallback, config, run.start),
    )


def _saves_of_parts(run: RunContext) -> Saves | None:
    """Every rank's own, where each writes what it has of the model and of the optimizer's state."""
    run_dir = run.config.run_dir
    if run_dir is None or not run.state.parallel.saves_parts:
        return None
    saved = run.start.saved
    saved_step = None if saved is None else saved.step
    return Saves(run_dir, keep=run.config.options.keep_saves, ranks=run.ranks.apart(), saved_step=saved_step)
