"""msgspec's errors for a document, in one line with the field first: "field `units[0].fqn`: expected `str`"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

_MOST_SHOWN = 300
"""Characters of a file's content that an error shows. A choice."""


_NOT_FINITE = {"'nan'", "'inf'", "'-inf'"}
"""Texts in the place of numbers that JSON lacks."""
_MISFIT = re.compile(r"Object (contains unknown|missing required) field `(.*?)`(?: - at `\$(.*)`)?", re.DOTALL)


def readable(message: str, kind: Any, path: str) -> str:
    """msgspec's message, the field first: "field `units[0].fqn`: expected `str`, got `int`"."""
    if misfit := _MISFIT.fullmatch(message):
        how, name, inside = misfit.groups(default="")
        say = missing_field if how.startswith("missing") else unknown_field
        return say(f"{path}{inside}.{name}".removeprefix("."))
    reason, _, inner = message.partition(" - at `$")
    inner = inner.rstrip("`")
    said, choices = one_line(without_capital(reason)), _choices(kind, inner)
    is_enum_value = reason.startswith("Invalid enum value")
    if set(choices) == _NOT_FINITE:
        said = "expected `float`, got `str`" if is_enum_value else said.replace("float | str", "float")
    elif is_enum_value and choices:
        said += f"; expected {' or '.join(choices)}"
    field = f"{path}{inner}".removeprefix(".")
    return f"field `{one_line(field)}`: {said}" if field else said


def unknown_field(name: str) -> str:
    """What is wrong with a field that a record does not have."""
    return f"field `{one_line(name)}`: unknown; written by another version, or misspelled"


def missing_field(name: str) -> str:
    """What is wrong with a file that has not a field that every file has."""
    return f"missing field `{one_line(name)}`"


def _choices(kind: Any, path: str) -> list[str]:
    """The values of an enumeration at a path of a type, such as `.units[0].action`."""
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
    """The members of unions, one by one."""
    for node in nodes:
        yield from getattr(node, "types", (node,))


def _inside(node: Any, name: str) -> Iterator[Any]:
    """The types of a field, or of an item of a sequence or mapping."""
    for number, field in enumerate(getattr(node, "fields", ())):
        if name in (field.encode_name, str(number)):  # by its number where fields are written as an array
            yield field.type
    for attribute in ("item_type", "value_type"):
        if hasattr(node, attribute):
            yield getattr(node, attribute)
    items = getattr(node, "item_types", ())
    if name.isdecimal() and int(name) < len(items):
        yield items[int(name)]


def without_capital(sentence: str) -> str:
    """A sentence as it is written after a colon; an abbreviation such as JSON stays."""
    first = sentence[:1] if sentence[1:2].isupper() else sentence[:1].lower()
    return first + sentence[1:].rstrip(".")


def one_line(text: str) -> str:
    """Text from a file, shortened and without control characters, for a message."""
    shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode()
