"""Reading files that may hold anything: bounded, from regular files only, checked against type hints.

brimful's own files (plans, traces, manifests, metrics, calibrations) are decoded by msgspec into frozen
records, whose annotations are the schema: `Annotated[int, Meta(ge=1)]` is a range that a file cannot break, and
costs nothing where the record is made in Python. Reading executes no code, and neither blocks nor fills memory.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from brimful.errors import FileFormatError
from brimful.quantities import MIB, format_bytes

T = TypeVar("T")

DOCUMENT_BYTES = 64 * MIB
"""Largest JSON document that is read, traces excepted: plans take tens of KiB. A choice."""

_LARGEST = 2**62
"""Beyond every size and count; sums of a few still fit the 64 bits of other readers. A choice."""

_MOST_SHOWN = 300
"""Characters of a file's content that an error shows. A choice."""

PositiveInt = Annotated[int, Meta(ge=1, le=_LARGEST)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


ALWAYS_WRITTEN: Mapping[str, bool] = MappingProxyType({"always_written": True})
"""Metadata of a field that has a default in Python, and is in every file: a file without it is damaged."""


def read_regular_file(path: Path | str, *, what: str, limit_bytes: int = DOCUMENT_BYTES) -> bytes:
    """The content of a file, unless it is not a regular file or is larger than the limit.

    A FIFO or a device is refused without waiting for it.

    Args:
        path: Symbolic links are followed.
        what: Names the content in errors, such as "plan".
        limit_bytes: Largest size that is read.

    Returns:
        The whole content.

    Raises:
        FileFormatError: It is not a regular file, cannot be read, or is too large.
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

    Args:
        content: UTF-8; NaN and Infinity are not JSON.
        record: A dataclass, or any type that msgspec knows.
        where: Names the file in errors, such as "the plan p.json".

    Returns:
        The record.

    Raises:
        FileFormatError: One line with the file, the field and what was expected.
    """
    return from_builtins(parse_json(content, where=where), record, where=where)


def parse_json(content: bytes | str, *, where: str) -> Any:
    """JSON as plain containers, for what has to be looked at before its type is known.

    Args:
        content: UTF-8; NaN and Infinity are not JSON.
        where: Names the file in errors.

    Returns:
        Dicts, lists, strings, numbers, booleans and None.

    Raises:
        FileFormatError: It is not JSON, or nested too deeply to be read.
    """
    with _errors_naming(where, Any):
        return msgspec.json.decode(content)


def decode_directly(content: bytes | msgspec.Raw, kind: Any, *, where: str, path: str = "") -> Any:
    """A value of a type straight from JSON, for large documents: nothing is built before it is checked.

    Args:
        content: UTF-8; NaN and Infinity are not JSON.
        kind: Any type that msgspec knows. Of a dataclass, fields that it does not have are ignored.
        where: Names the file in errors.
        path: The field of the file that this is the value of; empty if it is the whole.

    Returns:
        A value of that type.

    Raises:
        FileFormatError: One line with the file, the field and what was expected.
    """
    with _errors_naming(where, kind, path):
        return msgspec.json.decode(content, type=kind)


def from_builtins(document: Any, record: type[T], *, where: str) -> T:
    """A record from plain containers, every field checked against its annotation.

    Args:
        document: As `parse_json` gives it; fields that the record does not have are refused, not ignored.
        record: A dataclass, or any type that msgspec knows.
        where: Names the file in errors.

    Returns:
        The record.

    Raises:
        FileFormatError: One line with the file, the field and what was expected.
    """
    with _errors_naming(where, record):
        made = msgspec.convert(document, record, dec_hook=_path)
        misfit = _first_misfit(document, made)
    if misfit is not None:
        raise misfit.error(misfit.path, where=where)
    return made


def fields_of_version(document: Any, key: str, version: int, *, what: str, where: str) -> dict[str, Any]:
    """The fields of a document beside its version, which must be the one that this brimful reads.

    Args:
        document: As `parse_json` gives it.
        key: Of the version.
        version: The one that is read.
        what: Names the content in errors, such as "plan".
        where: Names the file in errors.

    Returns:
        All fields but the version.

    Raises:
        FileFormatError: It is another document, or of another version.
    """
    if not isinstance(document, dict) or key not in document:
        raise FileFormatError(f"{where} is not a brimful {what}: it has no field `{key}`.")
    found = document[key]
    if type(found) is not int or found != version:
        is_shown = isinstance(found, str | float) or (isinstance(found, int) and abs(found) < _LARGEST)
        written = _one_line(repr(found)) if is_shown else type(found).__name__
        raise FileFormatError(
            f"{where}: field `{key}`: this is version {written}; this brimful reads version {version}."
        )
    return {name: value for name, value in document.items() if name != key}


_NOT_FINITE = ("nan", "inf", "-inf")


def number_to_json(value: float | None) -> float | str | None:
    """A number as JSON can hold it: "nan", "inf" and "-inf" are strings."""
    return value if value is None or math.isfinite(value) else str(value)


def numbers_from_json(document: Any, names: Collection[str] | None = None) -> Any:
    """An object with those strings that `number_to_json` wrote as numbers again.

    Args:
        document: As read from JSON; anything but an object is returned as it is.
        names: Of the fields that are numbers; None takes all.

    Returns:
        The object; its other values are as they were.
    """
    if not isinstance(document, dict):
        return document
    meant = document if names is None else names
    return {
        name: float(value) if name in meant and value in _NOT_FINITE else value
        for name, value in document.items()
    }


def _path(kind: type, value: Any) -> Any:
    """What msgspec does not know by itself: a path."""
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
        raise FileFormatError(f"{where}: {_readable(str(error), kind, path)}.") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = _one_line(_without_capital(str(error)))
        raise FileFormatError(f"{where} is not valid JSON: {reason}.") from error


def unknown_field(name: str, *, where: str) -> FileFormatError:
    """The error for a field that a record does not have."""
    reason = "unknown; written by another version, or misspelled"
    return FileFormatError(f"{where}: field `{_one_line(name)}`: {reason}.")


def missing_field(name: str, *, where: str) -> FileFormatError:
    """The error for a field that every file has, and this one has not."""
    return FileFormatError(f"{where}: missing field `{_one_line(name)}`.")


class _Misfit(NamedTuple):
    """A field that a document has and its record has not, or one that is always written and is not there."""

    path: str
    error: Callable[..., FileFormatError]

    def inside(self, name: str) -> _Misfit:
        """The same, seen from outside of the field or the place that it is in."""
        return self._replace(path=f"{name}{'' if self.path.startswith('[') else '.'}{self.path}")


def _first_misfit(document: Any, made: Any) -> _Misfit | None:
    """The first difference in fields between a document and the record made from it."""
    inner: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(document, dict):
        known = _fields_by_name(made)
        for name in document:
            if known is not None and str(name) not in known:
                return _Misfit(str(name), unknown_field)
        for field in fields(made) if is_dataclass(made) else ():
            if field.name not in document and field.metadata.get("always_written"):
                return _Misfit(field.name, missing_field)
        inner = ((str(name), value, (known or {}).get(str(name))) for name, value in document.items())
    elif isinstance(document, list | tuple) and isinstance(made, list | tuple):
        pairs = enumerate(zip(document, made, strict=False))
        inner = ((f"[{index}]", value, of_made) for index, (value, of_made) in pairs)
    for name, value, of_made in inner:
        if isinstance(value, dict | list | tuple) and (found := _first_misfit(value, of_made)) is not None:
            return found.inside(name)
    return None


def _fields_by_name(made: Any) -> dict[str, Any] | None:
    """What a record or a mapping has; None of anything else."""
    if is_dataclass(made):
        return {field.name: getattr(made, field.name) for field in fields(made)}
    if isinstance(made, msgspec.Struct):
        return {name: getattr(made, name) for name in made.__struct_fields__}
    return {str(name): value for name, value in made.items()} if isinstance(made, dict) else None


def _readable(message: str, kind: Any, path: str) -> str:
    """msgspec's message, the field first: "field `units[0].fqn`: expected `str`, got `int`"."""
    reason, _, inner = message.partition(" - at `$")
    inner = inner.rstrip("`")
    reason = re.sub(r"Object missing required field `(\w+)`", r"Missing field `\1`", reason)
    said = _one_line(_without_capital(reason))
    if reason.startswith("Invalid enum value") and (choices := _choices(kind, inner)):
        said += f"; expected {' or '.join(choices)}"
    field = f"{path}{inner}".removeprefix(".")
    return f"field `{_one_line(field)}`: {said}" if field else said


def _choices(kind: Any, path: str) -> list[str]:
    """What an enumeration may be that is at a path, such as `.units[0].action`, of a type."""
    nodes: list[Any] = [msgspec.inspect.type_info(kind)]
    for name in re.findall(r"\w+|\.\.\.", path):
        nodes = [inside for node in _alternatives(nodes) for inside in _inside(node, name)]
    values: list[Any] = []
    for node in _alternatives(nodes):
        if isinstance(node, msgspec.inspect.EnumType):
            values += [member.value for member in node.cls]
        elif isinstance(node, msgspec.inspect.LiteralType):
            values += node.values
    return [repr(value) for value in values]


def _alternatives(nodes: Iterable[Any]) -> Iterator[Any]:
    """Those of unions one by one."""
    for node in nodes:
        yield from getattr(node, "types", (node,))


def _inside(node: Any, name: str) -> Iterator[Any]:
    """What a field, or a place in a sequence or mapping, may be."""
    for number, field in enumerate(getattr(node, "fields", ())):
        if name in (field.encode_name, str(number)):  # by its number where fields are written as an array
            yield field.type
    for attribute in ("item_type", "value_type"):
        if hasattr(node, attribute):
            yield getattr(node, attribute)
    items = getattr(node, "item_types", ())
    if name.isdecimal() and int(name) < len(items):
        yield items[int(name)]


def _without_capital(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def _one_line(text: str) -> str:
    """What a file may make long or fill with control characters, fit to be shown."""
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode()
