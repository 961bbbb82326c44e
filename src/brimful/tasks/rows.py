"""Rows of named texts from CSV, TSV and JSON Lines files."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.errors import DataError, UsageError
from brimful.tasks.bad_samples import BadSample

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
TABLES = (*_DELIMITERS, *_JSON_LINES)
"""Ends of the names of files that have rows."""

_LONE_SURROGATE = re.compile("[\udc80-\udcff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was asked for of one row."""

    where: str
    values: tuple[str, ...]


def read_text(path: Path, encoding: str) -> str:
    """A whole file as text; in UTF-8, bytes that are none are kept as lone surrogates, see `undecoded`.

    Args:
        path: The file.
        encoding: As Python names it.

    Returns:
        Its text.

    Raises:
        UsageError: There is no such file or encoding.
        DataError: Another encoding than UTF-8 does not fit the file.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{path} begins as UTF-16 does. Say so: encoding='utf-16', --encoding utf-16.")
        return content.decode("utf-8-sig", errors="surrogateescape")
    try:
        return content.decode(encoding)
    except LookupError as error:
        raise UsageError(f"there is no encoding {encoding!r}; utf-8 and latin-1 are ones.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in {encoding}: at byte {error.start}, {error.reason}.") from error


def undecoded(text: str) -> str | None:
    """Why a text is not what its file says; None if it is.

    Args:
        text: As `read_text` gave it.

    Returns:
        The first byte that does not fit.
    """
    found = _LONE_SURROGATE.search(text)
    if found is None:
        return None
    byte = ord(found[0]) - 0xDC00
    return f"byte 0x{byte:02X} is no UTF-8; another --encoding, such as latin-1, may fit"


def read_rows(path: Path, columns: Sequence[str], encoding: str) -> Iterator[Row | BadSample]:
    """The rows of a file, in its order.

    Args:
        path: A .csv or .tsv file with a header, or a .jsonl file of objects.
        columns: Which values of each row, by name.
        encoding: Of the file.

    Yields:
        A row with the values as text, or why it has none.

    Raises:
        UsageError: There is no such file, or it has no such column.
    """
    text = read_text(path, encoding)
    if path.suffix.lower() in _JSON_LINES:
        records = _json_lines(path, text)
    elif path.suffix.lower() in _DELIMITERS:
        records = _table(path, text, _DELIMITERS[path.suffix.lower()], columns)
    else:
        raise UsageError(f"{path} is none of {', '.join(TABLES)}, by its name.")
    for where, record in records:
        yield record if isinstance(record, BadSample) else _row(where, record, columns)


def _table(
    path: Path, text: str, delimiter: str, columns: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any] | BadSample]]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter, strict=True)
    found = reader.fieldnames or []
    missing = [name for name in columns if name not in found]
    if missing:
        raise UsageError(
            f"{path} has no column {', '.join(missing)}. It has {', '.join(found) or 'none'}. Name the columns "
            "that are meant: --text-column, --label-column."
        )
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield where, BadSample(where=where, why=f"no row of a table: {error}")
        else:
            yield where, record


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, dict[str, Any] | BadSample]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            yield where, BadSample(where=where, why=f"no JSON: {error}")
        else:
            is_object = isinstance(record, dict)
            yield where, record if is_object else BadSample(where=where, why="no JSON object")


def _row(where: str, record: dict[str, Any], columns: Sequence[str]) -> Row | BadSample:
    values = []
    for name in columns:
        value = record.get(name)
        if value is None or isinstance(value, dict | list) or not str(value).strip():
            found = (
                "no"
                if value is None
                else "an empty"
                if not str(value).strip()
                else f"a {type(value).__name__} as"
            )
            return BadSample(where=where, why=f"{found} {name!r}")
        text = str(value)
        why = undecoded(text)
        if why is not None:
            return BadSample(where=where, why=f"{name!r}: {why}")
        values.append(text)
    return Row(where=where, values=tuple(values))
