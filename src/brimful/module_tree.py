"""The modules of a trace as a tree of paths, and which unit each op belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from brimful.settings import Span
from brimful.trace import Trace


def unit_of_each_op(trace: Trace, units: Iterable[str]) -> list[int]:
    """Which unit each op belongs to.

    Args:
        trace: Has the ops.
        units: Paths and runs, none inside another.

    Returns:
        By op, the index of its unit; -1 if it is in none, as those of the loss and the optimizer.
    """
    children = children_of(trace)
    unit_of = {path: index for index, unit in enumerate(units) for path in paths_of(unit, children)}
    of_module: dict[str, int] = {}
    for module in (*children, *(child for siblings in children.values() for child in siblings)):
        inside = (unit_of[path] for path in ancestors(module) if path in unit_of)
        of_module[module] = next(inside, -1)
    return [of_module.get(op.module, -1) for op in trace.ops]


def children_of(trace: Trace) -> dict[str, list[str]]:
    """Children of each path, in the order of first call; containers that are never called are paths too."""
    children: dict[str, list[str]] = defaultdict(list)
    seen = {""}
    for fqn, _class in trace.module_classes:
        for path in reversed(list(ancestors(fqn))):
            if path not in seen:
                seen.add(path)
                children[path.rpartition(".")[0]].append(path)
    return children


def ancestors(path: str) -> Iterator[str]:
    """`path`, its parents, and the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def paths_of(unit: str, children: dict[str, list[str]]) -> tuple[str, ...]:
    """The module paths that make up a unit."""
    span = Span.parse(unit)
    if span is None:
        return (unit,)
    prefix = f"{span.parent}." if span.parent else ""
    siblings = children[span.parent]
    start = siblings.index(prefix + span.first)
    stop = siblings.index(prefix + span.last)
    return tuple(siblings[start : stop + 1])
