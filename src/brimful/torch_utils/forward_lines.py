"""The line of a model's source that runs an op, found without having watched it run.

An autograd node has no line. What is known of it is its kind, and the modules whose parameters the nodes around
it use: so the line is searched in the source of the forward that calls these modules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from brimful.torch_utils.lines import shown_file

_WRITTEN = {
    "Addmm": r"linear|matmul|@|\bmm\(|addmm",
    "Mm": r"linear|matmul|@|\bmm\(",
    "Bmm": r"matmul|bmm|@|einsum",
    "NativeLayerNorm": r"layer_?norm|norm",
    "NativeGroupNorm": r"group_?norm|norm",
    "NativeBatchNorm": r"batch_?norm|bn|norm",
    "NativeDropout": r"dropout|drop",
    "Softmax": r"softmax",
    "LogSoftmax": r"cross_entropy|log_softmax",
    "NllLoss": r"cross_entropy|nll_loss",
    "Relu": r"relu",
    "Threshold": r"relu",
    "LeakyRelu": r"leaky_?relu",
    "MaxPool2DWithIndices": r"max_?pool",
    "ScaledDotProduct": r"scaled_dot_product|attention",
    "Convolution": r"conv",
    "Mul": r"\*",
    "Div": r"/",
    "Pow": r"\*\*|pow|square",
    "Add": r"\+",
    "Sub": r"-",
}
"""How source calls what makes a kind of node; for others, the name of the kind in lower case."""


class Place(NamedTuple):
    """Where a node is among the modules: the paths of modules whose parameters nodes use."""

    owner: str
    """The module itself, or the innermost one around the nodes before and after."""
    before: str
    after: str


class _Source(NamedTuple):
    file: str
    first: int
    lines: tuple[str, ...]
    """Without comments."""

    def at(self, place: int) -> str:
        return f"{self.file}:{self.first + place}"


class ForwardLines:
    """Finds lines in the source of the modules of some models, by path.

    `call` is the line that calls the model, for models that are made of torch's modules alone.
    """

    def __init__(self, modules: Mapping[str, nn.Module], call: str) -> None:
        self._modules, self._call = modules, call
        self._found: dict[tuple[str, Place], str] = {}

    def line(self, kind: str, place: Place) -> str:
        """The line that runs an op of a kind, such as "Gelu", as "file.py:12"; or the model's call."""
        key = (kind, place)
        if key not in self._found:
            self._found[key] = self._searched(kind, place)
        return self._found[key]

    def _searched(self, kind: str, place: Place) -> str:
        if not place.owner == place.before == place.after:  # it uses no parameter itself
            for neighbour in (place.before, place.after):
                if line := self._beside(kind, place, neighbour):
                    return line
        path, child = place.owner, ""
        while path in self._modules:
            module = self._modules[path]
            for source in _sources(module):
                if child:
                    at = _call_of(source.lines, child)
                else:
                    at = _op_in(source.lines, _pattern(kind, module), *self._bracket(source, place))
                if at is not None:
                    return _inside(module, source, at, kind) if not child else source.at(at)
            if not path:
                break
            path, _, child = path.rpartition(".")
        return self._call

    def _beside(self, kind: str, place: Place, neighbour: str) -> str:
        """The line of an op in the forward that calls a module beside it: at that call, or on its side."""
        path, _, child = neighbour.rpartition(".")
        while len(path) > len(place.owner) and path in self._modules:
            module = self._modules[path]
            for source in _sources(module):
                call = _call_of(source.lines, child)
                if call is not None:
                    lines = source.lines[call:] if neighbour == place.before else source.lines[: call + 1]
                    found = [i for i, text in enumerate(lines) if _pattern(kind, module).search(text)]
                    if found:
                        at = call + found[0] if neighbour == place.before else found[-1]
                        return _inside(module, source, at, kind)
            path, _, child = path.rpartition(".")
        return ""

    def _bracket(self, source: _Source, place: Place) -> tuple[int | None, int | None]:
        """The calls of the modules before and after, among the lines of the owner's forward."""
        prefix = f"{place.owner}." if place.owner else ""
        names = [
            path.removeprefix(prefix).partition(".")[0]
            if path.startswith(prefix) and path != place.owner
            else ""
            for path in (place.before, place.after)
        ]
        before, after = (_call_of(source.lines, name) if name else None for name in names)
        return before, after


def _inside(module: nn.Module, source: _Source, place: int, kind: str) -> str:
    """The line of an op in a module without parameters that a line calls; the line itself if it calls none."""
    for name, child in module.named_children():
        if next(child.parameters(), None) is None and re.search(rf"\.{name}\(", source.lines[place]):
            for inner in _sources(child)[:1]:
                at = _op_in(inner.lines, _pattern(kind, child), None, None)
                return inner.at(at if at is not None else len(inner.lines) - 1)
    return source.at(place)


def _pattern(kind: str, module: nn.Module) -> re.Pattern[str]:
    """What a line may look like that runs an op of a kind in a module's forward."""
    written = next((text for start, text in _WRITTEN.items() if kind == start), None)
    if written is None:
        written = next((text for start, text in _WRITTEN.items() if kind.startswith(start)), kind.lower())
    plain = kind.lower()
    children = [
        rf"\w\.{name}\b" for name, child in module.named_children() if plain in type(child).__name__.lower()
    ]
    return re.compile("|".join([written, *children]))


def _op_in(
    lines: tuple[str, ...], pattern: re.Pattern[str], before: int | None, after: int | None
) -> int | None:
    """The line that a pattern matches between two others, else the one nearest to them."""
    if before is not None and before == after:
        return before
    matching = [place for place, text in enumerate(lines) if place and pattern.search(text)]
    low, high = before or 0, len(lines) if after is None else after
    between = [place for place in matching if low <= place <= high]
    if before is not None and after is not None and after - before == 2 and not between:
        return before + 1
    if between or matching:
        return (between or matching)[0]
    return before if before is not None else after


def _call_of(lines: tuple[str, ...], child: str) -> int | None:
    """The line that calls a child of a module, also as the variable of a loop over children."""
    for place, text in enumerate(lines):
        if not re.search(rf"\b\w+\.{re.escape(child)}\b", text):
            continue
        loop = re.search(r"\bfor\s+(.+?)\s+in\b", text)
        if loop is not None:
            for name in re.findall(r"\w+", loop[1]):
                for later in range(place, len(lines)):
                    if re.search(rf"\b{name}\(", lines[later]):
                        return later
        return place
    return None


def _sources(module: nn.Module) -> tuple[_Source, ...]:
    """The source of a module's forward, then of its other methods; nothing of torch's own classes."""
    kind: Any = type(module)
    return _sources_of(kind)


@cache
def _sources_of(kind: Any) -> tuple[_Source, ...]:
    return tuple(_each_source(kind))


def _each_source(kind: type) -> Iterator[_Source]:
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    others = [value for name, value in vars(kind).items() if inspect.isfunction(value) and name != "__init__"]
    for function in (forward, *(each for each in others if each is not forward)):
        code = getattr(function, "__code__", None)
        file = "" if code is None else shown_file(code.co_filename)
        if not file:
            continue
        try:
            lines, first = inspect.getsourcelines(function)
        except (OSError, TypeError):
            continue
        yield _Source(file, first, tuple(text.partition("#")[0] for text in lines))
