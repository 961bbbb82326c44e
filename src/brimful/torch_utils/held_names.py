"""Which names of the user's code hold tensors: variables, attributes of objects, entries of containers."""

from __future__ import annotations

import dis
import inspect
import linecache
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from traceback import walk_tb
from types import BuiltinMethodType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from brimful.torch_utils.graphs import ages_of, storage_key, storages_of
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
    is_state: bool
    """Whether it is a dict of weights by name, such as a `state_dict`, shaped as those of the models."""
    reaches_back: bool
    """Whether a graph of this step or the one before leads to nodes of a step before those."""


def held_by_names(frame: FrameType | None, first_node: int, own: Collection[Tensor] = ()) -> dict[str, Holding]:
    """What names hold, in the calling functions of the user's code from `frame` on, and in their modules.

    Parameters and gradients are not among it, nor tensors of the storages of `own`, those of models.
    `first_node` is the number of the first autograd node of the step before this one.
    """
    shapes = {each.shape for each in own}
    return {
        name: _holding(name, line, held, tensors, first_node, shapes)
        for name, line, held, tensors in tensors_of_names(frame, storages_of(own))
    }


def tensors_of_names(
    frame: FrameType | None, own: Collection[int] = (), is_meant: Callable[[str], object] = is_users_own
) -> Iterator[tuple[str, str, Any, list[Tensor]]]:
    """Names that `held_by_names` looks at, one of each value, with the line that adds to it, value and tensors.

    They are those of code in files that are meant, and of the user's modules.
    """
    names = list[tuple[str, CodeType, Any, str]]()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_meant(file):
            names_of_module = frame.f_globals if is_users_own(file) else {}
            for name, value in (*locals_of(frame).items(), *names_of_module.items()):
                for shown, held, written in _of_name(name, value, is_meant):
                    names.append((shown, frame.f_code, held, written))
        frame = frame.f_back
    named = {id(held) for _, _, held, _ in names if not issubclass(type(held), Tensor)}
    found, values = set[str](), set[int]()
    for shown, code, held, written in names:
        is_new = shown not in found and id(held) not in values
        if is_new and (tensors := _tensors(held, own, named, is_meant)):
            found.add(shown)
            values.add(id(held))
            yield shown, _line(code, written), held, tensors


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function.

    Up to Python 3.12 a frame keeps the dict that it shows, and so all values in it: it is emptied, unless the
    function may have got it too.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or _reads_locals(code):
        return {}
    shown = frame.f_locals
    found = dict(shown)
    if sys.version_info < (3, 13):
        shown.clear()
    return found


def variable_of(value: Any, frame: FrameType | None) -> str:
    """The variable or attribute of `self` that holds a value, in the outermost function with one; else ""."""
    found = ""
    while frame is not None:
        if is_users_own(frame.f_code.co_filename):
            names = {**frame.f_globals, **locals_of(frame)}
            if (owner := names.get("self")) is not None:
                names |= (
                    dict(owner.named_children())
                    if isinstance(owner, nn.Module)
                    else getattr(owner, "__dict__", {})
                )
            found = next((name for name, each in names.items() if each is value and name != "self"), found)
        frame = frame.f_back
    return found


@cache
def _reads_locals(code: CodeType) -> bool:
    """Whether code calls one of `_READS_LOCALS`; a method of that name, as `model.eval()`, is another one."""
    names = _READS_LOCALS.intersection(code.co_names)
    return bool(names) and any(
        each.argval in names and each.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        for each in dis.get_instructions(code)
    )


def _of_name(
    name: str, value: Any, is_meant: Callable[[str], object], levels: int = 2
) -> Iterator[tuple[str, Any, str]]:
    """What a name holds, with its own name and the one by which code changes it.

    Of an object of a class in a file that is meant, and of those in it as far as `levels` reach, and of the
    modules in a model, it is what each attribute holds; of a function, what each variable around it does.
    """
    if name.startswith("__") or isinstance(value, ModuleType | type | nn.Parameter):
        return
    if _is_container(value):
        yield name, value, name
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules(prefix=name):
            yield from _attributes(path, module, "self" if path != name else name)
    elif isinstance(value, FunctionType):
        for inner, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that has no value yet
                if _is_container(cell.cell_contents):
                    yield inner, cell.cell_contents, inner
    elif levels and is_meant(_file_of_class(value)):
        for attribute, inner in [*getattr(value, "__dict__", {}).items()]:
            yield from _of_name(f"{name}.{attribute}", inner, is_meant, levels - 1)


def _attributes(path: str, value: nn.Module, written: str) -> Iterator[tuple[str, Any, str]]:
    own = vars(nn.Module())
    for attribute, inner in [*vars(value).items()]:
        if attribute not in own and _is_container(inner):
            yield f"{path}.{attribute}", inner, f"{written}.{attribute}"


def _file_of_class(value: Any) -> str:
    return getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""


def _is_container(value: Any) -> bool:
    """Whether a value is a tensor or may hold ever more of them."""
    is_bounded = issubclass(type(value), deque) and value.maxlen is not None
    return issubclass(type(value), Tensor | list | tuple | dict | deque | BaseException) and not is_bounded


def _tensors(
    value: Any, own: Collection[int], named: Collection[int], is_meant: Callable[[str], object]
) -> list[Tensor]:
    """The dense tensors in a value and in what is inside it, but for parameters and storages `own`.

    An exception has the variables of the functions that it passed through; a function has what it keeps, but
    for containers that have a name of their own, whose ids are `named`.
    """
    left, seen, kept, found = [value], 0, set[int](), []
    while left and seen < _MOST_ENTRIES:
        entry, seen = left.pop(), seen + 1
        if issubclass(type(entry), Tensor):  # a proxy may claim another class
            if not isinstance(entry, nn.Parameter) and entry.layout is torch.strided:
                found.append(entry)
        elif issubclass(type(entry), dict):  # other mappings may compute or load their values
            left += islice(dict.values(entry), _MOST_ENTRIES)
        elif issubclass(type(entry), list | tuple | deque):
            left += islice(entry, _MOST_ENTRIES)
        elif issubclass(type(entry), BaseException):
            left += [value for frame, _ in walk_tb(entry.__traceback__) for value in locals_of(frame).values()]
        else:
            inner = {id(each): each for each in _kept_by(entry, is_meant) if id(each) not in named}
            left += [each for key, each in inner.items() if key not in kept]
            kept |= inner.keys()
    return [each for each in found if (key := storage_key(each)) is not None and key not in own]


def _kept_by(value: Any, is_meant: Callable[[str], object]) -> Iterator[Any]:
    """What a function keeps: defaults, variables around it, arguments of a `partial`, the object of a method.

    Of an object of a class in a file that is meant it is what its attributes hold; modules have own names.
    """
    kind = type(value)
    if kind is FunctionType:
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # a variable that has no value yet
                yield cell.cell_contents
    elif issubclass(kind, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind is BuiltinMethodType and issubclass(type(value.__self__), Tensor):
        yield value.__self__
    elif kind is MethodType:
        yield value.__func__
        owner = value.__self__
        if issubclass(type(owner), Tensor):
            yield owner
        elif not issubclass(type(owner), nn.Module) and is_meant(_file_of_class(owner)):
            yield from [*getattr(owner, "__dict__", {}).values()]


def _holding(
    name: str, line: str, held: Any, tensors: list[Tensor], first_node: int, shapes: set[torch.Size]
) -> Holding:
    ages = ages_of(tensors)
    return Holding(
        name=name,
        line=line,
        count=len(tensors),
        size_bytes=sum({storage_key(each): each.nbytes for each in tensors}.values()),
        has_graph=ages is not None,
        is_state=_is_state(held, shapes),
        reaches_back=ages is not None and ages[0] < first_node <= ages[1],
    )


def _is_state(value: Any, shapes: set[torch.Size]) -> bool:
    """Whether a dict, or one in it, has weights of some of the shapes by name, such as "layer.weight"."""
    if not issubclass(type(value), dict):
        return False
    dicts = (each for each in (value, *value.values()) if issubclass(type(each), dict))
    entries = (entry for each in dicts for entry in each.items())
    named = (entry for key, entry in entries if str(key).endswith(".weight") and isinstance(entry, Tensor))
    return any(each.shape in shapes for each in named)


@cache
def _line(code: CodeType, name: str) -> str:
    """The line that adds to a name, or else that assigns it; the file alone if neither is found.

    Lines of the running code count before others of its file. A method of an object writes its name as `self`.
    """
    file = code.co_filename
    lines = linecache.getlines(file)  # which has those of a notebook's cells too
    own_lines = [number for _, _, number in code.co_lines() if number is not None]
    first, last = max(min(own_lines, default=1), 1), max(own_lines, default=0)  # modules begin at 0
    ordered = [*range(first, min(last, len(lines)) + 1), *range(1, first), *range(last + 1, len(lines) + 1)]
    shown = shown_file(file)
    for each in dict.fromkeys((name, re.sub(r".*\.", "self.", name))):
        own = rf"(?<![\w.]){re.escape(each)}"
        adding = (r"\s*\+=", r"\.(append|extend|add|update)\(", r"\[[^]]*\]\s*=[^=]", rf"\s*=[^=].*{own}\b")
        for change in (*adding, r"\s*=[^=]"):
            for number in ordered:
                if number <= len(lines) and re.search(f"{own}{change}", lines[number - 1]):
                    return f"{shown}:{number}"
    return shown
