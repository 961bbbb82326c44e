"""Everything that a run has before its first step, made in the order that its random numbers need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from brimful.batches import layout_of
from brimful.distributed.ranks import Ranks
from brimful.job import Data
from brimful.results import Certificate
from brimful.trainer.data.batches import Batches, check_validation, find_data, refuse_single_samples
from brimful.trainer.data.stream import Feed
from brimful.trainer.learner import Learner, make_learner, seeded_model
from brimful.trainer.monitor.logger import Journal
from brimful.trainer.monitor.mfu import Utilisation
from brimful.trainer.monitor.progress import make_progress
from brimful.trainer.options import Options
from brimful.trainer.resume import Start, find_start, hand_over, restore_random
from brimful.trainer.step.fallback import Lowering
from brimful.trainer.step.schedules import make_scheduler
from brimful.trainer.step.transaction import Steps
from brimful.trainer.storage.saves import Saves
from brimful.trainer.verify import certified


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A run before its first step."""

    options: Options
    ranks: Ranks
    start: Start
    data: Data
    batches: Batches
    """Of the training data."""
    feed: Feed
    """Which gives the batches to the steps."""
    utilisation: Utilisation
    certificate: Certificate | None
    learner: Learner

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if that is not known."""
        return self.options.length.total_steps(self.batches.steps_per_epoch)


def begin(options: Options, ranks: Ranks) -> Beginning:
    """Begin a run, or go on with it: find where it starts, its data and its model.

    The seed decides the weights, then the random numbers of the data, which are alike on every rank; from
    there on those of the ranks differ.

    Args:
        options: What was asked.
        ranks: All of them begin together.

    Returns:
        What the run is made of.

    Raises:
        UsageError: There are no data, or they, the model or the loss are none.
        RunDirectoryError: The run directory is not empty or cannot be written to.
        ResumeError: No save is whole, or they are of another run.
        CertificateError: The plan does not compute what plain training does.
    """
    start = find_start(options, ranks)
    data = find_data(options.job, options.data)
    layout = layout_of(options.job, whole=start.settings.global_batch_size)
    batches = Batches(
        data.train,
        global_batch_size=start.settings.global_batch_size,
        seed=options.seed,
        layout=layout,
        device=options.device,
        warns=ranks.is_first,
    )
    if data.validation is not None:
        check_validation(data.validation, layout)
    refuse_single_samples(options.job, data, batches, start.settings.micro_batch_size)
    utilisation = Utilisation(options.plan, options.job)
    model = seeded_model(options, start)
    if ranks.is_first:
        batches.tell_small(model)
    certificate = certified(model, options, ranks) if start.saved is None else None
    feed = Feed(
        batches, ranks=ranks, resumed=start.saved, restore_random=partial(restore_random, options, ranks)
    )
    learner = make_learner(model, options, start, ranks)
    return Beginning(
        options=options,
        ranks=ranks,
        start=start,
        data=data,
        batches=batches,
        feed=feed,
        utilisation=utilisation,
        certificate=certificate,
        learner=learner,
    )


def make_journal(begun: Beginning) -> Journal:
    """The journal of a run, which the first rank alone writes, but for saves of which each has a part."""
    options = begun.options
    saving = options.saving
    return Journal(
        run_dir=saving.run_dir if begun.ranks.is_first else None,
        plan=options.plan or options.settings,
        job=options.job,
        progress=make_progress(begun.total_steps, show=options.shows_progress, counted=options.counted),
        keep_saves=saving.keep,
        may_resume=saving.resumes,
        resumed=begun.start.saved,
        saves=_saves_of_parts(begun),
    )


def make_steps(begun: Beginning, journal: Journal) -> Steps:
    """What takes the steps of a run, and tells the journal where memory ran out."""
    options, learner = begun.options, begun.learner
    updating = options.updating
    return Steps(
        job=options.job,
        settings=begun.start.settings,
        model=learner.model,
        optimizer=learner.optimizer,
        scheduler=make_scheduler(updating.schedule, learner.optimizer, begun.total_steps),
        device=options.device,
        max_gradient_norm=updating.max_gradient_norm,
        average=learner.average,
        corrects_batch_norm=updating.corrects_batch_norm,
        lower=Lowering(options.job, options.plan, options.device),
        on_recovery=journal.add_recovery,
        ranks=begun.ranks,
        parallel=learner.parallel,
        hand_over=partial(hand_over, options, begun.start),
    )


def _saves_of_parts(begun: Beginning) -> Saves | None:
    """Every rank's own, where each writes what it has of the model and of the optimizer's state."""
    saving = begun.options.saving
    if saving.run_dir is None or not begun.learner.parallel.saves_parts:
        return None
    saved = begun.start.saved
    saved_step = None if saved is None else saved.step
    return Saves(saving.run_dir, keep=saving.keep, ranks=begun.ranks.apart(), saved_step=saved_step)
