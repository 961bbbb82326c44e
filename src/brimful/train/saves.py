"""Saves: everything that a run needs to go on exactly, whole and checked, or not there at all.

    saves/step-000000120/
      model.safetensors   parameters and buffers
      state.pt            optimizer, schedule, loss scaler, random numbers, place in the data
      shards/             what is divided over ranks of both, a file of each rank; see `shards.py`
      manifest.json       size and SHA-256 of each file

A save is written beside the others under another name, brought to the disk and then renamed, which happens
whole or not at all; only then are the oldest taken away. Where parameters are divided, each rank writes its
part, and the first renames once all have told it what they have written. What is read is checked first, each
rank a part of the files, and read by loaders that run no code (safetensors, and `torch.load` with
`weights_only`).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from brimful.errors import ResumeError, SaveError, UsageError
from brimful.files import bring_to_disk, free_bytes
from brimful.train.ranks import ALONE, Ranks
from brimful.train.shards import (
    SHARDS,
    Shards,
    divided_of_model,
    divided_of_optimizer,
    load_model,
    load_optimizer_state,
)
from brimful.train.weights import TIED, distinct_tensors, load_weights
from brimful.units import format_bytes

T = TypeVar("T")

SAVES = "saves"
VERSION = 3
_MODEL, _STATE, _MANIFEST = "model.safetensors", "state.pt", "manifest.json"
_PARTIAL = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save that was found whole."""

    path: Path
    step: int
    """Steps taken before it."""
    state: dict[str, Any]
    """Optimizer, schedule, loss scaler, random numbers, place in the data."""

    def load_model(self, model: nn.Module) -> None:
        """Give a model the saved parameters and buffers.

        Args:
            model: Of the same structure as the one that was saved.

        Raises:
            ResumeError: It is of another structure.
        """
        if (self.path / SHARDS).is_dir() or any(isinstance(p, DTensor) for p in model.parameters()):
            load_model(model, self.path, _MODEL)
            return
        try:
            load_weights(model, self.path / _MODEL)
        except UsageError as error:
            raise ResumeError(f"the run cannot be resumed with this model: {error}") from error

    def state_for(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state with all that the optimizer needs of its own, on its way to the parameters as they are.

        Args:
            optimizer: Over parameters that may be divided.

        Returns:
            What is not held here any more: it is as large as the optimizer's state.

        Raises:
            ResumeError: The saved optimizer has other parameters.
        """
        of_optimizer = self.state.pop("optimizer")
        return self.state | {"optimizer": load_optimizer_state(optimizer, of_optimizer, self.path)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """What one rank writes, on the host."""

    step: int
    shards: Shards | None
    """None where nothing is divided."""
    tensors: dict[str, Tensor]
    tied: dict[str, str]
    state: dict[str, Any]
    """Of the first rank; others write none of these three."""

    @property
    def nbytes(self) -> int:
        parts = {} if self.shards is None else self.shards.tensors
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *parts.values()))


class Saves:
    """Writes the saves of one run, each while training goes on.

    Args:
        run_dir: The run directory.
        keep: How many to keep, the newest.
        ranks: Those that write together, each its part, over connections that nothing else uses meanwhile;
            one that writes whole tensors is alone.
    """

    def __init__(self, run_dir: Path, *, keep: int, ranks: Ranks = ALONE) -> None:
        self._directory = run_dir / SAVES
        self._keep = keep
        self._ranks = ranks
        self._writing: threading.Thread | None = None
        self._failure: SaveError | UsageError | None = None
        self._is_checked = False

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Copy everything to the host, and write it while training goes on; all ranks do so together.

        Args:
            step: Steps taken.
            model: Its parameters and buffers.
            state: Plain containers of numbers, text and tensors; the first rank's is written.

        Raises:
            SaveError: The save before this one could not be written, or this one, the first.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        self.wait()
        self._writing = threading.Thread(
            target=self._write_safely, args=(self._copied(step, model, state),), name="brimful save"
        )
        is_first = not self._is_checked
        self._writing.start()
        if is_first:
            self.wait()  # that it can be read is to be known before hours of training

    def wait(self) -> None:
        """Wait until the save under way is on the disk.

        Raises:
            SaveError: It could not be written; those before it are whole.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _copied(self, step: int, model: nn.Module, state: dict[str, Any]) -> _Copies:
        whole, divided, tied_parts = divided_of_model(model)
        of_optimizer, divided_state = divided_of_optimizer(state["optimizer"])
        divided |= divided_state
        is_first = self._ranks.is_first
        tensors, tied = distinct_tensors(whole, copies=True) if is_first else ({}, {})
        return _Copies(
            step=step,
            shards=Shards(divided) if self._ranks.are_several else None,
            tensors=tensors,
            tied=tied | tied_parts,
            state=tree_map_only(
                Tensor,
                lambda tensor: tensor.detach().to("cpu", copy=True),
                {"step": step} | state | {"optimizer": of_optimizer},
            )
            if is_first
            else {},
        )

    def _write_safely(self, copies: _Copies) -> None:
        """Write, and keep why it could not be, the same on every rank."""
        path = self._directory / f"step-{copies.step:09d}"
        partial = self._directory / f".{path.name}{_PARTIAL}"
        try:
            self._all_do(lambda: self._begin(partial, copies))
            written = self._all_do(lambda: self._write_own(partial, copies))
            files = {name: digest for of_rank in written for name, digest in of_rank.items()}
            self._all_do(lambda: self._finish(partial, path, copies, files))
            self._is_checked = True
        except UsageError as error:
            self._failure = error
        except Exception as error:  # whatever it is, the thread's end is not to hide it
            self._failure = SaveError(
                f"the save after step {copies.step} could not be written to {path}: {_told(error)}.\n"
                f"  needed: at least {format_bytes(copies.nbytes)}; {_free(self._directory)}\n"
                "  The saves before it are whole."
            )
        if self._failure is not None and self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Clear half written saves, and rename those of later steps, which were refused: they count no more.

        Args:
            step: Of the save that the run goes on from.
        """
        for partial in self._directory.glob(f".*{_PARTIAL}"):
            shutil.rmtree(partial, ignore_errors=True)
        for path in _found(self._directory):
            if int(path.name[5:]) > step:
                shutil.rmtree(path.with_name(f"refused-{path.name}"), ignore_errors=True)
                path.rename(path.with_name(f"refused-{path.name}"))

    def _all_do(self, action: Callable[[], T]) -> list[T]:
        """What each rank's action returns; if one raises, all raise the same."""
        value: T | None = None
        failure: tuple[bool, str] | None = None
        try:
            value = action()
        except Exception as error:
            if not self._ranks.are_several:
                raise
            of_user = isinstance(error, UsageError)
            failure = of_user, str(error) if of_user else f"rank {self._ranks.rank}: {_told(error)}"
        found = self._ranks.gather((value, failure))
        for _value, told in found:
            if told is not None:
                raise UsageError(told[1]) if told[0] else _FailedSomewhereError(told[1])
        return [value for value, _told in found]  # type: ignore[misc]

    def _begin(self, partial: Path, copies: _Copies) -> None:
        if self._ranks.is_first:
            shutil.rmtree(partial, ignore_errors=True)
            (partial if copies.shards is None else partial / SHARDS).mkdir(parents=True)

    def _write_own(self, partial: Path, copies: _Copies) -> dict[str, dict[str, Any]]:
        """What this rank has written: sizes and digests by name."""
        names = []
        if self._ranks.is_first:
            kept = {"format": "pt", TIED: json.dumps(copies.tied)}
            save_file(copies.tensors, partial / _MODEL, metadata=kept)
            self._write_state(copies.state, partial / _STATE)
            names += [_MODEL, _STATE]
        if copies.shards is not None:
            names.append(f"{SHARDS}/{self._ranks.rank + 1:05d}-of-{self._ranks.count:05d}.safetensors")
            copies.shards.write(partial / names[-1])
        for name in names:
            bring_to_disk(partial / name)
        return {name: _digest(partial / name) for name in names}

    def _finish(
        self, partial: Path, path: Path, copies: _Copies, files: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Let the save be there, now that all of it is on the disk."""
        if not self._ranks.is_first:
            return
        (partial / _MANIFEST).write_text(_manifest_text(copies.step, files))
        bring_to_disk(partial / _MANIFEST)
        if copies.shards is not None:
            bring_to_disk(partial / SHARDS)
        bring_to_disk(partial)
        shutil.rmtree(path, ignore_errors=True)  # of a run that came this far before
        partial.rename(path)
        bring_to_disk(self._directory)
        self._take_oldest_away()

    def _write_state(self, state: dict[str, Any], path: Path) -> None:
        """Write the state; the first time, see that it can be read without running code."""
        try:
            torch.save(state, path)
            if not self._is_checked:
                torch.load(path, weights_only=True)
        except (pickle.PickleError, AttributeError, TypeError) as error:
            raise UsageError(
                "the run cannot be saved: the state of the optimizer or of the schedule holds objects that "
                f"cannot be loaded without running code: {error}. Keep plain numbers, text, tensors, lists and "
                "dicts in their state_dict, or train without run_dir."
            ) from error

    def _take_oldest_away(self) -> None:
        for old in _found(self._directory)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)


class _FailedSomewhereError(Exception):
    """An action of a rank raised."""


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, _FailedSomewhereError) else f"{type(error).__name__}: {error}"


def _free(directory: Path) -> str:
    try:
        return f"free: {format_bytes(free_bytes(directory))}"
    except OSError as error:
        return f"what is free cannot be told ({error.strerror})"


def newest_save(
    run_dir: Path, refused: Callable[[str], None], *, ranks: Ranks = ALONE, maps: bool = False
) -> Save | None:
    """The newest save of a run that is whole.

    Args:
        run_dir: The run directory.
        refused: Told of each newer one that is not.
        ranks: Those that look for it together, each checking a part of the files.
        maps: Leave what is large of its state on the disk until it is used.

    Returns:
        It, with all of its state but the weights; None if the run saved nothing.

    Raises:
        ResumeError: There are saves, and none is whole; or the ranks see different ones.
    """
    found = _found(run_dir / SAVES)
    _check_all_see_the_same(run_dir, found, ranks)
    reasons = []
    for path in found:
        reason, save = _read_or_reason(path, ranks, maps=maps)
        told = next(filter(None, ranks.gather(reason)), None)
        if told is None:
            return save
        reasons.append(f"{path} is not used: {told}")
        refused(reasons[-1])
    if found:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise ResumeError(f"no save of {run_dir} is whole, so the run cannot be resumed.\n{listed}")
    return None


def _check_all_see_the_same(run_dir: Path, found: Sequence[Path], ranks: Ranks) -> None:
    seen = ranks.gather([path.name for path in found])
    if any(names != seen[0] for names in seen):
        listed = "; ".join(f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(seen))
        raise ResumeError(
            f"the ranks found different saves in {run_dir} ({listed}). All of them must see the same run "
            "directory: put it on a file system that every machine has."
        )


class _NotWhole(Exception):  # noqa: N818 - a reason, not an error of its own
    pass


def _found(directory: Path) -> list[Path]:
    """Saves by name, the newest first."""
    paths = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((path for path in paths if path.name[5:].isdecimal()), reverse=True)


def _read_or_reason(path: Path, ranks: Ranks, *, maps: bool) -> tuple[str | None, Save | None]:
    try:
        return None, _read(path, ranks, maps=maps)
    except _NotWhole as reason:
        return str(reason), None


def _read(path: Path, ranks: Ranks, *, maps: bool) -> Save:
    try:
        text = (path / _MANIFEST).read_text()
        manifest = json.loads(text)
        version, files = manifest["brimful_save"], manifest["files"]
        is_whole = version != VERSION or text == _manifest_text(manifest["step"], files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _NotWhole(f"its {_MANIFEST} cannot be read ({error})") from error
    if version != VERSION:
        raise _NotWhole(f"it is of version {version}; this brimful reads version {VERSION}")
    if not is_whole:
        raise _NotWhole(f"its {_MANIFEST} was changed")
    for name in (_MODEL, _STATE):
        files.setdefault(name, {})
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {_MANIFEST}
    if unknown := there - set(files):
        raise _NotWhole(f"its {min(unknown)} was not saved with it")
    for name in sorted(files)[ranks.rank :: ranks.count]:
        _check(path, name, files[name])
    try:
        state = torch.load(path / _STATE, weights_only=True, map_location="cpu", mmap=maps)
    except (OSError, pickle.UnpicklingError, RuntimeError) as error:
        raise _NotWhole(f"its {_STATE} cannot be read ({error})") from error
    return Save(path=path, step=state["step"], state=state)


def _manifest_text(step: int, files: Mapping[str, Any]) -> str:
    """The manifest; the last line is the digest of those before."""
    manifest = {"brimful_save": VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": digest}, indent=2) + "\n"


def _check(save: Path, name: str, expected: Mapping[str, Any]) -> None:
    try:
        found = _digest(save / name)
    except OSError as error:
        raise _NotWhole(f"its {name} cannot be read ({error.strerror})") from error
    for what in ("bytes", "sha256"):
        if found[what] != expected.get(what):
            raise _NotWhole(f"its {name} has {what} {found[what]}, and {expected.get(what)} were saved")


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
