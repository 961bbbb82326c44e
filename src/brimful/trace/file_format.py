"""A trace → JSON and back. Records are tables of rows, to keep files small; ".gz" files are compressed."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from brimful.codec import (
    DOCUMENT_BYTES,
    NonNegativeInt,
    decode_directly,
    fields_of_version,
    from_json_document,
    parse_json,
    read_regular_file,
    to_json_document,
)
from brimful.errors import FileFormatError
from brimful.settings import Settings
from brimful.trace.consistency import find_inconsistency
from brimful.trace.kernel_memory import Kernel
from brimful.trace.records import Correction, Event, Op, Storage, Trace
from brimful.utils.decode_errors import missing_field, unknown_field
from brimful.utils.files import write_file
from brimful.utils.quantities import GIB, MIB, format_bytes

TRACE_VERSION = 2

_VERSION = "brimful_trace"
"""Field of a file with `TRACE_VERSION`."""

TRACE_BYTES = GIB
"""Largest trace that is read, compressed or not. A choice: one of bert-base has 0.7 MiB."""

_TABLES: dict[str, type[Any]] = {
    "ops": Op,
    "storages": Storage,
    "events": Event,
    "corrections": Correction,
}

_LATER = (
    "couples_samples",
    "host_state_bytes",
    "paged_state_bytes",
    "host_staging_bytes",
    "stateful_modules",
    "global_batch",
    "compiled_lines",
    "without_gradient",
    "checkpoints_without_gradient",
    "own_checkpoints",
    "sizes_are_guessed",
    "guess",
)
"""Fields that traces of this version may lack."""


def save_trace(trace: Trace, path: Path | str) -> None:
    """Write a trace as JSON, gzipped if the name ends in ".gz"."""
    text = json.dumps(encode_trace(trace), separators=(",", ":")).encode()
    is_gzipped = Path(path).suffix == ".gz"
    write_file(path, gzip.compress(text, mtime=0) if is_gzipped else text)


def load_trace(path: Path | str) -> Trace:
    """Read the trace that `save_trace` wrote."""
    content = read_regular_file(path, what="trace", limit_bytes=TRACE_BYTES)
    where = f"the trace {path}"
    return decode_trace(_decompressed(content, where) if Path(path).suffix == ".gz" else content, where)


def encode_trace(trace: Trace) -> dict[str, Any]:
    """A trace as a JSON document."""
    document: dict[str, Any] = {_VERSION: TRACE_VERSION}
    for field in fields(trace):
        value = getattr(trace, field.name)
        if field.name in _TABLES:
            value = _to_table(value, _TABLES[field.name])
        elif field.name == "settings":
            value = to_json_document(value)
        document[field.name] = value
    return document


def decode_trace(content: bytes, where: str = "the trace") -> Trace:
    """A trace from its JSON, every field checked, then what refers to what."""
    document = decode_directly(content, dict[str, msgspec.Raw], where=where)
    if (version := document.get(_VERSION)) is not None:
        document[_VERSION] = decode_directly(version, int, where=where, path=_VERSION)
    document = fields_of_version(document, _VERSION, TRACE_VERSION, what="trace", where=where)
    values: dict[str, Any] = {}
    for field in fields(Trace):
        if field.name in document:
            values[field.name] = _field_value(document.pop(field.name), field.name, where)
        elif field.name not in _LATER:
            raise FileFormatError(f"{where}: {missing_field(field.name)}.")
    if document:
        raise FileFormatError(f"{where}: {unknown_field(min(document))}.")
    trace = Trace(**values)
    wrong = find_inconsistency(trace)
    if wrong is not None:
        raise FileFormatError(f"{where}: {wrong}.")
    return trace


def _field_value(raw: msgspec.Raw, name: str, where: str) -> Any:
    if name in _TABLES:
        return _from_table(raw, name, where)
    if name != "settings":
        return decode_directly(raw, get_type_hints(Trace, include_extras=True)[name], where=where, path=name)
    text = bytes(raw)
    if len(text) > DOCUMENT_BYTES:
        raise FileFormatError(f"{where}: field `settings`: it has {format_bytes(len(text))}.")
    return from_json_document(parse_json(text, where=where), Settings, where=f"{where}: settings")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    columns: tuple[str, ...]
    rows: msgspec.Raw


class _KernelCell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    name: str
    numbers: tuple[NonNegativeInt, ...]


def _from_table(raw: msgspec.Raw, name: str, where: str) -> tuple[Any, ...]:
    record = _TABLES[name]
    table: _Table = decode_directly(raw, _Table, where=where, path=name)
    columns, known = set(table.columns), set(_columns(record))
    needed = {name for name, is_needed in _columns(record).items() if is_needed}
    if len(columns) < len(table.columns) or not needed <= columns <= known:
        found = f"it lacks {min(needed - columns)}" if needed - columns else "one is unknown, or there twice"
        raise FileFormatError(f"{where}: field `{name}.columns`: {found}.")
    row, path = _row_type(table.columns, name), f"{name}.rows"
    try:
        rows = decode_directly(table.rows, list[row], where=where, path=path)  # type: ignore[valid-type]
    except FileFormatError as error:
        raise FileFormatError(_naming_column(str(error), path, table.columns)) from error
    return msgspec.convert(rows, tuple[record, ...], from_attributes=True)  # type: ignore[valid-type]


@lru_cache(maxsize=32)
def _row_type(columns: tuple[str, ...], name: str) -> type[msgspec.Struct]:
    record = _TABLES[name]
    kinds = get_type_hints(record, include_extras=True)
    cells = kinds | ({"kernel": _KernelCell | None} if record is Storage else {})
    return msgspec.defstruct(
        record.__name__,
        [(column, cells[column]) for column in columns],
        array_like=True,
        forbid_unknown_fields=True,
        gc=False,
    )


def _naming_column(message: str, path: str, columns: tuple[str, ...]) -> str:
    """An error of a row's cell with its column's name: `rows[3].phase` rather than `rows[3][2]`."""
    place = re.escape(path) + r"\[(\d+)\]\[(\d+)\]"
    return re.sub(place, lambda found: f"{path}[{found[1]}].{columns[int(found[2])]}", message, count=1)


def _columns(record: type[Any]) -> dict[str, bool]:
    """The fields of a record, and whether each is needed, as it has no default."""
    if issubclass(record, msgspec.Struct):
        return {field.name: field.required for field in msgspec.structs.fields(record)}
    return {field.name: field.default is MISSING for field in fields(record)}


def _to_cell(value: Any) -> Any:
    return [value.name, value.numbers] if isinstance(value, Kernel) else value


def _to_table(records: tuple[Any, ...], row: type[Any]) -> dict[str, Any]:
    columns = list(_columns(row))
    return {
        "columns": columns,
        "rows": [[_to_cell(getattr(record, column)) for column in columns] for record in records],
    }


def _decompressed(content: bytes, where: str) -> bytes:
    text = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            # in parts: a read of many bytes takes their memory first, however few there are
            while len(text) <= TRACE_BYTES and (part := file.read(MIB)):
                text += part
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{where} cannot be decompressed: {error}.") from error
    if len(text) > TRACE_BYTES:
        raise FileFormatError(f"{where} is larger than {format_bytes(TRACE_BYTES)} when decompressed.")
    return bytes(text)
