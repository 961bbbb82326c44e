"""The run directory: what a run leaves behind, written so that a failure never damages what was there.

| file | what |
|---|---|
| `plan.json`, or `settings.json` without a plan | how it is trained |
| `job.json` | what the job says `about` itself, such as the names of its classes |
| `metrics.jsonl` | a line per step and per validation, as they come |
| `weights.safetensors` | the latest weights; its metadata say after which step |
| `best.safetensors` | the weights with the lowest validation loss |
| `average.safetensors` | their moving average, if one is kept |
| `saves/` | what is needed to resume, see `saves.py`; made first, so that it is missed where it was moved |
| `fallback.json` | settings to go on with, where memory ran out on one of several ranks |
| `tensorboard/` | TensorBoard's event files, if they were asked for |
| `result.json` | the `TrainingResult`, once the run has ended |
| `report.txt` | what `brimful train` printed of it |
| `unsaved-1/` | what a run left that ended before its first save, and was started again |

`load_weights(model, directory)` loads the weights; see docs/howto/weights.md.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from torch import nn

from brimful.errors import RunDirectoryError, SaveError
from brimful.execution.out_of_memory import with_room
from brimful.files import bring_to_disk, free_bytes
from brimful.module_names import plain_state
from brimful.quantities import format_bytes
from brimful.trainer.storage.weights import AVERAGE, BEST, TIED, WEIGHTS, distinct_tensors, write_tensors

PLAN = "plan.json"
SETTINGS = "settings.json"
JOB = "job.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
FALLBACK = "fallback.json"
REPORT = "report.txt"
SAVES = "saves"
TENSORBOARD = "tensorboard"
NAMES = (PLAN, SETTINGS, JOB, METRICS, WEIGHTS, BEST, AVERAGE, RESULT)
"""The files that a `RunDirectory` writes."""

_MOST_ENTRIES_NAMED = 3


_OPEN: weakref.WeakSet[BinaryIO] = weakref.WeakSet()
"""The `metrics.jsonl` that are open; a forked DataLoader worker is not to hold their locks when this ends."""


def _close_in_child() -> None:
    for metrics in list(_OPEN):
        metrics.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RunDirectory:
    """A directory of one run's own.

    Args:
        path: A directory that is empty or does not exist yet; it is made, with its parents.
        resumes: It may have a run in it that is resumed, or begun again.

    Raises:
        RunDirectoryError: It is a file, has something in it, is in use, or cannot be made.
    """

    def __init__(self, path: Path | str, *, resumes: bool = False) -> None:
        self.path = Path(path)
        if not resumes:
            check_run_directory(self.path)
        for name in NAMES:
            _check_is_no_directory(self.path / name)
        self._made: list[Path] = []
        """Files and directories that were not there before this run."""
        metrics = self.path / METRICS
        is_new = not os.path.lexists(metrics)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = _open_metrics(metrics, exclusive=not resumes)
        except OSError as error:
            raise not_usable(f"the run directory {self.path}", error) from error
        try:
            _lock(self._metrics, self.path)
            self._make_saves()
        except RunDirectoryError:
            self._metrics.close()
            raise
        if is_new:
            self._made.append(metrics)
        self._metrics.seek(0, os.SEEK_END)
        _OPEN.add(self._metrics)

    @property
    def metrics_bytes(self) -> int:
        """Length of `metrics.jsonl`."""
        return self._metrics.tell()

    def read_metrics(self) -> bytes:
        """All of `metrics.jsonl`.

        Returns:
            Whole lines, unless it is damaged.

        Raises:
            SaveError: It cannot be read.
        """
        try:
            return (self.path / METRICS).read_bytes()
        except OSError as error:
            raise self._save_error(METRICS, 0, error) from error

    def cut_metrics(self, lines: bytes, *, keeps_copy: bool) -> Path | None:
        """Continue `metrics.jsonl` after some lines.

        Args:
            lines: What is to be in it.
            keeps_copy: Keep what is in it now under another name.

        Returns:
            That name; None if it is not kept, or the file was empty.

        Raises:
            SaveError: It cannot be written.
        """
        aside = None
        try:
            if keeps_copy and (content := self.read_metrics()):
                aside = _unused(self.path, "metrics.damaged-{}.jsonl")
                aside.write_bytes(content)
                bring_to_disk(aside)
                self._metrics.truncate(0)
                self._metrics.seek(0)
                self._metrics.write(lines)
            self._metrics.truncate(len(lines))
            self._metrics.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._save_error(METRICS, len(lines), error) from error
        return aside

    def bring_metrics_to_disk(self) -> None:
        """Wait until the lines so far would survive a loss of power."""
        os.fsync(self._metrics.fileno())

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON file whole, or leave the one that is there.

        Args:
            name: The file's name.
            document: What `json` can write.

        Raises:
            SaveError: It could not be written.
        """
        content = (json.dumps(document, indent=2) + "\n").encode()
        self._replace(name, len(content), lambda temporary: temporary.write_bytes(content))

    def append_metrics(self, entry: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`: a whole one, or none.

        Args:
            entry: What `json` can write.

        Raises:
            SaveError: It could not be written.
        """
        line = (json.dumps(entry) + "\n").encode()
        end = self._metrics.tell()
        try:
            if self._metrics.write(line) != len(line):
                raise OSError("only a part of the line was written")
        except OSError as error:
            self._metrics.truncate(end)
            self._metrics.seek(end)
            raise self._save_error(METRICS, len(line), error) from error

    def save_weights(self, model: nn.Module, name: str, metadata: Mapping[str, str]) -> Path:
        """Write the model's parameters and buffers whole, or leave the file that is there.

        Tied weights are written once, under their first name.

        Args:
            model: Its `state_dict` is written, by the names that it has without wrappers (`torch.compile`).
            name: The file's name.
            metadata: Kept beside the weights.

        Returns:
            Where they are.

        Raises:
            SaveError: They could not be written.
            OutOfMemoryError: Memory ran out.
        """
        return with_room(partial(self._save_weights, model, name, metadata), during=f"{name} is written")

    def _save_weights(self, model: nn.Module, name: str, metadata: Mapping[str, str]) -> Path:
        tensors, tied = distinct_tensors(plain_state(model))
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        kept = {TIED: json.dumps(tied)} | dict(metadata)
        return self._replace(name, size_bytes, lambda temporary: write_tensors(tensors, temporary, kept))

    def close(self) -> None:
        """Close `metrics.jsonl`; calling it again does nothing."""
        self._metrics.close()

    def discard(self) -> None:
        """Close, and delete what this run has made here: for one that failed before its first step."""
        self.close()
        for path in reversed(self._made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def _replace(self, name: str, size_bytes: int, write: Callable[[Path], object]) -> Path:
        """Write beside the file, bring it to the disk, then put it in the file's place."""
        path, temporary = self.path / name, self.path / f".{name}.partial"
        is_new = not os.path.lexists(path)
        try:
            write(temporary)
            shutil.copymode(self.path / METRICS, temporary)  # safetensors lets nobody else read its files
            bring_to_disk(temporary)
            temporary.replace(path)
            bring_to_disk(self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise self._save_error(name, size_bytes, error) from error
        if is_new:
            self._made.append(path)
        return path

    def _make_saves(self) -> None:
        saves = self.path / SAVES
        try:
            if not os.path.lexists(saves):
                saves.mkdir()
                self._made.append(saves)
                bring_to_disk(self.path)
        except OSError as error:
            raise RunDirectoryError(f"{saves} cannot be made: {error.strerror or error}.") from error

    def _save_error(self, name: str, size_bytes: int, error: Exception) -> SaveError:
        path = self.path / name
        before = "What was there before is intact" if path.exists() else "Nothing is there"
        return SaveError(
            f"{path} could not be written: {getattr(error, 'strerror', None) or error}.\n"
            f"  needed: {format_bytes(size_bytes)}; free: {format_bytes(free_bytes(path))}\n"
            f"  {before}; the weights are still in the model (Trainer.model).\n"
            "  Free some space, or train into another run directory."
        )


def _lock(metrics: BinaryIO, path: Path) -> None:
    """Keep other processes out while `metrics.jsonl` is open; the system lets go when this one ends."""
    if os.name != "posix":
        return  # nothing keeps them out there
    import fcntl

    try:
        fcntl.flock(metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryError(
            f"another process is training in the run directory {path}. Wait until it has ended, or choose "
            "another directory."
        ) from None


def check_not_in_use(path: Path) -> None:
    """Check that no other process is training in a run directory.

    Args:
        path: The run directory.

    Raises:
        RunDirectoryError: One is, or it cannot be found out.
    """
    try:
        if (path / METRICS).is_file():
            with (path / METRICS).open("rb") as metrics:
                _lock(metrics, path)
    except OSError as error:
        raise not_usable(str(path / METRICS), error) from error


def check_run_directory(path: Path) -> None:
    """Check that a new run may write into `path`, without writing.

    Args:
        path: Where the run directory is or is to be.

    Raises:
        RunDirectoryError: It is a file, or has something in it, or cannot be read.
    """
    present = [name for name in entries(path) if name != FALLBACK]
    if present:
        raise not_empty(path, present)


def entries(path: Path) -> list[str]:
    """The names in a directory, in order.

    Args:
        path: May not exist yet.

    Returns:
        None of a directory that does not exist.

    Raises:
        RunDirectoryError: It is not a directory that can be read.
    """
    if not os.path.lexists(path):
        return []
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"the run directory {path} is a file. Choose another path.")
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be read: {error.strerror}.") from error


def not_empty(path: Path, present: Sequence[str]) -> RunDirectoryError:
    """The error for a directory that has something in it.

    Args:
        path: The directory.
        present: Names in it.

    Returns:
        It, to be raised.
    """
    named = ", ".join(present[:_MOST_ENTRIES_NAMED]) + (", …" if len(present) > _MOST_ENTRIES_NAMED else "")
    return RunDirectoryError(
        f"the run directory {path} is not empty: it has {named}. A run writes into a new or empty directory "
        "only: choose another; or, if it has a run that is to be resumed, resume it (--resume)."
    )


def not_usable(what: str, error: OSError) -> RunDirectoryError:
    """The error for a run directory that the system does not permit to be used.

    Args:
        what: The file or directory.
        error: What the system answered.

    Returns:
        It, to be raised.
    """
    return RunDirectoryError(
        f"{what} cannot be opened and written to: {error.strerror or error}. Choose another run directory."
    )


def _check_is_no_directory(file: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(file.lstat().st_mode)
    except OSError:  # also where there is nothing yet
        return
    if is_directory:
        raise RunDirectoryError(
            f"{file} is a directory, in the place of a file that training writes. Move it away, or choose "
            "another run directory."
        )


def _unused(folder: Path, pattern: str) -> Path:
    number = 1
    while (path := folder / pattern.format(number)).exists():
        number += 1
    return path


def _open_metrics(path: Path, *, exclusive: bool) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | (os.O_EXCL if exclusive else 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f"{path} is not a regular file. Choose another run directory.")
    return os.fdopen(descriptor, "r+b", buffering=0)
