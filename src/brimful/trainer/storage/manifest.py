"""The manifest of a save, and the checks that its files are those that were written.

`manifest.json` lists the files of a save with size and SHA-256, and has a digest of itself. The files must be
regular files with the names that a save has: nothing else is opened, and no more is read than was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from brimful.codec import NonNegativeInt, from_builtins, parse_json, read_regular_file
from brimful.errors import FileFormatError, ResumeError

VERSION = 4
SAVES = "saves"
"""The directory of the saves in a run directory."""
PARTIAL = ".partial"
"""Suffix of the name of a save that is being written; the name starts with a dot."""
MODEL, RUN, STATE, MANIFEST = "model.safetensors", "run.json", "state.pt", "manifest.json"
FROZEN = "frozen.safetensors"
"""The parameters that are not trained; absent if there are none, or if the model is sharded."""
SHARDS = "shards"
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
    """List the directories of the saves of a run, the newest first; they may be damaged."""
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
    if isinstance(version, int) and version != VERSION:
        raise FileFormatError(f"it is of version {version}; this brimful reads version {VERSION}")
    manifest = from_builtins(document, Manifest, where=where)
    if content != manifest_text(document["step"], document["files"]).encode():
        raise FileFormatError(f"{where} was changed")
    if manifest.step != step_of(save):
        raise FileFormatError(f"{where} is of step {manifest.step}")
    return manifest


def manifest_text(step: int, files: Mapping[str, Any]) -> str:
    """The JSON of a manifest; its last field is the digest of the others."""
    manifest = {"brimful_save": VERSION, "step": step, "files": files}
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
