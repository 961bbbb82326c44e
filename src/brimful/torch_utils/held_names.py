"""Which names of the user's code hold tensors: variables, attributes of objects, entries of containers."""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from brimful.torch_utils.graphs import ages_of
from brimful.torch_utils.lines import is_users_own, shown_file

_MOST_ENTRIES = 10_000
"""Entries of containers that are looked at for each name. A choice: more take longer than the step."""
_READS_LOCALS = frozenset({"locals", "vars", "eval", "exec", "dir"})
"""Functions by which code gets the dict of its variables, which looking at them would change."""


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
    """Whether a graph of this step or the one before leads to nodes of a step before those."""


def held_by_names(frame: FrameType | None, first_node: int) -> dict[str, Holding]:
    """What names hold, in the calling functions of the user's code from `frame` on, and in their modules.

    Parameters and gradients are not among it. `first_node` is the number of the first autograd node of the step
    before this one.
    """
    return {name: _holding(name, line, tensors, first_node) for name, line, tensors in tensors_of_names(frame)}


def tensors_of_names(frame: FrameType | None) -> Iterator[tuple[str, str, list[Tensor]]]:
    """Names that `held_by_names` looks at, each once: the name, the line that adds to it, its tensors."""
    found = set[str]()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users_own(file):
            for name, value in (*locals_of(frame).items(), *frame.f_globals.items()):
                for shown, held in _of_name(name, value):
                    if shown not in found and (tensors := list(_tensors(held))):
                        found.add(shown)
                        yield shown, _line(file, shown), tensors
        frame = frame.f_back


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function.

    Up to Python 3.12 a frame keeps the dict that it shows, and so all values in it: it is emptied, unless the
    function may have got it too.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not _READS_LOCALS.isdisjoint(code.co_names):
        return {}
    shown = frame.f_locals
    found = dict(shown)
    if sys.version_info < (3, 13):
        shown.clear()
    return found


def _of_name(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a name holds; of an object of the user's class, what each of its attributes does."""
    if name.startswith("__") or isinstance(value, ModuleType | type | nn.Module | nn.Parameter):
        return
    if _is_container(value):
        yield name, value
    elif is_users_own(getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""):
        for attribute, inner in [*getattr(value, "__dict__", {}).items()]:
            if _is_container(inner):
                yield f"{name}.{attribute}", inner


def _is_container(value: Any) -> bool:
    """Whether a value is a tensor or may hold ever more of them."""
    is_bounded = isinstance(value, deque) and value.maxlen is not None
    return isinstance(value, Tensor | list | tuple | dict | deque) and not is_bounded


def _tensors(value: Any) -> Iterator[Tensor]:
    """The dense tensors in a value and in the containers inside it, but for parameters."""
    left, seen = [value], 0
    while left and seen < _MOST_ENTRIES:
        entry, seen = left.pop(), seen + 1
        if isinstance(entry, Tensor):
            if not isinstance(entry, nn.Parameter) and entry.layout is torch.strided:
                yield entry
        elif isinstance(entry, Mapping):
            left += entry.values()
        elif isinstance(entry, list | tuple | deque):
            left += entry


def _holding(name: str, line: str, tensors: list[Tensor], first_node: int) -> Holding:
    ages = ages_of(tensors)
    return Holding(
        name=name,
        line=line,
        count=len(tensors),
        size_bytes=sum({each.untyped_storage()._cdata: each.nbytes for each in tensors}.values()),
        has_graph=ages is not None,
        reaches_back=ages is not None and ages[0] < first_node <= ages[1],
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
