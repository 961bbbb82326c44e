"""Finds the start of a run: the save that it resumes from, which must be of the same run, and its settings."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from brimful.codec import decode_json, read_regular_file, to_json_document
from brimful.distributed.ranks import Ranks
from brimful.errors import BrimfulError, FileFormatError, ResumeError, RunDirectoryError
from brimful.results import Recovery
from brimful.settings import Settings
from brimful.trainer.options import RunConfig
from brimful.trainer.storage.checkpoint import Rates
from brimful.trainer.storage.restore import Save, newest_save
from brimful.trainer.storage.run_directory import FALLBACK, JOB, check_restart, check_run_directory
from brimful.utils.files import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a run."""

    saved: Save | None
    """The save to resume from; None for a new run."""
    settings_of_save: Settings
    """The settings of the save, or those of a new run."""
    settings: Settings
    """The settings to train with: those of the save, or smaller ones that the last launch left."""
    fallback: Recovery | None
    """Why `settings` are smaller: memory ran out on a rank of the last launch. None if they are not."""


def find_start(config: RunConfig, ranks: Ranks) -> Start:
    """Find and check the save that a run resumes from, or check that it can start; on all ranks together."""
    ranks.barrier()  # the first rank may still be writing the last save of an earlier run
    saved, before = _newest_save(config, ranks), config.settings
    if saved is None:
        _check_run_directory(config, ranks)
    else:
        _check_same_run(config, saved)
        if saved.checkpoint.asked_settings == before:  # else the plan has changed
            before = saved.checkpoint.settings
    settings, fallback = _fallback(config, before, ranks)
    return Start(saved=saved, settings_of_save=before, settings=settings, fallback=fallback)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The content of `fallback.json`: smaller settings for the next launch, after a rank ran out of memory.

    The other ranks are blocked in a collective on gradients that never come, and cannot undo their step. So the
    run ends, and the launcher starts it again from the last save.
    """

    before: Settings
    """The settings of the last save, or those that the run started with."""
    after: Settings
    recovery: Recovery


def store_fallback(config: RunConfig, start: Start, after: Settings, recovery: Recovery) -> str:
    """Store smaller settings for the next launch to resume with; return a sentence for the error message."""
    run_dir = config.run_dir
    if run_dir is None:
        return f"Without a run directory nothing is saved. Train with {after.describe()}."
    write_fallback(run_dir, Fallback(before=start.settings_of_save, after=after, recovery=recovery))
    return (
        "Launched again with resume, as `torchrun --max-restarts` does, the run resumes from its last save "
        f"in {run_dir} with {after.describe()}."
    )


def write_fallback(run_dir: Path, fallback: Fallback) -> None:
    """Write the settings for the next launch to the run directory, which all ranks see."""
    partial = run_dir / f".{FALLBACK}.{os.getpid()}.partial"  # two ranks may run out together
    write_file(partial, json.dumps(to_json_document(fallback), indent=2) + "\n", follows_links=False)
    partial.replace(run_dir / FALLBACK)


def read_fallback(run_dir: Path, before: Settings) -> Fallback | None:
    """Read what the last launch left for a run that starts with the settings `before`; None if nothing."""
    path = run_dir / FALLBACK
    if not os.path.lexists(path):
        return None
    found = decode_json(read_regular_file(path, what="file"), Fallback, where=str(path))
    return found if found.before == before else None


def check_rates(config: RunConfig, rates: Rates, saved: Save) -> None:
    """Check that learning rates, weight decays and schedule are those of the save."""
    before = saved.checkpoint
    if (before.rates, before.schedule) != (rates, config.schedule_name):
        raise ResumeError(
            f"the run in {config.run_dir} was begun with learning rates and weight decays "
            f"{list(map(list, before.rates))} and schedule {before.schedule}, and is to resume with "
            f"{list(map(list, rates))} and {config.schedule_name}: it would not be the same run. Resume it "
            "as it was begun, or begin another in a new run directory."
        )


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
    """Check on the first rank that a run can start in its directory; all ranks raise if not. Writes nothing."""
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
    asked, run_dir = saved.checkpoint, config.run_dir
    for name, before, now in (
        ("seed", asked.seed, config.options.seed),
        ("global batch size", asked.asked_settings.global_batch_size, config.settings.global_batch_size),
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


def _fallback(config: RunConfig, settings: Settings, ranks: Ranks) -> tuple[Settings, Recovery | None]:
    """The smaller settings that the last launch stored, and why; else the given settings, and None."""
    if config.options.resume and ranks.is_distributed:
        assert config.run_dir is not None
        try:
            left = read_fallback(config.run_dir, settings)
        except (FileFormatError, KeyError, TypeError) as error:  # the run continues without it
            warnings.warn(f"{FALLBACK} is not used: {error}", stacklevel=3)
            left = None
        if left is not None:
            return left.after, left.recovery
    return settings, None
