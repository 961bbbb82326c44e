"""Which names of the user's code hold tensors: variables, attributes of objects, entries of containers."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from brimful.capture.recording.lines import is_users_own, shown_file

_MOST_ENTRIES = 10_000
"""Entries of containers that are looked at for each name. A choice: more take longer than the step."""
_MOST_NODES = 10_000
"""Nodes of a graph that are looked at. A choice, as above."""
_LAST_NUMBER = 2**63
"""Autograd numbers nodes from 0; those that accumulate gradients, which steps share, are numbered above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The tensors that one name of the user's code holds at the end of a step."""

    name: str
    """As the code writes it: "losses", "self.outputs"."""
    line: str
    """The line of the code that adds to it, or else assigns it: "train.py:12"."""
    count: int
    size_bytes: int
    """Bytes of the tensors, without what their graphs save."""
    has_graph: bool
    """Whether any of them has a graph."""
    reaches_back: bool
    """Whether a graph leads to nodes of earlier steps."""


def held_by_names(frame: FrameType | None, first_node: int) -> dict[str, Holding]:
    """What names hold, in the calling functions of the user's code from `frame` on, and in their modules.

    Parameters and gradients are not among it. `first_node` is the number of the first autograd node of this
    step.
    """
    found: dict[str, Holding] = {}
    while frame is not None:
        if is_users_own(frame.f_code.co_filename):
            file = frame.f_code.co_filename
            for name, value in (*frame.f_locals.items(), *frame.f_globals.items()):
                for shown, held in _of_name(name, value):
                    if shown not in found and (tensors := list(_tensors(held))):
                        found[shown] = _holding(shown, _line(file, shown), tensors, first_node)
        frame = frame.f_back
    return found


def _of_name(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a name holds; of an object of the user's class, what each of its attributes does."""
    if name.startswith("__") or isinstance(value, ModuleType | type | nn.Module | nn.Parameter):
        return
    if isinstance(value, Tensor | list | tuple | dict | deque):
        yield name, value
    elif is_users_own(getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""):
        for attribute, inner in getattr(value, "__dict__", {}).items():
            if isinstance(inner, Tensor | list | tuple | dict | deque):
                yield f"{name}.{attribute}", inner


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value and in the containers inside it, but for parameters."""
    left, seen = [value], 0
    while left and seen < _MOST_ENTRIES:
        entry, seen = left.pop(), seen + 1
        if isinstance(entry, Tensor):
            if not isinstance(entry, nn.Parameter):
                yield entry
        elif isinstance(entry, Mapping):
            left += entry.values()
        elif isinstance(entry, list | tuple | deque):
            left += entry


def _holding(name: str, line: str, tensors: list[Tensor], first_node: int) -> Holding:
    graphs = [each.grad_fn for each in tensors if each.grad_fn is not None]
    return Holding(
        name=name,
        line=line,
        count=len(tensors),
        size_bytes=sum({each.data_ptr(): each.nbytes for each in tensors}.values()),
        has_graph=bool(graphs),
        reaches_back=_reaches_back(graphs, first_node),
    )


@cache
def _line(file: str, name: str) -> str:
    """The line that adds to a name, or else that assigns it; the file alone if neither is found."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    shown = shown_file(file)
    own = rf"(?<![\w.]){re.escape(name)}"
    adding = (r"\s*\+=", r"\.(append|extend|add|update)\(", r"\[[^]]*\]\s*=[^=]", rf"\s*=[^=].*{own}\b")
    for change in (*adding, r"\s*=[^=]"):
        for number, text in enumerate(lines, start=1):
            if re.search(f"{own}{change}", text):
                return f"{shown}:{number}"
    return shown


def leaves_of(node: Any) -> list[Tensor]:
    """The leaves that a graph gives gradients, such as parameters."""
    left, seen, leaves = [node], set[Any](), []
    while left:
        each = left.pop()
        if each is None or each in seen:
            continue
        seen.add(each)
        if (variable := getattr(each, "variable", None)) is not None:
            leaves.append(variable)
        left += [following for following, _ in each.next_functions]
    return leaves


def _reaches_back(graphs: list[Any], first_node: int) -> bool:
    """Whether graphs have a node that an earlier step made."""
    left, seen = list(graphs), set[Any]()
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = node._sequence_nr()
        if number < first_node:
            return True
        if number < _LAST_NUMBER:
            left += [each for each, _ in node.next_functions]
    return False
