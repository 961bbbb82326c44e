"""The docstrings below the fields of a record, which Python does not keep: for help, and for options."""

from __future__ import annotations

import ast
import inspect
import textwrap
from contextlib import suppress
from functools import cache
from itertools import pairwise

FIELDS = "Fields:"
"""The heading above the fields in a record's help."""
_WIDTH = 108


def list_fields_in_help(record: type) -> None:
    """Let `help` of a dataclass list each field with its docstring; the source is not read before."""
    record.__doc__ = _DocWithFields(record.__doc__)  # type: ignore[assignment]


class _DocWithFields:
    """A class's `__doc__`, made on first use: `type.__doc__` calls a descriptor (CPython, type_get_doc)."""

    def __init__(self, own: str | None) -> None:
        self._own = own
        self._whole: str | None = None

    def __get__(self, instance: object, owner: type) -> str | None:
        if self._own is not None and self._whole is None:  # it is None under python -OO
            self._whole = self._own
            with suppress(OSError):  # there is no source to read
                self._whole = _with_fields(self._own, field_docstrings(owner))
        return self._whole


def _with_fields(own: str, described: dict[str, str]) -> str:
    if not described:
        return own
    fields = [
        textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in described.items()
    ]
    return "\n".join([inspect.cleandoc(own), "", FIELDS, *fields])


@cache
def field_docstrings(record: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass and of those it extends, by field, as one line each.

    They are in the order of the fields; a source that cannot be read raises OSError.
    """
    found = {}
    for owner in reversed([each for each in record.__mro__ if "__dataclass_fields__" in vars(each)]):
        source = textwrap.dedent(inspect.getsource(owner))
        (body,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        for statement, following in pairwise(body.body):
            is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            text = following.value if isinstance(following, ast.Expr) else None
            if is_field and isinstance(text, ast.Constant) and isinstance(text.value, str):
                found[statement.target.id] = " ".join(text.value.split())  # type: ignore[attr-defined]
    return found
