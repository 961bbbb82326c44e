"""Records ↔ JSON by type hints; and reading files that may hold anything, bounded, from regular files only.

brimful's own files (plans, traces, manifests, metrics, calibrations) are decoded by msgspec into frozen
records, whose annotations are the schema: `Annotated[int, Meta(ge=1)]` is a range that a file cannot break, and
costs nothing where the record is made in Python. Reading executes no code, and neither blocks nor fills memory.

`to_json_document` writes a record and `from_json_document` reads it: a field that is added to a record is in
both. Where its JSON differs from its fields, the record declares that with `json_form`.
"""

from __future__ import annotations

import math
import operator
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from brimful.errors import FileFormatError
from brimful.utils.decode_errors import one_line, readable, without_capital
from brimful.utils.quantities import MIB, format_bytes

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


def from_json_document(document: Any, record: type[T], *, where: str) -> T:
    """The record that `to_json_document` wrote, equal to the one written.

    A field that is unknown, missing, of another type or out of range raises FileFormatError, in which `where`
    names the file.
    """
    schema = _schema_of(record)
    with _errors_naming(where, schema):
        checked = msgspec.convert(document, schema, dec_hook=_path)
        return msgspec.convert(checked, record, from_attributes=True, dec_hook=_path)


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
    omitted: Collection[str] | Callable[[Any], Collection[str]] = ()
    """Fields that are not written, or a function that names them for a record."""
    write: Callable[[Any], Any] | None = None
    """Writes the record instead."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """By field: its key, where that is not its name."""


def omit_defaults(*names: str) -> Callable[[Any], Collection[str]]:
    """For `JsonForm.omitted`: fields that are not written where they have their default."""

    def omitted(record: Any) -> Collection[str]:
        return {each.name for each in fields(record) if getattr(record, each.name) == each.default} & {*names}

    return omitted


_FORMS: dict[type, JsonForm] = {}


def json_form(form: JsonForm) -> Callable[[type[T]], type[T]]:
    """Declare the form of a record's JSON; a decorator."""

    def declare(record: type[T]) -> type[T]:
        _FORMS[record] = form
        return record

    return declare


_PLAIN_FORM = JsonForm()


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
    omitted = form.omitted(record) if callable(form.omitted) else form.omitted
    names = dict.fromkeys([*form.order, *(each.name for each in fields(record)), *form.derived])
    return {
        form.keys.get(name, name): to_builtins(
            form.derived[name](record) if name in form.derived else getattr(record, name)
        )
        for name in names
        if name not in omitted
    }


_NotFinite = Literal["nan", "inf", "-inf"]


def _schema_of(hint: Any) -> Any:
    """The type that msgspec checks a document against, in place of a hint with records of brimful."""
    if isinstance(hint, type) and is_dataclass(hint):
        return _schema(hint)
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        inner: Any = Annotated[(_schema_of(arguments[0]), *hint.__metadata__)]
        return inner | _NotFinite if _UNBOUNDED in hint.__metadata__ else inner
    if kind in (Union, UnionType):
        return reduce(operator.or_, map(_schema_of, arguments))
    return kind[tuple(map(_schema_of, arguments))] if arguments and kind is not Literal else hint


@cache
def _schema(record: type) -> type[msgspec.Struct]:
    """A struct with the keys of a record's JSON, which refuses others."""
    form, hints = _FORMS.get(record, _PLAIN_FORM), get_type_hints(record, include_extras=True)
    unbounded = [name for name, hint in hints.items() if _is_unbounded(hint)]

    def read_numbers(made: Any) -> None:
        for name in unbounded:
            setattr(made, name, _number(getattr(made, name)))

    return msgspec.defstruct(
        record.__name__,
        [
            *((each.name, _schema_of(hints[each.name]), _default(each)) for each in fields(record)),
            *((name, Any, None) for name in form.derived),
        ],
        namespace={"__post_init__": read_numbers},
        rename=form.keys,
        forbid_unknown_fields=True,
        kw_only=True,
    )


def _default(of: Field[Any]) -> Any:
    """The default of a record's field for a struct; none if every file has the field."""
    if of.metadata.get("always_written") or (of.default is MISSING and of.default_factory is MISSING):
        return msgspec.NODEFAULT
    if of.default_factory is not MISSING:
        return msgspec.field(default_factory=of.default_factory)
    return of.default


def _is_unbounded(hint: Any) -> bool:
    return _UNBOUNDED in getattr(hint, "__metadata__", ()) or any(map(_is_unbounded, get_args(hint)))


def _number(value: Any) -> Any:
    """An unbounded number, or several of them, from the text of those that JSON lacks."""
    if isinstance(value, dict):
        return {name: _number(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_number, value))
    return float(value) if value in get_args(_NotFinite) else value


def _path(kind: type, value: Any) -> Any:
    """Convert a type that msgspec does not support: a path."""
    if kind is Path and isinstance(value, str | Path):
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
