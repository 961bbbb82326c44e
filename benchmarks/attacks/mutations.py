"""Changes to files: of JSON nodes, of bytes, and of what kind of file there is.

Each draws from a `random.Random`, which Hypothesis can stand in for and shrink.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

DEEP = 100_000
_NESTED = "\0nested\0"

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, -5, 1.5, 10**30, -(10**30), 2**63, 1e308, 5e-324, float("nan"), float("inf")),
    *("", "x", "NaN", "1", "\x00", "\ud800", "../../etc/passwd", "x" * 100_000, "9" * 5000),
    *([], {}, [[]], [None], {"": 0}, {"a": {"a": 1}}, [1, "x", None], _NESTED),
)
"""Values of every JSON type, at and beyond the ends of what any field takes."""

_LARGEST = 2**62
_SIGNED = ("op", "changed_bytes", "numbers", "predicted_difference_interval_seconds")
"""Fields that may be negative."""
_POSITIVE = (
    *("micro_batch_size", "gradient_accumulation_steps", "ranks", "nodes", "budget_bytes"),
    "predicted_step_seconds",
)
_OPTIONAL_WHERE_WRITTEN = (
    *("model_flops", "peak_flops_per_second", "source", "optimizer", "op", "kernel", "most_bytes"),
    *("predicted_step_seconds_interval", "predicted_difference_interval_seconds"),
    *("predicted_exceedance_probability", "job_kind", "job_calibration", "shape"),
    *(
        "optimizer_implementation",
        "chunked_loss",
        "step_in_backward",
        "gathered_dtype",
        "reshard_after_forward",
    ),
    *("to_device_bytes_per_second", "to_host_bytes_per_second", "host_update_bytes_per_second"),
)
"""Fields that may be null although a written file has a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A changed document."""

    text: str
    what: str
    """Where and how it was changed."""
    is_invalid: bool
    """Whether no reader may accept it: a value of another type, not a finite number, or out of any range."""


Path_ = tuple[str | int, ...]


def mutate_json(document: Any, random: Random) -> Mutation:
    """Change one node of a document.

    Args:
        document: As read from JSON.
        random: Chooses the node and the change.

    Returns:
        The changed document as text.
    """
    path = _node(document, random)
    if path and random.random() < 0.2:
        return _structural(document, path, random)
    value = random.choice(HOSTILE)
    return replaced(document, path, value)


def replaced(document: Any, path: Path_, value: Any) -> Mutation:
    """A document with another value at one place.

    Args:
        document: As read from JSON; is not changed.
        path: Keys and indices from its root.
        value: Takes the place of what is there.

    Returns:
        The changed document.
    """
    old = at(document, path)
    return Mutation(
        text=_dumped(_with(document, path, value)),
        what=f"{'.'.join(map(str, path)) or 'all'} = {_shown(value)}",
        is_invalid=_is_invalid(field_name(document, path), old, value),
    )


def _structural(document: Any, path: Path_, random: Random) -> Mutation:
    """A key more or fewer, or an entry twice."""
    changed = copy.deepcopy(document)
    parent, last = at(changed, path[:-1]), path[-1]
    how = random.choice(("removed", "another beside", "twice"))
    if how == "removed":
        del parent[last]
    elif isinstance(parent, dict):
        parent["brimful_unknown"] = random.choice(HOSTILE)
    else:
        parent.insert(int(last), copy.deepcopy(parent[int(last)]))
    return Mutation(text=_dumped(changed), what=f"{'.'.join(map(str, path))} {how}", is_invalid=False)


def at(document: Any, path: Path_) -> Any:
    """What a document has at a place."""
    for key in path:
        document = document[key]
    return document


def field_name(document: Any, path: Path_) -> str:
    """The field that a value belongs to; in a table of rows, its column."""
    for depth in range(len(path) - 1, -1, -1):
        parent, key = at(document, path[:depth]), path[depth]
        if isinstance(key, str):
            is_cell = key == "rows" and len(path) > depth + 2 and "columns" in parent
            return str(parent["columns"][path[depth + 2]]) if is_cell else key
    return ""


def _node(document: Any, random: Random) -> Path_:
    """A place, whatever is near the root as likely as what is deep."""
    path: Path_ = ()
    while True:
        here = at(document, path)
        keys = list(here) if isinstance(here, dict) else range(len(here)) if isinstance(here, list) else ()
        if not keys or random.random() < (0.3 if path else 0.03):
            return path
        path = (*path, random.choice(keys))


def _with(document: Any, path: Path_, value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(document)
    at(changed, path[:-1])[path[-1]] = value
    return changed


def _dumped(document: Any) -> str:
    nested = '{"a":' * (DEEP // 2) + "[" * (DEEP // 2) + "]" * (DEEP // 2) + "}" * (DEEP // 2)
    return json.dumps(document).replace(json.dumps(_NESTED), nested)


def _shown(value: Any) -> str:
    text = "nested deeply" if value == _NESTED else repr(value)
    return text if len(text) < 40 else f"{text[:20]}… ({len(text)} characters)"


def _is_invalid(name: str, old: Any, new: Any) -> bool:
    if isinstance(new, str) and new == _NESTED:
        return True
    if old is None or name == "options":
        return False
    if new is None:
        return name not in _OPTIONAL_WHERE_WRITTEN
    if isinstance(old, bool) or isinstance(new, bool):
        return type(old) is not type(new)
    if isinstance(old, (int, float)):
        if not isinstance(new, int if isinstance(old, int) else (int, float)):
            return True
        is_too_small = new < 0 if name not in _POSITIVE else new <= 0
        is_unbounded = isinstance(old, float) or "flops" in name
        is_too_large = not math.isfinite(new) if is_unbounded else abs(new) > _LARGEST
        return (is_too_small and name not in _SIGNED) or is_too_large
    return not isinstance(new, type(old))


def mutate_bytes(content: bytes, random: Random) -> tuple[bytes, str]:
    """Flip, cut, add, remove or repeat bytes.

    Args:
        content: Of a file.
        random: Chooses.

    Returns:
        Other content, and what was done.
    """
    how = random.choice(("flip", "cut", "append", "remove", "zeros", "swap"))
    place = random.randrange(max(len(content), 1))
    length = random.randint(1, max(1, min(64, len(content) - place)))
    changed = bytearray(content)
    if how == "flip" and content:
        changed[place] ^= 1 << random.randrange(8)
    elif how == "cut":
        del changed[place:]
    elif how == "append":
        changed += random.randbytes(length)
    elif how == "remove":
        del changed[place : place + length]
    elif how == "zeros":
        changed[place : place + length] = bytes(length)
    else:
        changed = changed[place:] + changed[:place]
    return bytes(changed), f"{how} at {place}"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


KINDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": _fifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
    "a dangling link": lambda path: path.symlink_to("not-there"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda _path: None,
}
"""What may be in a file's place."""


def put(kind: str, path: Path) -> None:
    """Put something else in the place of a file or folder.

    Args:
        kind: Of `KINDS`.
        path: What is there is removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)
