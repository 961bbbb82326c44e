"""The run directory: what a run leaves behind, written so that a failure never damages what was there.

| file | what |
|---|---|
| `plan.json`, or `settings.json` without a plan | how it is trained |
| `job.json` | what the job says `about` itself, such as the names of its classes |
| `metrics.jsonl` | a line per step and per validation, as they come |
| `weights.safetensors` | the latest weights; its metadata say after which step |
| `best.safetensors` | the weights with the lowest validation loss |
| `average.safetensors` | their moving average, if one is kept |
| `saves/` | what is needed to resume; see `saves.py` |
| `lowered.json` | settings to go on with, where memory ran out on one of several ranks |
| `tensorboard/` | TensorBoard's event files, if they were asked for |
| `result.json` | the `TrainingResult`, once the run has ended |

`load_weights(model, path)` loads weights again.
"""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from brimful.errors import RunDirectoryError, SaveError
from brimful.files import bring_to_disk, free_bytes
from brimful.train.weights import TIED, distinct_tensors
from brimful.units import format_bytes

PLAN = "plan.json"
SETTINGS = "settings.json"
JOB = "job.json"
METRICS = "metrics.jsonl"
WEIGHTS = "weights.safetensors"
BEST = "best.safetensors"
AVERAGE = "average.safetensors"
RESULT = "result.json"
LOWERED = "lowered.json"
TENSORBOARD = "tensorboard"
_FOLDERS = ("saves", TENSORBOARD)
_NAMES = (PLAN, SETTINGS, JOB, METRICS, WEIGHTS, BEST, AVERAGE, RESULT)

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
        resumes: It is that of a run which is to go on.

    Raises:
        RunDirectoryError: It is a file, has something in it, or cannot be made.
    """

    def __init__(self, path: Path | str, *, resumes: bool = False) -> None:
        self.path = Path(path)
        if not resumes:
            check_run_directory(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.path / METRICS).open("r+b" if resumes else "xb", buffering=0)
        except OSError as error:
            raise RunDirectoryError(
                f"the run directory {self.path} cannot be written to: {error.strerror or error}. "
                "Choose another."
            ) from error
        try:
            _lock(self._metrics, self.path)
        except RunDirectoryError:
            self._metrics.close()
            raise
        self._metrics.seek(0, os.SEEK_END)
        _OPEN.add(self._metrics)

    @property
    def metrics_bytes(self) -> int:
        """Length of `metrics.jsonl`."""
        return self._metrics.tell()

    def cut_metrics(self, length_bytes: int) -> list[dict[str, Any]]:
        """Forget what was told after a save: those steps are to be taken again.

        Args:
            length_bytes: Of `metrics.jsonl` at the save.

        Returns:
            The lines up to there; fewer if the disk lost some.

        Raises:
            SaveError: The file cannot be read or written.
        """
        path = self.path / METRICS
        try:
            kept = path.read_bytes()[:length_bytes]
            whole = kept[: kept.rfind(b"\n") + 1]
            self._metrics.truncate(len(whole))
            self._metrics.seek(0, os.SEEK_END)
        except OSError as error:
            raise self._save_error(METRICS, length_bytes, error) from error
        lines = []
        with suppress(ValueError):  # after a loss of power what follows may be anything
            for line in whole.splitlines():
                lines.append(json.loads(line))
        return lines

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
            model: Its `state_dict` is written.
            name: The file's name.
            metadata: Kept beside the weights.

        Returns:
            Where they are.

        Raises:
            SaveError: They could not be written.
        """
        tensors, tied = distinct_tensors(model.state_dict())
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        kept = {"format": "pt", TIED: json.dumps(tied)} | dict(metadata)
        return self._replace(name, size_bytes, lambda temporary: save_file(tensors, temporary, metadata=kept))

    def close(self) -> None:
        """Close `metrics.jsonl`; calling it again does nothing."""
        self._metrics.close()

    def discard(self) -> None:
        """Close, and leave the directory empty: for a run that failed before its first step."""
        self.close()
        for name in _NAMES:
            (self.path / name).unlink(missing_ok=True)

    def _replace(self, name: str, size_bytes: int, write: Callable[[Path], object]) -> Path:
        """Write beside the file, bring it to the disk, then put it in the file's place."""
        path, temporary = self.path / name, self.path / f".{name}.partial"
        try:
            write(temporary)
            shutil.copymode(self.path / METRICS, temporary)  # safetensors lets nobody else read its files
            bring_to_disk(temporary)
            temporary.replace(path)
            bring_to_disk(self.path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise self._save_error(name, size_bytes, error) from error
        return path

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


def clear_begun_run(path: Path) -> None:
    """Take away what a run left that ended before its first save, so that it can begin again.

    Args:
        path: The run directory; nothing is done if it has anything else in it.

    Raises:
        RunDirectoryError: Another process is training in it.
    """
    if (path / METRICS).is_file():
        with (path / METRICS).open("rb") as metrics:
            _lock(metrics, path)
    own = {*_NAMES, "report.txt", *_FOLDERS}
    present = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if present and present <= own | {LOWERED}:
        for name in present - {*_FOLDERS, LOWERED}:
            (path / name).unlink()
        for name in _FOLDERS:
            shutil.rmtree(path / name, ignore_errors=True)


def check_run_directory(path: Path) -> None:
    """Check that a run may write into `path`, without writing.

    Args:
        path: Where the run directory is or is to be.

    Raises:
        RunDirectoryError: It is a file, or has something in it, or cannot be looked into.
    """
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"the run directory {path} is a file. Choose another path.")
    try:
        present = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
        present = [name for name in present if name != LOWERED]
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be read: {error.strerror}.") from error
    if present:
        named = ", ".join(present[:_MOST_ENTRIES_NAMED]) + (", …" if len(present) > _MOST_ENTRIES_NAMED else "")
        raise RunDirectoryError(
            f"the run directory {path} is not empty: it has {named}. "
            "A run writes into a new or empty directory only: choose another; or, if a run is there, go on "
            "with it by resume (--resume)."
        )
