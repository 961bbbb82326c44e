"""Sets up a run, in the order in which its parts draw random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from brimful.batches import layout_of
from brimful.distributed.ranks import SINGLE, Ranks
from brimful.errors import UsageError
from brimful.execution.explained import Expected
from brimful.execution.out_of_memory import RanOut
from brimful.job import Data
from brimful.results import DataLoading, EquivalenceReport
from brimful.trainer.data.batches import (
    Batches,
    check_validation,
    data_loading,
    find_data,
    refuse_single_samples,
)
from brimful.trainer.data.rng import seed_all
from brimful.trainer.data.stream import BatchStream
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.monitor.progress import make_progress
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start, find_start, store_fallback
from brimful.trainer.state import TrainState, make_state, seeded_model
from brimful.trainer.step.fallback import MemoryFallback
from brimful.trainer.step.kept_factors import keep_after_error
from brimful.trainer.step.runner import StepRunner
from brimful.trainer.storage.saves import Saves
from brimful.trainer.verify import verified


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A run before its first step."""

    config: RunConfig
    start: Start
    data: Data
    batches: Batches
    """The batches of the training data."""
    data_loading: DataLoading | None
    """How the training data are loaded; None if they are in memory."""
    certificate: EquivalenceReport | None
    state: TrainState

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if that is not known."""
        return self.config.options.total_steps(self.batches.steps_per_epoch)


def set_up_run(config: RunConfig, ranks: Ranks) -> RunContext:
    """Set up a new run, or resume one: its data, model and optimizer. All ranks call this together.

    The seed determines the data that the job makes, the weights and the random numbers of the batches: all are
    the same on every rank. From then on each rank draws its own random numbers. `Trainer.fit` lists the errors.
    """
    start = find_start(config, ranks)
    seed_all(config.options.seed)  # a resumed run has the same data, even if the job draws them at random
    data = find_data(config.job, config.options.data)
    for name in ("patience", "validate_every"):
        if getattr(config.options, name) is not None and data.validation is None:
            raise UsageError(f"{name} needs validation data: Data(validation=…).")
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
    if data.training_sample is not None:
        if data.validation is None:
            raise UsageError("a training_sample is evaluated beside validation data: Data(validation=…).")
        check_validation(data.training_sample, layout, name="training_sample")
    refuse_single_samples(config.job, data, batches, start.settings.micro_batch_size)
    model = seeded_model(config, start)
    if ranks.is_first:
        batches.warn_small_batches(model)
    certificate = verified(model, config, ranks) if start.saved is None else None
    state = make_state(
        model,
        config,
        start,
        ranks,
        BatchStream(batches, ranks=ranks),
        total_steps=config.options.total_steps(batches.steps_per_epoch),
    )
    return RunContext(
        config=config,
        start=start,
        data=data,
        batches=batches,
        data_loading=data_loading(data.train),
        certificate=certificate,
        state=state,
    )


def make_logger(run: RunContext) -> RunLogger:
    """Make the logger of a run. Only the first rank writes files, except for sharded saves."""
    config = run.config
    return RunLogger(
        run_dir=config.run_dir if run.state.ranks.is_first else None,
        plan=config.plan or config.settings,
        job=config.job,
        may_resume=config.options.resume,
        resumed=run.start.saved,
        saves=_make_saves(run),
        progress=make_progress(run.total_steps, show=config.shows_progress, loss_unit=config.loss_unit),
    )


def make_runner(run: RunContext, logger: RunLogger) -> StepRunner:
    """Make the runner of the steps, which logs each time that memory ran out."""
    config, shown = run.config, set[str]()

    def learn(ran_out: RanOut) -> None:
        note = keep_after_error(config, run.state, ran_out)
        if note is not None and note not in shown:
            shown.add(note)
            logger.progress.show_note(note)

    return StepRunner(
        config.job,
        run.state,
        corrects_batch_norm=config.options.correct_batch_norm,
        shrink=MemoryFallback(config.job, config.plan, config.device),
        on_recovery=logger.add_recovery,
        store_fallback=partial(store_fallback, config, run.start),
        on_ran_out=learn,
        expected=Expected.of(config.plan),
    )


def _make_saves(run: RunContext) -> Saves | None:
    """Every rank writes its shard where the model is sharded; elsewhere the first rank writes all."""
    run_dir, ranks, is_sharded = run.config.run_dir, run.state.ranks, run.state.parallel.saves_parts
    if run_dir is None or not (is_sharded or ranks.is_first):
        return None
    saved = run.start.saved
    return Saves(
        run_dir,
        keep=run.config.options.keep_saves,
        ranks=ranks.apart() if is_sharded else SINGLE,
        saved_step=None if saved is None else saved.step,
    )
