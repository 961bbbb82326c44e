"""The command line, as a user runs it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def brimful(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What `brimful` with some arguments says and returns, run in a folder with a cache of its own."""
    return subprocess.run(
        [sys.executable, "-m", "brimful", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
