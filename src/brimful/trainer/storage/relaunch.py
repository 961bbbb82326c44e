"""Smaller settings for the next launch, after memory ran out on one of several ranks.

The other ranks are blocked in a collective on gradients that never come, and cannot undo their step. So the run
ends, and the launcher starts it again from the last save, with settings that take less memory.
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
    """The content of `fallback.json`."""

    before: Settings
    after: Settings
    recovery: Recovery


def write_fallback(run_dir: Path, before: Settings, after: Settings, recovery: Recovery) -> None:
    """Write the settings for the next launch to the run directory, which all ranks see.

    `before` are the settings of the last save, or those that the run started with.
    """
    document = to_json_document(Fallback(before=before, after=after, recovery=recovery))
    partial = run_dir / f".{FALLBACK}.{os.getpid()}.partial"  # two ranks may run out together
    write_file(partial, json.dumps(document, indent=2) + "\n", follows_links=False)
    partial.replace(run_dir / FALLBACK)


def read_fallback(run_dir: Path, before: Settings) -> tuple[Settings, Recovery] | None:
    """Read the settings that the last launch wrote for this one, and the record of its failure.

    `before` are the settings of the last save, or those that the run starts with. Returns None if no settings
    were written for them. Raises FileFormatError if the file is damaged.
    """
    path = run_dir / FALLBACK
    if not os.path.lexists(path):
        return None
    left = decode_json(read_regular_file(path, what="file"), Fallback, where=str(path))
    return (left.after, left.recovery) if left.before == before else None
