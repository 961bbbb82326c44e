"""Measurements of this machine in the user's cache directory: read, checked, and replaced as a whole."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from brimful.codec import from_builtins, from_json_document, parse_json, read_regular_file, to_json_document
from brimful.errors import FileFormatError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CACHE_VERSION = 4


def cache_directory() -> Path:
    """Where all measurements of this machine are kept.

    Returns:
        `$XDG_CACHE_HOME/brimful`, else `~/.cache/brimful`; it need not exist yet.

    Raises:
        RuntimeError: There is no home directory.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "brimful"


_MOST_SHOWN = 100
"""Characters of an entry's key that a warning shows. A choice."""

Record = TypeVar("Record", bound="DataclassInstance")


def read_kept(file_name: str, section: str, record: type[Record]) -> dict[str, Record]:
    """Measurements kept earlier; none if the file is missing or of another version.

    What is damaged is a warning, and is not used.

    Args:
        file_name: In the cache directory.
        section: The document's part that holds them.
        record: What an entry is.

    Returns:
        The records, each under the key it was kept with.
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
        document = from_builtins(content, dict[str, Any], where=where)
        if document.get("version") != CACHE_VERSION:
            return {}
        entries = from_builtins(document.get(section), dict[str, Any], where=f"{where}: field `{section}`")
        for key, values in entries.items():
            try:
                kept[key] = from_json_document(values, record, where=f"{where}: {key[:_MOST_SHOWN]!r}")
            except FileFormatError as error:
                damage.append(error)
    except FileFormatError as error:
        damage.append(error)
    if damage:
        warnings.warn(f"{damage[0]} It is not used; what is needed is measured again.", stacklevel=3)
    return kept


def write_kept(file_name: str, section: str, kept: Mapping[str, DataclassInstance], *, what: str) -> None:
    """Keep measurements for later; where the file cannot be written, that is a warning.

    Args:
        file_name: In the cache directory; is replaced as a whole.
        section: The document's part that holds them.
        kept: All records to be kept.
        what: Names them in the warning.
    """
    document = {
        "version": CACHE_VERSION,
        section: {key: to_json_document(record) for key, record in kept.items()},
    }
    try:
        path = cache_directory() / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it must see the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        Path(file.name).replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        warnings.warn(f"{what} could not be kept: {error}", stacklevel=3)
