"""Measurements of this machine in the user's cache directory: read, checked, and replaced as a whole."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from brimful.codec import from_json_document, parse_json, read_regular_file, to_json_document
from brimful.errors import FileFormatError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CACHE_VERSION = 5


def cache_directory() -> Path:
    """Directory of all cached measurements: `$XDG_CACHE_HOME/brimful`, else `~/.cache/brimful`.

    It need not exist yet. Raises `RuntimeError` if there is no home directory.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "brimful"


_MOST_SHOWN = 100
"""Characters of an entry's key that a warning shows. A choice."""

Record = TypeVar("Record", bound="DataclassInstance")


def read_kept(file_name: str, section: str, record: type[Record]) -> dict[str, Record]:
    """Cached measurements by the key they were kept with; none if the file is missing or of another version.

    `file_name` is in the cache directory; `section` is the document's part that holds the entries. Damaged or
    altered entries are not used, and a warning names the first.
    """
    try:
        path = cache_directory() / file_name
    except RuntimeError:  # there is no home directory
        return {}
    if not os.path.lexists(path):
        return {}
    where = f"the cache of measurements {path}"
    kept: dict[str, Record] = {}
    damage: list[FileFormatError] = []
    try:
        content = parse_json(read_regular_file(path, what="cache of measurements"), where=where)
        document = from_json_document(content, dict[str, Any], where=where)
        if document.get("version") != CACHE_VERSION:
            return {}
        entries = from_json_document(document.get(section), dict[str, Any], where=f"{where}: field `{section}`")
        for key, values in entries.items():
            try:
                kept[key] = _read_entry(key, values, record, where=f"{where}: {key[:_MOST_SHOWN]!r}")
            except FileFormatError as error:
                damage.append(error)
    except FileFormatError as error:
        damage.append(error)
    if damage:
        warnings.warn(f"{damage[0]} It is not used; what is needed is measured again.", stacklevel=3)
    return kept


def keep(file_name: str, section: str, key: str, entry: Record, *, what: str, most: int | None = None) -> None:
    """Keep a measurement beside the others in the cache; a file that cannot be written is a warning.

    The file, in the cache directory, is replaced as a whole. `section` is the document's part that holds the
    entries, `key` names what the measurement is valid for, and `what` names it in the warning. Of all entries
    the latest `most` are kept; None keeps all.
    """
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            kept = read_kept(file_name, section, type(entry))
            kept.pop(key, None)  # the latest is the last
            entries = [_entry(*each) for each in (*kept.items(), (key, entry))]
            document = {"version": CACHE_VERSION, section: dict(entries[-most:] if most else entries)}
            _replace(folder / file_name, json.dumps(document, indent=2, allow_nan=False))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home directory
        warnings.warn(f"{what} could not be kept: {error}", stacklevel=3)


_DIGEST = "digest"
"""Field of an entry beside those of its record."""


def _entry(key: str, record: DataclassInstance) -> tuple[str, dict[str, Any]]:
    values = to_json_document(record)
    return key, values | {_DIGEST: _digest(key, values)}


def _read_entry(key: str, values: Any, record: type[Record], *, where: str) -> Record:
    own = (
        {name: each for name, each in values.items() if name != _DIGEST} if isinstance(values, dict) else values
    )
    made = from_json_document(own, record, where=where)
    if values.get(_DIGEST) != _digest(key, own):
        raise FileFormatError(f"{where} was altered after it was measured.")
    return made


def _digest(key: str, values: Mapping[str, Any]) -> str:
    written = json.dumps([key, values], sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=8).hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the cache directory, as what another process writes to it meanwhile would be lost.

    Nothing is locked on systems or file systems without such locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, content: str) -> None:
    """Write a whole file; another process that reads meanwhile sees the old one or the new one.

    A process that is killed leaves one partial file, which the next writer replaces.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8") as file:
            file.write(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
