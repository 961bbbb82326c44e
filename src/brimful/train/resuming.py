"""What a run begins with, or goes on from: its save, which must be of the same run, and its settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from brimful.errors import ResumeError
from brimful.settings import Settings, settings_from_json, settings_to_json
from brimful.train.options import Options
from brimful.train.randomness import RandomState, seed_all
from brimful.train.ranks import Ranks
from brimful.train.relaunch import leave_settings, settings_left
from brimful.train.run_directory import JOB, check_run_directory, clear_begun_run
from brimful.train.saves import Save, newest_save
from brimful.training import Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """From where a run starts."""

    saved: Save | None
    """What it goes on from; None begins it."""
    settings_of_save: Settings
    """With which the run was saved last, or begins; a launch may have lowered them since."""
    settings: Settings
    """Those to go on with."""
    lowered: Recovery | None
    """Why they are lower, where memory ran out on one of the ranks of the launch before this."""


def find_start(options: Options, ranks: Ranks) -> Start:
    """Find the newest save if the run is to go on, and see that it is of this run; or prepare to begin.

    Args:
        options: Say which.
        ranks: All of them look for it together.

    Returns:
        From where to start.

    Raises:
        RunDirectoryError: The run directory is not empty or cannot be written to.
        ResumeError: No save is whole, or they are of another run.
    """
    ranks.wait()  # the first may still be writing what a run before this saved last
    saved = _newest_save(options, ranks)
    if saved is None:
        _prepare_run_directory(options, ranks)
        before = options.settings
    else:
        _check_same_run(options, saved)
        before = _settings_to_resume(options, saved)
    settings, lowered = _lowered(options, before, ranks)
    return Start(saved=saved, settings_of_save=before, settings=settings, lowered=lowered)


def hand_over(options: Options, start: Start, after: Settings, recovery: Recovery) -> str:
    """Let the next launch go on with settings that take less.

    Args:
        options: Say where the run is saved.
        start: From where this launch started.
        after: The settings that take less.
        recovery: What happened.

    Returns:
        What to tell the user of it.
    """
    run_dir = options.saving.run_dir
    if run_dir is None:
        return f"Without a run directory nothing is saved. Train with {after.describe()}."
    leave_settings(run_dir, start.settings_of_save, after, recovery)
    return (
        "Launched again with resume, as `torchrun --max-restarts` does, the run goes on from its last save "
        f"in {run_dir} with {after.describe()}."
    )


def identity(options: Options, rates: list[Any]) -> dict[str, Any]:
    """By what a save is known to be of the same run, in plain containers.

    Args:
        options: What was asked.
        rates: Learning rates, weight decays and schedule that were asked for.

    Returns:
        What is saved with the run.
    """
    return {
        "asked_settings": settings_to_json(options.settings),
        "seed": options.seed,
        "about": options.about,
        "asked_rates": rates,
    }


def check_rates(options: Options, rates: list[Any], saved: Save) -> None:
    """Check that the rates are those that were saved; others that are asked for now would not be taken.

    Args:
        options: Name the run.
        rates: Learning rates, weight decays and schedule that are asked for now.
        saved: Its own take their place.

    Raises:
        ResumeError: They are others.
    """
    before = saved.state["asked_rates"]
    if before != rates:
        raise ResumeError(
            f"the run in {options.saving.run_dir} was begun with learning rates and weight decays {before[0]} "
            f"and schedule {before[1]}, and is to go on with {rates[0]} and {rates[1]}: it would not be the "
            "same run. Resume it as it was begun, or begin another in a new run directory."
        )


def restore_random(options: Options, ranks: Ranks, saved: Save) -> None:
    """Set this rank's random numbers to what the last step left; anew if there was no such rank.

    Args:
        options: Seed and device.
        ranks: Those that go on.
        saved: By as many ranks as it may be.
    """
    of_ranks = saved.state["random"]
    if ranks.count != len(of_ranks):
        warnings.warn(
            f"the run was saved by {len(of_ranks)} ranks and goes on with {ranks.count}: dropout "
            "draws other numbers than it would have.",
            stacklevel=2,
        )
    if ranks.rank >= len(of_ranks):
        seed_all(options.seed + saved.step, ranks.rank)
    else:
        RandomState.from_save(of_ranks[ranks.rank]).restore(options.device)


def _newest_save(options: Options, ranks: Ranks) -> Save | None:
    if not options.saving.resumes:
        return None
    assert options.saving.run_dir is not None
    return newest_save(
        options.saving.run_dir,
        lambda reason: warnings.warn(reason, stacklevel=4) if ranks.is_first else None,
        ranks=ranks,
        maps=options.settings.divides_model,
    )


def _prepare_run_directory(options: Options, ranks: Ranks) -> None:
    run_dir = options.saving.run_dir
    if run_dir is None or not ranks.is_first:
        return
    if options.saving.resumes:
        clear_begun_run(run_dir)
    check_run_directory(run_dir)


def _check_same_run(options: Options, saved: Save) -> None:
    asked = settings_from_json(saved.state["asked_settings"])
    run_dir = options.saving.run_dir
    for name, before, now in (
        ("seed", saved.state["seed"], options.seed),
        ("global batch size", asked.global_batch_size, options.settings.global_batch_size),
    ):
        if before != now:
            raise ResumeError(
                f"the run in {run_dir} has {name} {before}, and this one {now}: it would not be the "
                f"same run. Resume with {before}, or begin another in a new run directory."
            )
    if saved.state.get("about") != options.about:
        raise ResumeError(
            f"the run in {run_dir} is of a job that says other things about itself in `about` (see "
            f"{JOB} there) than {options.job.name!r} does now; of ready tasks, their files or flags have "
            "changed. Give the same, or begin another run in a new run directory."
        )


def _settings_to_resume(options: Options, saved: Save) -> Settings:
    """Those in force when the run was saved, lowered perhaps, unless others are asked for now."""
    asked_before = settings_from_json(saved.state["asked_settings"])
    if asked_before != options.settings:
        return options.settings
    return settings_from_json(saved.state["settings"])


def _lowered(options: Options, settings: Settings, ranks: Ranks) -> tuple[Settings, Recovery | None]:
    """The settings to go on with, and what happened if the launch before this left others."""
    if options.saving.resumes and ranks.are_several:
        assert options.saving.run_dir is not None
        left = settings_left(options.saving.run_dir, settings)
        if left is not None:
            return left
    return settings, None
