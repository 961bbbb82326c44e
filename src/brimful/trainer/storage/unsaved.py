"""Restarts a run that has no save: checks its directory, then sets its files aside. Nothing is deleted.

The command that resumes a run starts it from the beginning if it ended before its first save. But a run
directory without saves may also be one whose `saves/` was moved, or is on a disk that is not mounted. A run
that starts again must not overwrite what training wrote there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from brimful.errors import ResumeError, RunDirectoryError
from brimful.trainer.storage.restore import find_saves
from brimful.trainer.storage.run_directory import (
    FALLBACK,
    JOB,
    METRICS,
    NAMES,
    PLAN,
    REPORT,
    RESULT,
    SAVES,
    SETTINGS,
    TENSORBOARD,
    check_not_in_use,
    entries,
    not_empty,
    not_usable,
)
from brimful.trainer.storage.saves import PARTIAL
from brimful.trainer.storage.weights import AVERAGE, BEST, WEIGHTS

_OF_TRAINING = (WEIGHTS, BEST, AVERAGE, RESULT, REPORT)
"""Files of training, which a run from the beginning would overwrite."""

_OF_UNSAVED_RUN = (PLAN, SETTINGS, JOB, TENSORBOARD, METRICS)
"""Files that a run writes before its first save, in the order of moving them: `metrics.jsonl`, which shows that
the run took steps, is last."""

_SET_ASIDE = re.compile(r"unsaved-\d+")


def check_restart(path: Path) -> None:
    """Check that a run without a save can start from the beginning. Writes nothing.

    Raises RunDirectoryError if the directory has other files, is in use, or cannot be read; ResumeError if it
    has files from training that a run from the beginning would overwrite.
    """
    present = entries(path)
    if saves := find_saves(path):
        raise ResumeError(
            f"{path} has saves (the newest is {saves[0].name}) but no {PLAN}, so `brimful train --resume` does "
            f"not know how it was trained. Bring {PLAN} back; a run of `Trainer` with plain settings is "
            "resumed by `Trainer(…, resume=True)`."
        )
    own = {*NAMES, *(f".{name}.partial" for name in NAMES), FALLBACK, REPORT, SAVES, TENSORBOARD}
    unknown = [name for name in present if name not in own and not _SET_ASIDE.fullmatch(name)]
    if unknown:
        raise not_empty(path, unknown)
    check_not_in_use(path)
    if written := [name for name in _OF_TRAINING if name in present]:
        raise _lost_saves(path, f"it has {', '.join(written)}")
    if SAVES not in present:
        if _has_steps(path):
            raise _lost_saves(path, f"{METRICS} has steps")
        return
    others = [name for name in entries(path / SAVES) if not (name.startswith(".") and name.endswith(PARTIAL))]
    if others:
        raise _lost_saves(path, f"{path / SAVES} has {others[0]}")


def set_unsaved_run_aside(path: Path) -> Path | None:
    """Move the files of a run that ended before its first save to a directory `unsaved-N` inside its own.

    `check_restart` has checked the run directory. Returns the directory `unsaved-N`; None if that run had not
    taken a step. Raises RunDirectoryError if another process is training in it, or it cannot be written to.
    """
    check_not_in_use(path)
    if not _has_steps(path):
        return None
    number = 1
    while (path / f"unsaved-{number}").exists():
        number += 1
    aside = path / f"unsaved-{number}"
    try:
        aside.mkdir()
        for name in _OF_UNSAVED_RUN:
            if os.path.lexists(path / name):
                (path / name).rename(aside / name)
    except OSError as error:
        raise not_usable(f"the run directory {path}", error) from error
    return aside


def _has_steps(path: Path) -> bool:
    metrics = path / METRICS
    if not os.path.lexists(metrics):
        return False
    if not metrics.is_file():
        raise RunDirectoryError(f"{metrics} is not a regular file. Choose another run directory.")
    return metrics.stat().st_size > 0


def _lost_saves(path: Path, found: str) -> ResumeError:
    saves = path / SAVES
    missing = f"{saves} has no save" if saves.is_dir() else f"{saves} does not exist"
    weights = next((path / name for name in (WEIGHTS, BEST, AVERAGE) if (path / name).is_file()), None)
    load = "" if weights is None else f', where load_weights(model, "{weights}") gives a model its weights'
    return ResumeError(
        f"the run in {path} cannot be resumed: {found}, but {missing}. A run from the beginning would "
        "overwrite what was trained, so nothing was changed.\n"
        "  Bring the saves back, if they were moved or their disk is not mounted. Or train in a new run "
        f"directory{load}."
    )
