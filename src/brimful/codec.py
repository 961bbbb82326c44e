"""Records ↔ JSON by type hints; and reading files that may hold anything, bounded, from regular files only.

brimful's own files (plans, traces, manifests, metrics, calibrations) are decoded by msgspec into frozen
records, whose annotations are the schema: `Annotated[int, Meta(ge=1)]` is a range that a file cannot break, and
costs nothing where the record is made in Python. Reading executes no code, and neither blocks nor fills memory.

`to_json_document` writes a record and `from_json_document` reads it: a field that is added to a record is in
both. Where its JSON differs from its fields, the record declares that with `json_form`.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from brimful.decode_errors import one_line, readable, without_capital
from brimful.errors import FileFormatError
from brimful.quantities import MIB, format_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

DOCUMENT_BYTES = 64 * MIB
"""Largest JSON document that is read, traces excepted: plans take tens of KiB. A choice."""

_LARGEST = 2**62
"""A number beyond every size and count; sums of a few still fit the 64 bits of other readers. A choice."""

PositiveInt = Annotated[int, Meta(ge=1, le=_LARGEST)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
_UNBOUNDED = "may be nan or infinite"
UnboundedFloat = Annotated[float, _UNBOUNDED]
"""Type of a field whose number `to_json_document` may write as "nan", "inf" or "-inf", which JSON lacks."""
UnboundedNonNegativeFloat = Annotated[float, Meta(ge=0), _UNBOUNDED]
"""An `UnboundedFloat` from 0 to infinity."""


ALWAYS_WRITTEN: Mapping[str, bool] = MappingProxyType({"always_written": True})
"""Metadata of a field that has a default in Python, and is in every file: a file without it is damaged."""


def read_regular_file(path: Path | str, *, what: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file, which must be a regular file of at most `limit_bytes`.

    A file of another kind, one that is too large and one that cannot be read raise FileFormatError, in which
    `what` names the content, such as "plan". A FIFO or a device is refused without waiting for it; symbolic
    links are followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise FileFormatError(f"the {what} {path} is not a regular file.")
            if found.st_size > limit_bytes:
                raise FileFormatError(
                    f"the {what} {path} has {format_bytes(found.st_size)}; at most "
                    f"{format_bytes(limit_bytes)} are read."
                )
            return file.read(found.st_size)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, FileFormatError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FileFormatError(f"the {what} {path} cannot be read: {reason}.") from error


def decode_json(content: bytes | str, record: type[T], *, where: str) -> T:
    """A record from JSON, every field checked against its annotation.

    `record` is a dataclass, or any type that msgspec knows; `where` names the file in errors, such as "the plan
    p.json". NaN and Infinity are not JSON. A FileFormatError has in one line the file, the field and what was
    expected.
    """
    return from_json_document(parse_json(content, where=where), record, where=where)


def parse_json(content: bytes | str, *, where: str) -> Any:
    """Parse JSON into plain containers, for documents whose type is found from their content.

    `where` names the file in the FileFormatError for content that is not JSON, as NaN and Infinity are not, or
    is nested too deeply to be read.
    """
    with _errors_naming(where, Any):
        return msgspec.json.decode(content)


def decode_directly(content: bytes | msgspec.Raw, kind: Any, *, where: str, path: str = "") -> Any:
    """A value of a type straight from JSON, for large documents: nothing is built before it is checked.

    `kind` is any type that msgspec knows; fields that a dataclass does not have are ignored. `path` is the
    field of the file that holds the value; empty if the value is the whole file. A FileFormatError has in one
    line the file `where`, the field and what was expected.
    """
    with _errors_naming(where, kind, path):
        return msgspec.json.decode(content, type=kind)


def from_builtins(document: Any, record: type[T], *, where: str) -> T:
    """A record from plain containers, every field checked against its annotation.

    Fields that the record does not have are refused, not ignored. A FileFormatError has in one line the file
    `where`, the field and what was expected.
    """
    with _errors_naming(where, record):
        made = msgspec.convert(document, record, dec_hook=_path)
        misfit = _first_misfit(document, made)
    if misfit is not None:
        raise misfit.error(misfit.path, where=where)
    return made


def fields_of_version(document: Any, key: str, version: int, *, what: str, where: str) -> dict[str, Any]:
    """The fields of a document, without its version, which must be the one that this brimful reads.

    `key` is that of the version. A document of another kind or version raises FileFormatError, in which `what`
    names the content, such as "plan", and `where` the file.
    """
    if not isinstance(document, dict) or key not in document:
        raise FileFormatError(f"{where} is not a brimful {what}: it has no field `{key}`.")
    found = document[key]
    if type(found) is not int or found != version:
        is_shown = isinstance(found, str | float) or (isinstance(found, int) and abs(found) < _LARGEST)
        written = one_line(repr(found)) if is_shown else type(found).__name__
        raise FileFormatError(
            f"{where}: field `{key}`: this is version {written}; this brimful reads version {version}."
        )
    return {name: value for name, value in document.items() if name != key}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonForm:
    """How the JSON of a record differs from its fields."""

    derived: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    """Keys whose values follow from the fields: written, and ignored where they are read."""
    order: tuple[str, ...] = ()
    """The first keys; the others follow in the order of the fields, derived ones last."""
    omitted: Collection[str] = ()
    """Fields that are not written."""
    write: Callable[[Any], Any] | None = None
    """Writes the record instead."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """By field: its key, where that is not its name."""


_FORMS: dict[type, JsonForm] = {}


def json_form(form: JsonForm) -> Callable[[type[T]], type[T]]:
    """Declare the form of a record's JSON; a decorator."""

    def declare(record: type[T]) -> type[T]:
        _FORMS[record] = form
        return record

    return declare


_PLAIN_FORM = JsonForm()
_NOT_FINITE = ("nan", "inf", "-inf")
_MAPPINGS = (dict, Mapping)


def to_json_document(record: DataclassInstance) -> dict[str, Any]:
    """A record as JSON can hold it; numbers that JSON lacks are "nan", "inf" and "-inf".

    Fields may hold mappings, sequences, enumerations, paths, numbers, strings and records.
    """
    document: dict[str, Any] = to_builtins(record)
    return document


def to_builtins(value: Any) -> Any:
    """A value of a record, as `to_json_document` writes it."""
    if is_dataclass(value):
        return _record_to_builtins(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {to_builtins(key): to_builtins(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_builtins(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def _record_to_builtins(record: Any) -> Any:
    form = _FORMS.get(type(record), _PLAIN_FORM)
    if form.write is not None:
        return form.write(record)
    names = dict.fromkeys([*form.order, *(each.name for each in fields(record)), *form.derived])
    return {
        form.keys.get(name, name): to_builtins(
            form.derived[name](record) if name in form.derived else getattr(record, name)
        )
        for name in names
        if name not in form.omitted
    }


def from_json_document(document: Any, record: type[T], *, where: str) -> T:
    """The record that `to_json_document` wrote, equal to the one written.

    A field that is unknown, missing, of another type or out of range raises FileFormatError, in which `where`
    names the file.
    """
    by_fields = _in_fields(document, record, where)
    try:
        return from_builtins(by_fields, record, where=where)
    except FileFormatError as error:
        raise FileFormatError(_by_keys(str(error))) from error.__cause__


def _by_keys(message: str) -> str:
    """A message about fields with the keys that a file has for them."""
    for form in _FORMS.values():
        for name, key in form.keys.items():
            message = re.sub(rf"(?<=[`.]){name}(?=[`.\[])", key, message)
    return message


def _in_fields(value: Any, hint: Any, where: str, path: str = "") -> Any:
    """A part of a document by the names of fields, its numbers floats; what does not match stays."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        if _UNBOUNDED in hint.__metadata__:
            return float(value) if isinstance(value, str) and value in _NOT_FINITE else value
        return _in_fields(value, arguments[0], where, path)
    if kind in (Union, UnionType):
        for each in arguments:
            value = _in_fields(value, each, where, path)
    elif isinstance(value, dict) and isinstance(kind, type) and is_dataclass(kind):
        form, hints = _FORMS.get(kind, _PLAIN_FORM), _hints(kind)
        if wrong := value.keys() & form.keys.keys():
            raise unknown_field(f"{path}{min(wrong)}", where=where)
        names = {key: name for name, key in form.keys.items()}
        return {
            (name := str(names.get(key, key))): _in_fields(each, hints.get(name), where, f"{path}{key}.")
            for key, each in value.items()
            if key not in form.derived
        }
    elif isinstance(value, dict) and kind in _MAPPINGS:
        return {key: _in_fields(each, arguments[1], where, path) for key, each in value.items()}
    elif isinstance(value, list | tuple) and arguments[1:] in ((), (Ellipsis,)) and arguments:
        return [_in_fields(each, arguments[0], where, f"{path[:-1]}[{at}].") for at, each in enumerate(value)]
    return value


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record, include_extras=True)


def _path(kind: type, value: Any) -> Any:
    """Convert a type that msgspec does not support: a path."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"Expected `{kind.__name__.lower()}`, got `{type(value).__name__}`")


@contextmanager
def _errors_naming(where: str, kind: Any, path: str = "") -> Iterator[None]:
    """Turn what msgspec raises into an error that names the file and the field."""
    try:
        yield
    except RecursionError as error:
        raise FileFormatError(f"{where} is nested too deeply.") from error
    except msgspec.ValidationError as error:
        raise FileFormatError(f"{where}: {readable(str(error), kind, path)}.") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = one_line(without_capital(str(error)))
        raise FileFormatError(f"{where} is not valid JSON: {reason}.") from error


def unknown_field(name: str, *, where: str) -> FileFormatError:
    """The error for a field that a record does not have."""
    reason = "unknown; written by another version, or misspelled"
    return FileFormatError(f"{where}: field `{one_line(name)}`: {reason}.")


def missing_field(name: str, *, where: str) -> FileFormatError:
    """The error for a field that every file has, and this one has not."""
    return FileFormatError(f"{where}: missing field `{one_line(name)}`.")


class _Misfit(NamedTuple):
    """A field that a document has and its record has not, or one that is always written and is not there."""

    path: str
    error: Callable[..., FileFormatError]

    def inside(self, name: str) -> _Misfit:
        """This misfit with its path seen from outside of the field or the place that holds it."""
        return self._replace(path=f"{name}{'' if self.path.startswith('[') else '.'}{self.path}")


def _first_misfit(document: Any, made: Any) -> _Misfit | None:
    """The first difference in fields between a document and the record made from it."""
    inner: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(document, dict):
        known = _fields_by_name(made)
        for name in document:
            if known is not None and str(name) not in known:
                return _Misfit(str(name), unknown_field)
        for each in fields(made) if is_dataclass(made) else ():
            if each.name not in document and each.metadata.get("always_written"):
                return _Misfit(each.name, missing_field)
        inner = ((str(name), value, (known or {}).get(str(name))) for name, value in document.items())
    elif isinstance(document, list | tuple) and isinstance(made, list | tuple):
        pairs = enumerate(zip(document, made, strict=False))
        inner = ((f"[{index}]", value, of_made) for index, (value, of_made) in pairs)
    for name, value, of_made in inner:
        if isinstance(value, dict | list | tuple) and (found := _first_misfit(value, of_made)) is not None:
            return found.inside(name)
    return None


def _fields_by_name(made: Any) -> dict[str, Any] | None:
    """The fields of a record or the entries of a mapping; None for anything else."""
    if is_dataclass(made):
        return {field.name: getattr(made, field.name) for field in fields(made)}
    if isinstance(made, msgspec.Struct):
        return {name: getattr(made, name) for name in made.__struct_fields__}
    return {str(name): value for name, value in made.items()} if isinstance(made, dict) else None
