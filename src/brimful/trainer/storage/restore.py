"""The files of a save, and how the newest complete one of a run is found, checked and read.

`manifest.json` lists the files of a save with size and SHA-256, and has a digest of itself. The files are not
trusted: they must be regular files with the names that a save has, nothing else is opened, and no more is read
than was written; loading them runs no code (safetensors, and `torch.load` with `weights_only`); `checkpoint.py`
checks types and ranges. A save that fails any of these checks is refused, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from brimful.codec import NonNegativeInt, from_json_document, parse_json, read_regular_file
from brimful.distributed.ranks import SINGLE, Ranks
from brimful.errors import FileFormatError, OutOfMemoryError, ResumeError
from brimful.execution.attached import is_quantization_metadata, load_state
from brimful.execution.out_of_memory import with_room
from brimful.torch_utils.module_names import plain_state, wrapped_state
from brimful.trainer.storage.checkpoint import Checkpoint
from brimful.trainer.storage.shards import SHARDS, check_alike, check_names, load_model, load_optimizer_state
from brimful.trainer.storage.weights import read_tensors, read_tied

SAVE_VERSION = 4
SAVES = "saves"
"""The directory of the saves in a run directory."""
PARTIAL = ".partial"
"""Suffix of the name of a save that is being written; the name starts with a dot."""
MODEL, RUN, STATE, MANIFEST = "model.safetensors", "run.json", "state.pt", "manifest.json"
FROZEN = "frozen.safetensors"
"""The parameters that are not trained; absent if there are none, or if the model is sharded."""
_SHARD = re.compile(SHARDS + r"/[0-9]{5}-of-[0-9]{5}\.safetensors")
_NAME = re.compile(r"step-[0-9]{1,18}")


def name_of(step: int) -> str:
    """The name of the save after a step."""
    return f"step-{step:09d}"


def by_step(saves: Path) -> list[Path]:
    """The saves in a directory, the newest first."""
    paths = [path for path in saves.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(paths, key=step_of, reverse=True)


def find_saves(run_dir: Path) -> list[Path]:
    """List the directories of the saves of a run, the newest first; they may be damaged.

    A directory of saves that cannot be read raises ResumeError.
    """
    saves = run_dir / SAVES
    if not os.path.lexists(saves):
        return []
    try:
        return by_step(saves)
    except OSError as error:
        link = f" It is a link to {saves.readlink()}." if saves.is_symlink() else ""
        raise ResumeError(
            f"the saves of {run_dir} cannot be read: {saves}: {error.strerror}.{link} Nothing was changed. Is "
            "its disk mounted? Bring it back to resume the run, or train in a new run directory."
        ) from error


def step_of(save: Path) -> int:
    """The step in the name of a save."""
    return int(save.name.removeprefix("step-"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """Size and hash of a file."""

    bytes: NonNegativeInt
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`."""

    brimful_save: int
    step: NonNegativeInt
    files: dict[str, Digest]
    sha256: str
    """The digest of the other fields; see `manifest_text`."""


def read_manifest(save: Path) -> Manifest:
    """Read the manifest of a save, and check that it is unchanged since it was written."""
    content = read_regular_file(save / MANIFEST, what="manifest")
    where = f"its {MANIFEST}"
    document = parse_json(content, where=where)
    version = document.get("brimful_save") if isinstance(document, dict) else None
    if isinstance(version, int) and version != SAVE_VERSION:
        raise FileFormatError(f"it is of version {version}; this brimful reads version {SAVE_VERSION}")
    manifest = from_json_document(document, Manifest, where=where)
    if content != manifest_text(document["step"], document["files"]).encode():
        raise FileFormatError(f"{where} was changed")
    if manifest.step != step_of(save):
        raise FileFormatError(f"{where} is of step {manifest.step}")
    return manifest


def manifest_text(step: int, files: Mapping[str, Any]) -> str:
    """The JSON of a manifest; its last field is the digest of the others."""
    manifest = {"brimful_save": SAVE_VERSION, "step": step, "files": files}
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps(manifest | {"sha256": digest}, indent=2) + "\n"


def check_listed(save: Path, manifest: Manifest) -> None:
    """Check that a manifest lists the files of a save, and that the directory has no others."""
    for name in manifest.files:
        if name not in (MODEL, FROZEN, RUN, STATE) and not _SHARD.fullmatch(name):
            raise FileFormatError(f"its {MANIFEST} names {name!r}, which is not a file of a save")
    if missing := {MODEL, RUN, STATE} - manifest.files.keys():
        raise FileFormatError(f"its {MANIFEST} does not name {min(missing)}")
    try:
        found = {path.name for path in save.iterdir()} - {MANIFEST, SHARDS}
        if os.path.lexists(save / SHARDS):
            found |= {f"{SHARDS}/{path.name}" for path in (save / SHARDS).iterdir()}
    except OSError as error:
        raise FileFormatError(f"it cannot be read ({error.strerror})") from error
    if unknown := found - manifest.files.keys():
        raise FileFormatError(f"its {min(unknown)} was not saved with it")


def check_file(save: Path, name: str, expected: Digest) -> None:
    """Check the size of a file of a save, then its digest."""
    try:
        with _opened(save / name) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes != expected.bytes:
                raise FileFormatError(f"its {name} has bytes {size_bytes}, and {expected.bytes} were saved")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FileFormatError(f"its {name} cannot be read ({error.strerror})") from error
    if digest != expected.sha256:
        raise FileFormatError(f"its {name} has sha256 {digest}, and {expected.sha256} were saved")


def digest_of(path: Path) -> dict[str, Any]:
    """The size and digest of a file, as the manifest lists them."""
    with _opened(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": sha256}


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file; refuse a FIFO or a device without blocking on it."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileFormatError(f"its {path.name} is not a regular file")
        yield file


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A complete checkpoint."""

    path: Path
    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Number of steps taken before the save."""
        return self.checkpoint.step

    def load_model(self, model: nn.Module) -> None:
        """Load the saved parameters and buffers into a model."""
        try:
            if (self.path / SHARDS).is_dir() or any(isinstance(p, DTensor) for p in model.parameters()):
                load_model(model, self.path, self._whole_names())
            else:
                _load_whole(model, [self.path / name for name in self._whole_names()])
        except FileFormatError as error:
            raise ResumeError(f"the run cannot be resumed: {error}") from error

    def optimizer_state_for(self, optimizer: Optimizer) -> dict[str, Any]:
        """Read the saved `state_dict` of the optimizer with the shards that its parameters need."""
        return load_optimizer_state(optimizer, self.checkpoint.optimizer, self.path)

    def _whole_names(self) -> list[str]:
        """The names of the files of unsharded tensors."""
        return [name for name in (MODEL, FROZEN) if name == MODEL or (self.path / name).exists()]

    def release(self) -> None:
        """Free the optimizer state and the average, once they are loaded."""
        for tensors in (self.checkpoint.optimizer, self.checkpoint.average):
            if tensors is not None:
                tensors.clear()


def newest_save(
    run_dir: Path, refused: Callable[[str], None], *, ranks: Ranks = SINGLE, maps: bool = False
) -> Save | None:
    """Find the newest complete checkpoint of a run, and read its state.

    All ranks call this together, and each checks some of the files. `refused` is called with a message for each
    newer one that is not complete. `maps` maps the tensors of the state into memory instead of reading them.
    Returns None if the run has none. Raises ResumeError if none is complete.
    """
    found = _found_alike(run_dir, ranks)
    reasons = []
    for path in found:
        reason, save = None, None
        try:
            save = _read(path, ranks, maps=maps)
        except FileFormatError as error:
            reason = str(error).removesuffix(".")
        refusal = next(filter(None, ranks.all_gather(reason)), None)
        if refusal is None:
            return save
        reasons.append(f"{path} is not used: {refusal}")
        refused(reasons[-1])
    if found:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise ResumeError(f"{run_dir} has no complete checkpoint, so the run cannot be resumed.\n{listed}")
    return None


def _found_alike(run_dir: Path, ranks: Ranks) -> list[Path]:
    """List the saves; raise if the ranks see different ones."""
    found: list[Path] = []
    problem = None
    try:
        found = find_saves(run_dir)
    except ResumeError as error:
        problem = str(error)
    seen = ranks.all_gather((problem, [path.name for path in found]))
    for problem, _names in seen:
        if problem is not None:
            raise ResumeError(problem)
    if any(each != seen[0] for each in seen):
        listed = "; ".join(
            f"rank {rank}: {', '.join(names) or 'none'}" for rank, (_problem, names) in enumerate(seen)
        )
        raise ResumeError(
            f"the ranks found different saves in {run_dir} ({listed}). All of them must see the same run "
            "directory: put it on a file system that every machine has."
        )
    return found


def _read(path: Path, ranks: Ranks, *, maps: bool) -> Save:
    manifest = read_manifest(path)
    check_listed(path, manifest)
    for name in sorted(manifest.files)[ranks.rank :: ranks.count]:
        check_file(path, name, manifest.files[name])
    read_tied(path / MODEL, elsewhere=(path / SHARDS).is_dir())
    if FROZEN in manifest.files:
        read_tied(path / FROZEN)
    checkpoint = Checkpoint.from_documents(
        read_regular_file(path / RUN, what="file"), _load_state(path / STATE, maps=maps), where="its "
    )
    if checkpoint.step != manifest.step:
        raise FileFormatError(f"its {RUN} is of step {checkpoint.step}")
    return Save(path=path, checkpoint=checkpoint)


def _load_state(path: Path, *, maps: bool) -> object:
    try:
        return with_room(
            partial(torch.load, path, weights_only=True, map_location="cpu", mmap=maps),
            during=f"{path} is read",
        )
    except OutOfMemoryError:
        raise
    except Exception as error:  # any error: the file may hold anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise FileFormatError(f"its {path.name} cannot be read ({reason})") from error


def _load_whole(model: nn.Module, paths: Sequence[Path]) -> None:
    """Load a model from files that together have the same names, shapes and types."""
    tensors = {name: tensor for path in paths for name, tensor in read_tensors(path).items()}
    own = {name: value for name, value in plain_state(model).items() if isinstance(value, Tensor)}
    check_names(paths[0].parent, own.keys() - tensors.keys(), tensors.keys() - own.keys())
    for name, value in own.items():
        if not is_quantization_metadata(name):
            check_alike(name, value, tensors[name].shape, tensors[name].dtype)
    load_state(model, wrapped_state(model, tensors))
