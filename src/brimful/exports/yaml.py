"""Mappings as YAML, without a library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def to_yaml(document: Mapping[str, Any], *, comments: tuple[str, ...] = ()) -> str:
    """A mapping as YAML, which writes texts as JSON does; `comments` are lines before it.

    Keys are plain; values are texts, numbers, bools, None, or such mappings.
    """
    lines = [f"# {comment}" for comment in comments]
    return "\n".join([*lines, *_lines(document, "")]) + "\n"


def _lines(document: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(value)}"
