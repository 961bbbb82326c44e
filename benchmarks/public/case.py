"""What a public script is here: a repository at a commit, and the job that its code makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from brimful.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A training script of a public repository.

    Its model, its loss and its optimizer are the checkout's code; the data is random and small, and a few
    lines of ours join them as the script's loop does.
    """

    name: str
    """What it trains."""
    repository: str
    """Owner and name on GitHub."""
    commit: str
    file: str
    """The script in the repository."""
    job: Callable[[], Job]
    """Imports the checkout's code, from a folder that `imported_from` has put first."""
    samples: int
    """In the global batch."""
    folder: str = ""
    """Of the checkout, in which the script runs."""
    absent: tuple[str, ...] = ()
    """Modules that the checkout imports for reading data or drawing, which need not be installed."""

    @property
    def checkout(self) -> str:
        """The name of the checkout's folder."""
        return self.repository.replace("/", "+")


SCRIPTS: list[Script] = []
"""All entries, in the order in which their modules are imported."""


def script(
    repository: str, commit: str, file: str, samples: int, *, folder: str = "", absent: tuple[str, ...] = ()
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Add a function that makes a job to the scripts, under its own name; the arguments are `Script`'s."""

    def add(function: Callable[[], Job]) -> Callable[[], Job]:
        entry = Script(
            name=function.__name__.replace("_", " "),
            repository=repository,
            commit=commit,
            file=file,
            job=function,
            samples=samples,
            folder=folder,
            absent=absent,
        )
        SCRIPTS.append(entry)
        return function

    return add


def imported_from(entry: Script, checkouts: Path) -> None:
    """Let this process import the code of a checkout; another checkout's modules may have the same names."""
    sys.argv = [entry.file]  # which some read when they are imported
    sys.path.insert(0, str(checkouts / entry.checkout / entry.folder))
    for name in entry.absent:
        module = ModuleType(name)
        module.__getattr__ = lambda _: None  # type: ignore[method-assign]
        sys.modules.setdefault(name, module)
