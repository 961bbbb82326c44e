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
    _write(name, stamp(command, *packages) | content)


def stamp(command: str, *packages: str) -> dict[str, Any]:
    """What a result begins with: how it was made, from which commit, on which machine."""
    versions = {package: version(package) for package in packages if find_spec(package) is not None}
    return {"command": command, "commit": commit(), "machine": machine() | versions}


class Rows:
    """Rows of a result that takes long, each written as soon as it is there.

    They are in a file of their own beside the result until all are made. A run that was stopped goes on where
    it was, if commit, machine and versions are the same; else it begins anew.

    Args:
        name: Of the result's file.
        command: Makes it anew.
        packages: Whose versions matter besides torch's, if they are there.
    """

    def __init__(self, name: str, command: str, *packages: str) -> None:
        self._name, self._partial = name, name.replace(".json", ".partial.json")
        self._stamp = stamp(command, *packages)  # of what is loaded now, whatever is committed meanwhile
        self.rows: list[dict[str, Any]] = []
        path = RESULTS / self._partial
        if path.exists() and not self._stamp["commit"].endswith("+"):
            before = json.loads(path.read_text(encoding="utf-8"))
            if {key: before.get(key) for key in self._stamp} == self._stamp:
                self.rows = before["rows"]

    def has(self, **values: Any) -> bool:
        """Whether a row with these values is there."""
        return any(all(row.get(key) == value for key, value in values.items()) for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """One row more."""
        self.rows.append(row)
        _write(self._partial, self._stamp | {"rows": self.rows})

    def keep(self, content: dict[str, Any]) -> None:
        """Write the result: the stamp, `content`, the rows."""
        _write(self._name, self._stamp | content | {"rows": self.rows})
        (RESULTS / self._partial).unlink(missing_ok=True)


def _write(name: str, content: dict[str, Any]) -> None:
    """All of a file or nothing of it."""
    RESULTS.mkdir(exist_ok=True)
    beside = RESULTS / f".{name}"
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(RESULTS / name)


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
    return commit_of(Path(__file__).parent, "..", ":!results")


def commit_of(folder: Path, *paths: str) -> str:
    """The commit of a checkout, with a + if files differ from it.

    Args:
        folder: Any in the checkout.
        paths: Which files, from there; none means those in the folder.
    """
    return commit_at(folder) + ("+" if _git(folder, "status", "--porcelain", "-uno", *(paths or ["."])) else "")


def commit_at(folder: Path) -> str:
    """The commit of a checkout, whatever files differ from it."""
    return _git(folder, "rev-parse", "HEAD")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
