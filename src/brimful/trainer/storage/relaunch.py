"""What one of several ranks leaves for the next launch, as memory ran out on it.

The other ranks wait in the middle of a collective for gradients that do not come, and cannot take their step
back. So the run ends, and the launcher starts it again from the last save, with settings that take less.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from brimful.codec import decode_json, read_regular_file, to_json_document
from brimful.files import write_file
from brimful.results import Recovery
from brimful.settings import Settings
from brimful.trainer.storage.run_directory import FALLBACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """`fallback.json`."""

    before: Settings
    after: Settings
    recovery: Recovery


def write_fallback(run_dir: Path, before: Settings, after: Settings, recovery: Recovery) -> None:
    """Write down with which settings the run is to go on.

    Args:
        run_dir: The run directory, which all ranks see.
        before: The settings of the last save, or those that the run began with.
        after: Those to go on with.
        recovery: What happened.

    Raises:
        SaveError: It cannot be written.
    """
    document = to_json_document(Fallback(before=before, after=after, recovery=recovery))
    partial = run_dir / f".{FALLBACK}.{os.getpid()}.partial"  # two ranks may run out together
    write_file(partial, json.dumps(document, indent=2) + "\n")
    partial.replace(run_dir / FALLBACK)


def read_fallback(run_dir: Path, before: Settings) -> tuple[Settings, Recovery] | None:
    """The settings to go on with, if memory ran out with those of the last save.

    Args:
        run_dir: The run directory.
        before: The settings of the last save, or those to begin with.

    Returns:
        Them and what happened; None if nothing was left, or it is of other settings.

    Raises:
        FileFormatError: What was left is damaged.
    """
    path = run_dir / FALLBACK
    if not os.path.lexists(path):
        return None
    left = decode_json(read_regular_file(path, what="file"), Fallback, where=str(path))
    return (left.after, left.recovery) if left.before == before else None
