"""The run directory: the files of a run, written so that a failure never damages an earlier version.

| file | contents |
|---|---|
| `plan.json`, or `settings.json` without a plan | how the run trains |
| `job.json` | `Job.about`, such as the names of its classes |
| `metrics.jsonl` | a line for each step, validation, recovery and note |
| `weights.safetensors` | the latest weights; the metadata have their step |
| `best.safetensors` | the weights with the lowest validation loss |
| `average.safetensors` | the moving average of the weights, if the run keeps one |
| `saves/` | the saves, see `saves.py`; created before other files have content; if missing, it was moved |
| `fallback.json` | smaller settings for the next launch, if memory ran out on one of several ranks |
| `tensorboard/` | TensorBoard's event files, if requested |
| `result.json` | the `TrainingResult`, once the run has ended |
| `report.txt` | the report that `brimful train` prints of it |
| `unsaved-1/` | the files of a run that ended before its first save and was restarted |

`load_weights(model, directory)` loads the weights; see docs/howto/weights.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from torch import nn

from brimful.errors import ResumeError, RunDirectoryError, SaveError
from brimful.execution.out_of_memory import with_room
from brimful.torch_utils.module_names import plain_state
from brimful.trainer.storage.restore import PARTIAL, SAVES, find_saves
from brimful.trainer.storage.weights import AVERAGE, BEST, TIED, WEIGHTS, distinct_tensors, write_tensors
from brimful.utils.files import bring_to_disk, free_bytes, fresh
from brimful.utils.quantities import format_bytes

PLAN = "plan.json"
SETTINGS = "settings.json"
JOB = "job.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
FALLBACK = "fallback.json"
REPORT = "report.txt"
TENSORBOARD = "tensorboard"
NAMES = (PLAN, SETTINGS, JOB, METRICS, WEIGHTS, BEST, AVERAGE, RESULT)
"""The files that a `RunDirectory` writes."""

_OF_TRAINING = (WEIGHTS, BEST, AVERAGE, RESULT, REPORT)
"""Files of training, which a run from the beginning would overwrite."""

_OF_UNSAVED_RUN = (PLAN, SETTINGS, JOB, TENSORBOARD, METRICS)
"""Files that a run writes before its first save, in the order of moving them: `metrics.jsonl`, which shows that
the run took steps, is last."""

_SET_ASIDE = re.compile(r"unsaved-\d+")

_MOST_ENTRIES_NAMED = 3


_OPEN: weakref.WeakSet[BinaryIO] = weakref.WeakSet()
"""The open `metrics.jsonl` files. A forked DataLoader worker closes its copies, which would keep the locks."""


def _close_in_child() -> None:
    for metrics in list(_OPEN):
        metrics.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class RunDirectory:
    """The directory of one run, locked while open.

    `path` is an empty directory, or one that does not exist: it is created with its parents. With `resumes` it
    may contain a run, to resume or to restart. A method that cannot read or write a file raises SaveError.
    """

    def __init__(self, path: Path | str, *, resumes: bool = False) -> None:
        self.path = Path(path)
        if not resumes:
            check_run_directory(self.path)
        for name in NAMES:
            _check_is_no_directory(self.path / name)
        self._made: list[Path] = []
        """Files and directories that this run created."""
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

    def read_metrics(self) -> bytes:
        """Read `metrics.jsonl`: whole lines, unless it is damaged."""
        with self._writing(METRICS):
            return (self.path / METRICS).read_bytes()

    def cut_metrics(self, lines: bytes, *, keeps_copy: bool) -> Path | None:
        """Cut `metrics.jsonl` to the lines to keep; further lines are appended after them.

        With `keeps_copy` the current content is first copied to another file, whose path is returned; None
        without a copy, or if the file was empty. Without a copy, `lines` must be the start of the file: it is
        only truncated.
        """
        aside = None
        with self._writing(METRICS, len(lines)):
            if keeps_copy and (content := self.read_metrics()):
                aside = unused(self.path, "metrics.damaged-{}.jsonl".format)
                aside.write_bytes(content)
                bring_to_disk(aside)
                self._metrics.truncate(0)
                self._metrics.seek(0)
                self._metrics.write(lines)
            self._metrics.truncate(len(lines))
            self._metrics.seek(0, os.SEEK_END)
        return aside

    def flush_metrics(self) -> int:
        """Flush `metrics.jsonl` to the disk (fsync); return its length in bytes."""
        with self._writing(METRICS):
            os.fsync(self._metrics.fileno())
        return self._metrics.tell()

    def write_json(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a JSON file atomically."""
        content = (json.dumps(document, indent=2) + "\n").encode()
        self._replace(name, len(content), lambda temporary: temporary.write_bytes(content))

    def append_metrics(self, entry: Mapping[str, Any]) -> None:
        """Append a whole line to `metrics.jsonl`, or none."""
        line = (json.dumps(entry) + "\n").encode()
        end = self._metrics.tell()
        with self._writing(METRICS, len(line)):
            try:
                if self._metrics.write(line) != len(line):
                    raise OSError("only a part of the line was written")
            except OSError:
                self._metrics.truncate(end)
                self._metrics.seek(end)
                raise

    def save_weights(self, model: nn.Module, name: str, metadata: Mapping[str, str]) -> Path:
        """Write the parameters and buffers of a model to a file, atomically, with the metadata.

        Tied weights are written once. The names are those without wrappers (`torch.compile`).
        """
        return with_room(partial(self._save_weights, model, name, metadata), during=f"{name} is written")

    def _save_weights(self, model: nn.Module, name: str, metadata: Mapping[str, str]) -> Path:
        tensors, tied = distinct_tensors(plain_state(model))
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        kept = {TIED: json.dumps(tied)} | dict(metadata)
        return self._replace(name, size_bytes, lambda temporary: write_tensors(tensors, temporary, kept))

    def close(self) -> None:
        """Close `metrics.jsonl`. Further calls do nothing."""
        self._metrics.close()

    def discard(self) -> None:
        """Close, and delete what this run created, after it failed before its first step."""
        self.close()
        for path in reversed(self._made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()

    def _replace(self, name: str, size_bytes: int, write: Callable[[Path], object]) -> Path:
        """Write a temporary file, flush it to the disk, then rename it."""
        path, temporary = self.path / name, self.path / f".{name}.partial"
        is_new = not os.path.lexists(path)
        with self._writing(name, size_bytes):
            try:
                write(fresh(temporary))
                shutil.copymode(self.path / METRICS, temporary)  # safetensors makes its files private
                bring_to_disk(temporary)
                temporary.replace(path)
                bring_to_disk(self.path)
            except (OSError, SafetensorError):
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
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

    @contextmanager
    def _writing(self, name: str, size_bytes: int = 0) -> Iterator[None]:
        """Raise SaveError, which says what is there, if the file `name` cannot be read or written."""
        path = self.path / name
        try:
            yield
        except (OSError, SafetensorError) as error:
            before = "What was there before is intact" if path.exists() else "Nothing is there"
            raise SaveError(
                f"{path} could not be written: {getattr(error, 'strerror', None) or error}.\n"
                f"  needed: {format_bytes(size_bytes)}; free: {format_bytes(free_bytes(path))}\n"
                f"  {before}; the weights are still in the model (Trainer.model).\n"
                "  Free some space, or train into another run directory."
            ) from error


def _lock(metrics: BinaryIO, path: Path) -> None:
    """Lock `metrics.jsonl` against other processes until it is closed or this process ends."""
    if os.name != "posix":
        return  # no lock on other systems
    import fcntl

    try:
        fcntl.flock(metrics, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunDirectoryError(
            f"another process is training in the run directory {path}. Wait until it has ended, or choose "
            "another directory."
        ) from None


def check_not_in_use(path: Path) -> None:
    """Check that no other process is training in a run directory."""
    try:
        if (path / METRICS).is_file():
            with (path / METRICS).open("rb") as metrics:
                _lock(metrics, path)
    except OSError as error:
        raise not_usable(str(path / METRICS), error) from error


def check_run_directory(path: Path) -> None:
    """Check that a new run may write to `path`, which may not exist yet. Writes nothing."""
    present = [name for name in entries(path) if name != FALLBACK]
    if present:
        raise not_empty(path, present)


def check_restart(path: Path) -> None:
    """Check that a run without a save can start from the beginning. Writes nothing.

    Its `saves/` may have been moved, or be on a disk that is not mounted: what training wrote is
    refused, not overwritten.
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
    taken a step.
    """
    check_not_in_use(path)
    if not _has_steps(path):
        return None
    aside = unused(path, "unsaved-{}".format)
    try:
        aside.mkdir()
        for name in _OF_UNSAVED_RUN:
            if os.path.lexists(path / name):
                (path / name).rename(aside / name)
    except OSError as error:
        raise not_usable(f"the run directory {path}", error) from error
    return aside


def entries(path: Path) -> list[str]:
    """The sorted names in a directory; none if it does not exist."""
    if not os.path.lexists(path):
        return []
    if path.exists() and not path.is_dir():
        raise RunDirectoryError(f"the run directory {path} is a file. Choose another path.")
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise RunDirectoryError(f"the run directory {path} cannot be read: {error.strerror}.") from error


def not_empty(path: Path, present: Sequence[str]) -> RunDirectoryError:
    """Make the error for a directory that is not empty; `present` are the names in it."""
    named = ", ".join(present[:_MOST_ENTRIES_NAMED]) + (", …" if len(present) > _MOST_ENTRIES_NAMED else "")
    return RunDirectoryError(
        f"the run directory {path} is not empty: it has {named}. A run writes into a new or empty directory "
        "only: choose another; or, if it has a run that is to be resumed, resume it (resume=True, --resume)."
    )


def not_usable(what: str, error: OSError) -> RunDirectoryError:
    """Make the error for a run directory, or a file in it, that cannot be opened or written to."""
    return RunDirectoryError(
        f"{what} cannot be opened and written to: {error.strerror or error}. Choose another run directory."
    )


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


def _check_is_no_directory(file: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(file.lstat().st_mode)
    except OSError:  # it does not exist yet, for example
        return
    if is_directory:
        raise RunDirectoryError(
            f"{file} is a directory, in the place of a file that training writes. Move it away, or choose "
            "another run directory."
        )


def unused(folder: Path, name: Callable[[int], str]) -> Path:
    """The first path in a directory that is free; `name` makes names from 1, 2, and so on."""
    return next(path for number in count(1) if not os.path.lexists(path := folder / name(number)))


def _open_metrics(path: Path, *, exclusive: bool) -> BinaryIO:
    if path.is_symlink():
        raise RunDirectoryError(
            f"{path} is a link to {path.readlink()}, and training writes to files of its run directory only. "
            "Put the file in the place of the link, or choose another run directory."
        )
    system = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_BINARY", "O_NOFOLLOW"))
    flags = os.O_RDWR | os.O_CREAT | sum(system)
    descriptor = os.open(path, flags | (os.O_EXCL if exclusive else 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunDirectoryError(f"{path} is not a regular file. Choose another run directory.")
    return os.fdopen(descriptor, "r+b", buffering=0)
