"""Rows of named texts from CSV, TSV and JSON Lines files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brimful.codec import DOCUMENT_BYTES, read_regular_file
from brimful.errors import DataError, UsageError
from brimful.recipes.bad_samples import BadSample
from brimful.recipes.label_types import Records, of_one_type

Columns = Mapping[str, str]
"""Names of columns in a file, by the option of the recipe that names them, such as `text_column`."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
TABLES = (*_DELIMITERS, *_JSON_LINES)
"""Suffixes of files with rows."""

_UNDECODED = re.compile("[\udc80-\udcff]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MOST_CHARACTERS = 2**31 - 1
"""Characters in one field; csv's own limit of 131072 is too small for a document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The requested columns of one row."""

    where: str
    values: tuple[str, ...]
    labels: tuple[str, ...] = ()


def read_text(path: Path, encoding: str) -> str:
    """Read a whole file as text, without a byte order mark.

    In UTF-8, invalid bytes are kept as lone surrogates, see `undecoded`. Raises `UsageError` if the file or the
    encoding does not exist, or it is not a regular file; `DataError` if the file cannot be decoded in an
    encoding other than UTF-8, or begins as UTF-16 where UTF-8 is expected.
    """
    content = read_regular_file(path, what="file", limit_bytes=_size_bytes(path))
    if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise DataError(f"{path} begins as UTF-16 does. Say so: encoding='utf-16', --encoding utf-16.")
        return content.decode("utf-8-sig", errors="surrogateescape")
    try:
        return content.decode(encoding).removeprefix("\ufeff")
    except LookupError as error:
        raise UsageError(f"there is no encoding {encoding!r}; utf-8 and latin-1 are ones.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in {encoding}: at byte {error.start}, {error.reason}.") from error
    except ValueError as error:  # some encodings say no place
        raise DataError(f"{path} is not in {encoding}: {error}.") from error


def _size_bytes(path: Path) -> int:
    """Number of bytes to read; a file without a size, as in /proc, is read as a small document."""
    try:
        return max(path.stat().st_size, DOCUMENT_BYTES)
    except (OSError, ValueError):
        return DOCUMENT_BYTES  # reading it says why


def undecoded(text: str) -> str | None:
    """Why a text from `read_text` could not be decoded, with its first invalid byte; None if it was."""
    found = _UNDECODED.search(text)
    if found is None:
        return None
    byte, line = ord(found[0]) - 0xDC00, text.count("\n", 0, found.start()) + 1
    where = f" in line {line}" if line > 1 else ""
    return f"byte 0x{byte:02X}{where} is not UTF-8; another --encoding, such as latin-1, may fit"


def read_rows(
    path: Path,
    columns: Columns,
    encoding: str,
    *,
    label_column: str | None = None,
    label_separator: str | None = None,
) -> Iterator[Row | BadSample]:
    """Read the rows of a file, in order: each with its values as text, or why it cannot be used.

    The file is a .csv or .tsv file with a header, or a .jsonl file of objects. `label_column` has one label per
    row; with a `label_separator`, which is not empty, several: a list in JSON, else text that is split there.
    Rows cannot be used if a label is NaN, as pandas and NumPy write a missing label, or, in JSON, of another
    type than most: a text among numbers, or a number among texts.

    Raises `UsageError` if the file or a column does not exist, and `DataError` if the file is not in that
    encoding.
    """
    text = read_text(path, encoding)
    suffix = path.suffix.lower()
    named = {**columns, **({} if label_column is None else {"label_column": label_column})}
    if suffix in _JSON_LINES:
        records = of_one_type(_json_lines(path, text, named), label_column)
    elif suffix in _DELIMITERS:
        records = _table(path, text, _DELIMITERS[suffix], named)
    else:
        raise UsageError(f"{path} is none of {', '.join(TABLES)}, by its name.")
    for where, record in records:
        yield (
            record
            if isinstance(record, BadSample)
            else _row(where, record, tuple(columns.values()), label_column, label_separator)
        )


def _table(path: Path, text: str, delimiter: str, columns: Columns) -> Records:
    before = csv.field_size_limit(_MOST_CHARACTERS)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = _header(path, reader, columns)
        while True:
            where = f"{path}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as error:
                upto = f", up to line {reader.line_num}" if reader.line_num > 1 else ""
                yield where, BadSample(where=where, why=f"no row of a table{upto}: {error}")
                continue
            if fields is None:
                return
            if not fields:  # an empty line
                continue
            if len(fields) != len(header):
                why = f"{len(fields)} fields, and the header has {len(header)}"
                yield where, BadSample(where=where, why=why)
            else:
                yield where, dict(zip(header, fields, strict=True))
    finally:
        csv.field_size_limit(before)


def _header(path: Path, reader: Any, columns: Columns) -> list[str]:
    try:
        header: list[str] = next(reader, [])
    except csv.Error as error:
        raise UsageError(f"{path} has no header that can be read: {error}.") from error
    twice = [name for name in columns.values() if header.count(name) > 1]
    if twice:
        raise UsageError(f"{path} has several columns {', '.join(twice)}. Give each a name of its own.")
    _check_columns(path, header, columns)
    return header


def _check_columns(path: Path, found: Sequence[str], columns: Columns) -> None:
    missing = {option: name for option, name in columns.items() if name not in found}
    if missing:
        flags = ", ".join(f"{option} (--{option.replace('_', '-')})" for option in missing)
        raise UsageError(
            f"{path} has no column {', '.join(missing.values())}. It has {', '.join(found) or 'none'}. Name "
            f"the right one: {flags}."
        )


def _json_lines(path: Path, text: str, columns: Columns) -> Records:
    records = list(_parsed_lines(path, text))
    names = {name for _, record in records if isinstance(record, dict) for name in record}
    if names:
        _check_columns(path, sorted(names), columns)
    yield from records


def _parsed_lines(path: Path, text: str) -> Records:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        why = undecoded(line)
        if why is not None:
            yield where, BadSample(where=where, why=why)
            continue
        try:
            record = json.loads(line)  # which takes NaN, as Python and pandas write it, in other columns too
        except ValueError as error:
            yield where, BadSample(where=where, why=f"not JSON: {error}")
        except RecursionError:
            yield where, BadSample(where=where, why="not JSON: nested too deeply")
        else:
            is_object = isinstance(record, dict)
            yield where, record if is_object else BadSample(where=where, why="not a JSON object")


def _row(
    where: str,
    record: dict[str, Any],
    columns: Sequence[str],
    label_column: str | None,
    label_separator: str | None,
) -> Row | BadSample:
    values: list[str] = []
    labels: tuple[str, ...] = ()
    for name in columns:
        text, why = _as_text(record.get(name))
        if why is not None:
            return BadSample(where=where, why=f"{name!r}: {why}")
        values.append(text)
    if label_column is not None:
        labels, why = _as_labels(record.get(label_column), label_separator)
        if why is not None:
            return BadSample(where=where, why=f"{label_column!r}: {why}")
    if any(label.lower() == "nan" for label in labels):
        return BadSample(where=where, why="the label is NaN; rename the class if it is one")
    return Row(where=where, values=tuple(values), labels=labels)


def _as_labels(value: Any, separator: str | None) -> tuple[tuple[str, ...], str | None]:
    """A value as labels, perhaps none, and why it cannot be used as labels, or None.

    Without a `separator` it is one label.
    """
    if separator is not None and isinstance(value, str):
        value = [part for part in map(str.strip, value.split(separator)) if part]
    is_list = separator is not None and isinstance(value, list)
    labels: list[str] = []
    for part in value if is_list else [value]:
        text, why = _as_text(part)
        if why is not None:
            return (), f"entry {len(labels) + 1}: {why}" if is_list else why
        labels.append(text.strip())
    return tuple(labels), None


def _as_text(value: Any) -> tuple[str, str | None]:
    """A value as text, and why it cannot be used as text, or None."""
    if value is None:
        return "", "there is none"
    if isinstance(value, dict | list):
        return "", f"a {type(value).__name__}, not a text"
    if isinstance(value, float) and not math.isfinite(value):
        return "", f"{value}, not a text"
    is_whole = isinstance(value, float) and value.is_integer()
    text = str(int(value) if is_whole else value)
    if not text.strip():
        return "", "empty"
    why = undecoded(text)
    if why is None and _LONE_SURROGATE.search(text):
        why = "half of a pair of surrogates, which is not a character"
    return text, why
