"""What a run begins with, or goes on from: its save, which must be of the same run, and its settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from brimful.distributed.ranks import Ranks
from brimful.errors import BrimfulError, FileFormatError, ResumeError, RunDirectoryError
from brimful.results import Recovery
from brimful.settings import Settings
from brimful.trainer.options import RunConfig
from brimful.trainer.step.schedules import Schedule
from brimful.trainer.storage.checkpoint import Rates, RunIdentity
from brimful.trainer.storage.relaunch import read_fallback, write_fallback
from brimful.trainer.storage.restore import Save, newest_save
from brimful.trainer.storage.run_directory import FALLBACK, JOB, check_run_directory
from brimful.trainer.storage.unsaved import check_restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From where a run starts."""

    saved: Save | None
    """What it goes on from; None begins it."""
    settings_of_save: Settings
    """With which the run was saved last, or begins; a launch may have lowered them since."""
    settings: Settings
    """Those to go on with."""
    fallback: Recovery | None
    """Why they are lower, where memory ran out on one of the ranks of the launch before this."""


def find_start(config: RunConfig, ranks: Ranks) -> Start:
    """Find the newest save if the run is to go on, and see that it is of this run; or prepare to begin.

    Args:
        config: Say which.
        ranks: All of them look for it together.

    Returns:
        From where to start.

    Raises:
        RunDirectoryError: The run directory is not empty or cannot be written to.
        ResumeError: No save is whole, or they are of another run.
    """
    ranks.barrier()  # the first may still be writing what a run before this saved last
    saved = _newest_save(config, ranks)
    if saved is None:
        _check_run_directory(config, ranks)
        before = config.settings
    else:
        _check_same_run(config, saved)
        before = _settings_to_resume(config, saved)
    settings, fallback = _fallback(config, before, ranks)
    return Start(saved=saved, settings_of_save=before, settings=settings, fallback=fallback)


def schedule_fallback(config: RunConfig, start: Start, after: Settings, recovery: Recovery) -> str:
    """Let the next launch resume with settings that take less.

    Args:
        config: Say where the run is saved.
        start: From where this launch started.
        after: The settings that take less.
        recovery: What happened.

    Returns:
        What to tell the user of it.
    """
    run_dir = config.run_dir
    if run_dir is None:
        return f"Without a run directory nothing is saved. Train with {after.describe()}."
    write_fallback(run_dir, start.settings_of_save, after, recovery)
    return (
        "Launched again with resume, as `torchrun --max-restarts` does, the run resumes from its last save "
        f"in {run_dir} with {after.describe()}."
    )


def run_identity(config: RunConfig, rates: Rates) -> RunIdentity:
    """What identifies a run: a checkpoint with another identity is of another run.

    Args:
        config: What was asked.
        rates: Learning rates and weight decays that were asked for.

    Returns:
        What is saved with the run.
    """
    schedule = config.options.schedule
    return RunIdentity(
        settings=config.settings,
        seed=config.options.seed,
        about=config.about,
        rates=rates,
        schedule=str(schedule) if isinstance(schedule, Schedule) else None,
    )


def check_rates(config: RunConfig, rates: Rates, saved: Save) -> None:
    """Check that the rates are those that were saved; others that are asked for now would not be taken.

    Args:
        config: Name the run, and its schedule.
        rates: Learning rates and weight decays that are asked for now.
        saved: Its own take their place.

    Raises:
        ResumeError: They are others.
    """
    before, now = saved.checkpoint.run, run_identity(config, rates)
    if (before.rates, before.schedule) != (now.rates, now.schedule):
        raise ResumeError(
            f"the run in {config.run_dir} was begun with learning rates and weight decays "
            f"{_listed(before.rates)} and schedule {before.schedule}, and is to resume with "
            f"{_listed(now.rates)} and {now.schedule}: it would not be the same run. Resume it as it was "
            "begun, or begin another in a new run directory."
        )


def _listed(rates: Rates) -> list[list[float]]:
    return [list(group) for group in rates]


def _newest_save(config: RunConfig, ranks: Ranks) -> Save | None:
    if not config.options.resume:
        return None
    assert config.run_dir is not None
    return newest_save(
        config.run_dir,
        lambda reason: warnings.warn(reason, stacklevel=4) if ranks.is_first else None,
        ranks=ranks,
        maps=config.settings.divides_model,
    )


def _check_run_directory(config: RunConfig, ranks: Ranks) -> None:
    """Check on the first rank, for all, that a run can begin where it is to; nothing is written yet."""
    run_dir = config.run_dir
    refusal: BrimfulError | None = None
    if run_dir is not None and ranks.is_first:
        try:
            check_restart(run_dir) if config.options.resume else check_run_directory(run_dir)
        except (ResumeError, RunDirectoryError) as error:
            refusal = error
    if (of_first := ranks.broadcast(refusal)) is not None:
        raise of_first


def _check_same_run(config: RunConfig, saved: Save) -> None:
    asked = saved.checkpoint.run
    run_dir = config.run_dir
    for name, before, now in (
        ("seed", asked.seed, config.options.seed),
        ("global batch size", asked.settings.global_batch_size, config.settings.global_batch_size),
    ):
        if before != now:
            raise ResumeError(
                f"the run in {run_dir} has {name} {before}, and this one {now}: it would not be the "
                f"same run. Resume with {before}, or begin another in a new run directory."
            )
    if asked.about != config.about:
        raise ResumeError(
            f"the run in {run_dir} is of a job that says other things about itself in `about` (see "
            f"{JOB} there) than {config.job.name!r} does now; of recipes, their files or flags have "
            "changed. Give the same, or begin another run in a new run directory."
        )


def _settings_to_resume(config: RunConfig, saved: Save) -> Settings:
    """Those in force when the run was saved, lowered perhaps, unless others are asked for now."""
    if saved.checkpoint.run.settings != config.settings:
        return config.settings
    return saved.checkpoint.state.settings


def _fallback(config: RunConfig, settings: Settings, ranks: Ranks) -> tuple[Settings, Recovery | None]:
    """The settings to go on with, and what happened if the launch before this left others."""
    if config.options.resume and ranks.is_distributed:
        assert config.run_dir is not None
        try:
            left = read_fallback(config.run_dir, settings)
        except (FileFormatError, KeyError, TypeError) as error:  # the run goes on as it was saved
            warnings.warn(f"{FALLBACK} is not used: {error}", stacklevel=3)
            left = None
        if left is not None:
            return left
    return settings, None
