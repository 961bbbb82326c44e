"""One attack: what is tried, and what must hold after it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any

from attacks.material import Material
from attacks.process import HANG_SECONDS, MEMORY_BYTES, Ran, Running, Surroundings, command_line, fork, spawn


class Kind(StrEnum):
    """What went wrong, the worst first."""

    EXECUTED = "executed"
    """Code in a file that is data was run."""
    LOST = "lost"
    """Weights, a save or a result that were there are gone, or changed without a newer save."""
    UNBOUNDED = "unbounded"
    """It read until memory ran out."""
    HANG = "hang"
    TRACEBACK = "traceback"
    """It ended with a traceback of brimful's code, or crashed."""
    WRONG = "wrong"
    """Another result, a value that cannot be accepted, or a false or missing message."""


class FailedError(Exception):
    """An attack that succeeded."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case that held came to."""

    tried: int = 1
    """Attacks in the case, such as several kills of one run."""
    note: str = ""
    """How it ended, where several ends are as expected; counted in the result."""


@dataclass(frozen=True, slots=True)
class Case:
    """One attack."""

    name: str
    """Unique in its area."""
    attack: Callable[[Place], Outcome | None]
    """Raises `FailedError` where something that must hold does not."""


def control(name: str, attack: Callable[[Place], object]) -> Case:
    """A case in which nothing is changed: were it refused too, the others of its area would try nothing."""

    def check(place: Place) -> Outcome:
        try:
            attack(place)
        except FailedError as failure:
            raise RuntimeError(f"what is unchanged fails: {failure}") from failure
        return Outcome(tried=0)

    return Case(f"unchanged, {name}", check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Attacks of one kind."""

    name: str
    cases: Callable[[int], Iterator[Case]]
    """All cases for a seed; other seeds give other random ones."""


@dataclass(slots=True, kw_only=True)
class Place:
    """Where a case happens: a folder of its own, with copies of files that brimful wrote."""

    root: Path
    material: Material
    _numbers: Iterator[int] = field(default_factory=count)

    @property
    def folder(self) -> Path:
        """The working directory of commands."""
        return self.root / "work"

    @property
    def canary(self) -> Path:
        """Made by hostile code, if it runs."""
        return self.root / "canary"

    def start(
        self,
        *arguments: str,
        action: Callable[[], object] | None = None,
        fresh: bool = False,
        environment: Mapping[str, str | None] | None = None,
        prepare: Callable[[], object] | None = None,
        memory_bytes: int | None = MEMORY_BYTES,
        is_nobody: bool = False,
    ) -> Running:
        """Start `brimful` with some arguments, another action, or, `fresh`, any command in a new process."""
        number = next(self._numbers)
        surroundings = Surroundings(
            folder=self.folder,
            environment={"XDG_CACHE_HOME": str(self.material.cache), **(environment or {})},
            out=self.root / f"out-{number}",
            err=self.root / f"err-{number}",
            prepare=prepare,
            memory_bytes=memory_bytes,
            is_nobody=is_nobody,
        )
        if fresh:
            return spawn(arguments, surroundings)
        return fork(action or command_line(*arguments), surroundings)

    def run(self, *arguments: str, seconds: float = HANG_SECONDS, **options: Any) -> Ran:
        """As `start`, and wait for its end."""
        return self.start(*arguments, **options).wait(seconds)

    def copy_run(self, name: str = "run") -> Path:
        """A copy of a run that was stopped after two of three epochs."""
        shutil.copytree(self.material.stopped_run, self.folder / name, symlinks=True)
        return self.folder / name


_OWN_ERROR = re.compile(r"^\W*(\w+\.)*\w*(Error|error): ", re.MULTILINE)
_LAST_FILE = re.compile(r'^  File "([^"]+)"', re.MULTILINE)


_MEMORY_ERROR = re.compile(r"^MemoryError", re.MULTILINE)
_OF_DATA_LOADERS = re.compile(
    r"^Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__.*?no attribute '_shutdown'$"
    r"|^Traceback \(most recent call last\):\n"
    r'  File "[^"]+multiprocessing/resource_sharer\.py", line \d+, in _serve\n.*?^ConnectionResetError: .*?$',
    re.MULTILINE | re.DOTALL,
)
"""What torch 2.13 prints of a DataLoader's iterator whose constructor raised, and what Python 3.11 prints in a
worker whose batch the main process stopped reading (because another worker was killed)."""


def check_ended(ran: Ran, *, own: str | None = None, memory_fails: bool = False) -> None:
    """The process ended by itself, without a traceback of code that is not the job's own.

    Args:
        ran: What it did.
        own: Name of a file of the user's, whose errors are shown with their traceback.
        memory_fails: The attack itself raised a MemoryError.
    """
    if ran.status is None:
        raise FailedError(Kind.HANG, f"waited for ever: {_last_line(ran.err)}")
    if _MEMORY_ERROR.search(ran.err) and not memory_fails:
        raise FailedError(Kind.UNBOUNDED, _last_line(ran.err))
    if ran.status < 0:
        raise FailedError(Kind.TRACEBACK, f"ended by signal {-ran.status}: {_last_line(ran.err)}")
    printed = _OF_DATA_LOADERS.sub("", ran.err)
    if "Traceback (most recent call last)" in printed:
        files = _LAST_FILE.findall(printed)
        if own is None or not files or Path(files[-1]).name != own:
            raise FailedError(Kind.TRACEBACK, _last_line(ran.err))
    if ran.status not in (0, 1, 2, 130, 143):
        raise FailedError(Kind.WRONG, f"exit status {ran.status}")


def check_refused(ran: Ran, *, own: str | None = None) -> None:
    """The command said in an error message why it did nothing."""
    check_ended(ran, own=own)
    if ran.status == 0:
        raise FailedError(Kind.WRONG, "accepted, exit status 0")
    if not _OWN_ERROR.search(ran.err):
        raise FailedError(Kind.WRONG, f"exit status {ran.status} without an error message")


def check_done(ran: Ran) -> None:
    """The command did what it was asked to."""
    check_ended(ran)
    if ran.status != 0:
        raise FailedError(Kind.WRONG, f"exit status {ran.status}: {_last_line(ran.err)}")


def check_done_or_refused(ran: Ran, *, own: str | None = None) -> None:
    """Either of them."""
    if ran.status == 0:
        check_ended(ran, own=own)
    else:
        check_refused(ran, own=own)


_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt|Bomb\w*)\b.*", re.MULTILINE)


def _last_line(text: str) -> str:
    """The last error that was shown, or else the last line."""
    lines = _RAISED.findall(text) or [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing on standard error"


# Runs

KEPT = ("weights.safetensors", "best.safetensors", "average.safetensors", "result.json")
_TIMES = ("seconds", "mfu", "memory_measured")


def metrics(run: Path) -> list[dict[str, Any]]:
    """What a run measured in each step and validation, but for times."""
    found = []
    for line in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        entry = json.loads(line)
        if entry["kind"] in ("step", "validation"):
            found.append({name: value for name, value in entry.items() if not _is_time(name)})
    return found


def _is_time(name: str) -> bool:
    return any(part in name for part in _TIMES)


def check_equal(run: Path, expected: Path, *, but: str = "") -> None:
    """A run has the metrics of another to the last bit, and the same tensors in all its weights.

    Args:
        run: Its directory.
        expected: That of the other.
        but: Name of a file that is not compared.
    """
    if not (run / "metrics.jsonl").is_file():
        raise FailedError(Kind.WRONG, "there is no metrics.jsonl")
    check_same_metrics(metrics(run), metrics(expected))
    check_same_weights(run, expected, but=but)


def check_same_metrics(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """The same steps and validations."""
    if found != wanted:
        first = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), None)
        where = f"{len(found)} entries, not {len(wanted)}" if first is None else f"entry {first + 1} differs"
        raise FailedError(Kind.WRONG, f"metrics.jsonl: {where}")


def check_same_weights(run: Path, expected: Path, *, but: str = "") -> None:
    """The same tensors in all files of weights."""
    from safetensors.torch import load_file

    for path in sorted(expected.glob("*.safetensors")):
        if path.name == but:
            continue
        if not (run / path.name).is_file():
            raise FailedError(Kind.LOST, f"{path.name} is not there")
        ours, theirs = load_file(run / path.name), load_file(path)
        if ours.keys() != theirs.keys() or any(not ours[name].equal(theirs[name]) for name in theirs):
            raise FailedError(Kind.WRONG, f"{path.name} has other tensors")


def contents(folder: Path) -> dict[str, str]:
    """A digest of each regular file at any depth, by name; links are not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"link to {path.readlink()}"
        elif path.is_file():
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def check_untouched(folder: Path, before: Mapping[str, str]) -> None:
    """Every file that was there is there, byte for byte."""
    after = contents(folder)
    gone = [name for name in before if name not in after]
    changed = [name for name in before if name in after and after[name] != before[name]]
    if gone or changed:
        listed = ", ".join([*(f"{name} gone" for name in gone), *(f"{name} changed" for name in changed)][:4])
        raise FailedError(Kind.LOST, listed)


def kept_names(run: Path) -> set[str]:
    """Of what is never to disappear again once it is there."""
    names = {name for name in KEPT if (run / name).is_file()}
    return names | ({"saves"} if saved_steps(run) else set())


def saved_steps(run: Path) -> list[int]:
    """After which steps there are saves."""
    names = [path.name for path in (run / "saves").glob("step-*")]
    return sorted(int(name[5:]) for name in names if name[5:].isdecimal())


def check_nothing_lost(run: Path, before: set[str]) -> None:
    """What had been written is still there."""
    if gone := before - kept_names(run):
        raise FailedError(Kind.LOST, f"{', '.join(sorted(gone))} gone")


_SAVED_AFTER = re.compile(r"saved after step (\d+)")


def check_claims(run: Path, ran: Ran) -> None:
    """Where a message says that the run is saved after a step, such a save is there."""
    for step in map(int, _SAVED_AFTER.findall(ran.err)):
        if step not in saved_steps(run):
            raise FailedError(Kind.WRONG, f"said to be saved after step {step}, and there is no such save")
