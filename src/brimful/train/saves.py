"""Saves: everything that a run needs to go on exactly, whole and checked, or not there at all.

    saves/step-000000120/
      model.safetensors   parameters and buffers
      state.pt            optimizer, schedule, loss scaler, random numbers, place in the data
      manifest.json       size and SHA-256 of both

A save is written beside the others under another name, brought to the disk and then renamed, which happens
whole or not at all; only then are the oldest taken away. What is read is checked first, and read by loaders
that run no code (safetensors, and `torch.load` with `weights_only`).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from brimful.errors import ResumeError, SaveError, UsageError
from brimful.files import bring_to_disk, free_bytes
from brimful.train.weights import TIED, distinct_tensors, load_weights
from brimful.units import format_bytes

SAVES = "saves"
VERSION = 2
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
        try:
            load_weights(model, self.path / _MODEL)
        except UsageError as error:
            raise ResumeError(f"the run cannot be resumed with this model: {error}") from error


class Saves:
    """Writes the saves of one run, each while training goes on.

    Args:
        run_dir: The run directory.
        keep: How many to keep, the newest.
    """

    def __init__(self, run_dir: Path, *, keep: int) -> None:
        self._directory = run_dir / SAVES
        self._keep = keep
        self._writing: threading.Thread | None = None
        self._failure: SaveError | UsageError | None = None
        self._is_checked = False

    def write(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Copy everything to the host, and write it while training goes on.

        Args:
            step: Steps taken.
            model: Its parameters and buffers.
            state: Plain containers of numbers, text and tensors.

        Raises:
            SaveError: The save before this one could not be written, or this one, the first.
            UsageError: What is to be saved cannot be loaded without running code.
        """
        self.wait()
        tensors, tied = distinct_tensors(model, copies=True)
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state)
        self._writing = threading.Thread(
            target=self._write_safely, args=(step, tensors, tied, copied), name="brimful save"
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

    def _write_safely(
        self, step: int, tensors: dict[str, Tensor], tied: dict[str, str], state: dict[str, Any]
    ) -> None:
        path = self._directory / f"step-{step:09d}"
        partial = self._directory / f".{path.name}{_PARTIAL}"
        needed = sum(tensor.nbytes for tensor in tensors.values())
        try:
            self._write(partial, path, tensors, tied, {"step": step} | state)
            self._take_oldest_away()
        except UsageError as error:
            self._failure = error
            shutil.rmtree(partial, ignore_errors=True)
        except Exception as error:  # whatever it is, the thread's end is not to hide it
            self._failure = SaveError(
                f"the save after step {step} could not be written to {path}: {type(error).__name__}: {error}.\n"
                f"  needed: at least {format_bytes(needed)}; {_free(self._directory)}\n"
                "  The saves before it are whole."
            )
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside_after(self, step: int) -> None:
        """Rename saves of later steps, which were refused, so that they count no more.

        Args:
            step: Of the save that the run goes on from.
        """
        for path in _found(self._directory):
            if int(path.name[5:]) > step:
                shutil.rmtree(path.with_name(f"refused-{path.name}"), ignore_errors=True)
                path.rename(path.with_name(f"refused-{path.name}"))

    def _write(
        self,
        partial: Path,
        path: Path,
        tensors: dict[str, Tensor],
        tied: dict[str, str],
        state: dict[str, Any],
    ) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / _MODEL, metadata={"format": "pt", TIED: json.dumps(tied)})
        self._write_state(state, partial / _STATE)
        files = {name: _digest(partial / name) for name in (_MODEL, _STATE)}
        (partial / _MANIFEST).write_text(_manifest_text(state["step"], files))
        for name in (_MODEL, _STATE, _MANIFEST):
            bring_to_disk(partial / name)
        bring_to_disk(partial)
        shutil.rmtree(path, ignore_errors=True)  # of a run that came this far before
        partial.rename(path)
        bring_to_disk(self._directory)

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
        self._is_checked = True

    def _take_oldest_away(self) -> None:
        for old in _found(self._directory)[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)


def _free(directory: Path) -> str:
    try:
        return f"free: {format_bytes(free_bytes(directory))}"
    except OSError as error:
        return f"what is free cannot be told ({error.strerror})"


def newest_save(run_dir: Path, refused: Callable[[str], None]) -> Save | None:
    """The newest save of a run that is whole.

    Args:
        run_dir: The run directory.
        refused: Told of each newer one that is not.

    Returns:
        It, with all of its state but the weights; None if the run saved nothing.

    Raises:
        ResumeError: There are saves, and none is whole.
    """
    found = _found(run_dir / SAVES)
    reasons = []
    for path in found:
        try:
            return _read(path)
        except _NotWhole as reason:
            reasons.append(f"{path} is not used: {reason}")
            refused(reasons[-1])
    if found:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise ResumeError(f"no save of {run_dir} is whole, so the run cannot be resumed.\n{listed}")
    return None


class _NotWhole(Exception):  # noqa: N818 - a reason, not an error of its own
    pass


def _found(directory: Path) -> list[Path]:
    """Saves by name, the newest first."""
    paths = directory.glob("step-*") if directory.is_dir() else ()
    return sorted((path for path in paths if path.name[5:].isdecimal()), reverse=True)


def _read(path: Path) -> Save:
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
        _check(path / name, files.get(name, {}))
    try:
        state = torch.load(path / _STATE, weights_only=True, map_location="cpu")
    except (OSError, pickle.UnpicklingError, RuntimeError) as error:
        raise _NotWhole(f"its {_STATE} cannot be read ({error})") from error
    return Save(path=path, step=state["step"], state=state)


def _manifest_text(step: int, files: Mapping[str, Any]) -> str:
    """The manifest; the last line is the digest of those before."""
    manifest = {"brimful_save": VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": digest}, indent=2) + "\n"


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = _digest(path)
    except OSError as error:
        raise _NotWhole(f"its {path.name} cannot be read ({error.strerror})") from error
    for what in ("bytes", "sha256"):
        if found[what] != expected.get(what):
            raise _NotWhole(f"its {path.name} has {what} {found[what]}, and {expected.get(what)} were saved")


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
