"""Units: the parts of a model that can each be kept or recomputed, found from what they save.

A unit is a module, or a run of consecutive children of a plain `Sequential`, written `features[0..4]` with the
names of its first and last child.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from brimful.settings import Span
from brimful.trace import Category, Phase, Trace

SMALLEST_SHARE = 1 / 200
"""A part that saves less of the whole than this is no unit: recomputing it would gain nothing to speak of."""

LARGEST_SHARE = 1 / 8
"""A part that saves more than this is divided, unless it is one of several alike. Eight parts or more let
a plan use its budget to within an eighth; repeated blocks are the parts that people checkpoint."""


def find_units(trace: Trace) -> tuple[str, ...]:
    """Units of the model, in the order in which their forwards begin.

    Starting from the whole model, a part is divided into its children as long as it saves a large share and is
    not one of several alike (the blocks of a transformer or a ResNet). A plain `Sequential` of small parts is
    divided into runs instead.

    Args:
        trace: A capture without recomputation.
    """
    tree = _Tree(trace)
    units = [unit for unit in tree.divide("") if tree.saved_by(unit) >= SMALLEST_SHARE * tree.total_bytes]
    return tuple(sorted(units, key=tree.first_op))


class UnitIndex:
    """Finds the unit that a module is in.

    Args:
        units: Paths and runs, none inside another.
    """

    def __init__(self, trace: Trace, units: Iterable[str]) -> None:
        self._of_path: dict[str, int] = {}
        children = _children(trace)
        for index, unit in enumerate(units):
            for path in _paths(unit, children):
                self._of_path[path] = index

    def of(self, module: str) -> int:
        """Index of the unit that `module` is or is in; -1 if none."""
        path = module
        while path:
            index = self._of_path.get(path)
            if index is not None:
                return index
            path = path.rpartition(".")[0]
        return self._of_path.get("", -1)


class _Tree:
    """The modules of a trace with what each saves in the first micro-batch."""

    def __init__(self, trace: Trace) -> None:
        self._children = _children(trace)
        self._classes = dict(trace.module_classes)
        self._saved: dict[str, int] = defaultdict(int)
        self._first: dict[str, int] = {}
        self.total_bytes = 0
        for index, op in enumerate(trace.ops):
            if op.phase is Phase.FORWARD and op.micro_batch == 0 and op.step == 0:
                for path in _ancestors(op.module):
                    self._first.setdefault(path, index)
        for storage in trace.storages:
            if storage.category is not Category.SAVED_TENSORS or storage.op is None:
                continue
            op = trace.ops[storage.op]
            if op.micro_batch == 0 and op.step == 0:
                self.total_bytes += storage.size_bytes
                for path in _ancestors(op.module):
                    self._saved[path] += storage.size_bytes

    def saved_by(self, unit: str) -> int:
        """Bytes that a unit saves."""
        return sum(self._saved[path] for path in _paths(unit, self._children))

    def first_op(self, unit: str) -> int:
        """Index of the first forward op of a unit."""
        return min(self._first[path] for path in _paths(unit, self._children) if path in self._first)

    def divide(self, path: str) -> Iterator[str]:
        """The units in `path`; itself, if it is not to be divided."""
        children = [child for child in self._children[path] if self._saved[child] > 0]
        if not children:
            yield path
        elif self._is_run(path, children):
            yield from self._runs(path)
        else:
            repeated = self._repeated(children)
            for child in children:
                if child in repeated or self._saved[child] <= LARGEST_SHARE * self.total_bytes:
                    yield child
                else:
                    yield from self.divide(child)

    def _repeated(self, children: list[str]) -> frozenset[str]:
        """Children that have a sibling of the same class, and children of their own."""
        by_class = defaultdict(list)
        for child in children:
            by_class[self._classes.get(child)].append(child)
        return frozenset(
            child
            for name, alike in by_class.items()
            if name is not None and name != "Sequential" and len(alike) > 1
            for child in alike
            if self._children[child]
        )

    def _is_run(self, path: str, children: list[str]) -> bool:
        """Whether `path` is a plain Sequential whose children have nothing inside that could be divided."""
        return self._classes.get(path) == "Sequential" and not any(self._children[child] for child in children)

    def _runs(self, path: str) -> Iterator[str]:
        """Runs of children that save an eighth of the whole each, if they can."""
        names = [child[len(path) + 1 :] if path else child for child in self._children[path]]
        saved = [self._saved[child] for child in self._children[path]]
        first, held = 0, 0
        for index, size_bytes in enumerate(saved):
            held += size_bytes
            if held >= LARGEST_SHARE * self.total_bytes or index == len(saved) - 1:
                yield str(Span(parent=path, first=names[first], last=names[index]))
                first, held = index + 1, 0


def _children(trace: Trace) -> dict[str, list[str]]:
    """Children of each path, in the order of first call; containers that are never called are paths too."""
    children: dict[str, list[str]] = defaultdict(list)
    seen = {""}
    for fqn, _class in trace.module_classes:
        for path in reversed(list(_ancestors(fqn))):
            if path not in seen:
                seen.add(path)
                children[path.rpartition(".")[0]].append(path)
    return children


def _ancestors(path: str) -> Iterator[str]:
    """`path`, its parents, and the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _paths(unit: str, children: dict[str, list[str]]) -> tuple[str, ...]:
    """The module paths that make up a unit."""
    span = Span.parse(unit)
    if span is None:
        return (unit,)
    prefix = f"{span.parent}." if span.parent else ""
    siblings = children[span.parent]
    start = siblings.index(prefix + span.first)
    stop = siblings.index(prefix + span.last)
    return tuple(siblings[start : stop + 1])
