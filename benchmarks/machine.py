"""What is measured is kept as JSON, with the machine, the versions and the commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def keep(name: str, command: str, content: dict[str, Any], *packages: str) -> None:
    """Write a result.

    Args:
        name: Of its file.
        command: Makes it anew.
        content: Follows what the result is stamped with.
        packages: Whose versions matter besides torch's, if they are there.
    """
    versions = {package: version(package) for package in packages if find_spec(package) is not None}
    stamp = {"command": command, "commit": commit(), "machine": machine() | versions}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(stamp | content, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """The processor and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit() -> str:
    """The commit that ran, with a + if files other than results differ from it."""
    return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "-uno", "..", ":!results") else "")


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
