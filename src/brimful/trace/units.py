"""Units: the parts of a model that can each be kept or recomputed, found from what they save.

A unit is a module, or a run of consecutive children of a plain `Sequential`, written `features[0..4]` with the
names of its first and last child.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from brimful.settings import Span
from brimful.trace.modules import ancestors, children_of, paths_of
from brimful.trace.records import Category, Op, Phase, Storage, Trace

SMALLEST_SHARE = 1 / 200
"""A part that saves less of the whole than this is no unit: recomputing it would gain nothing to speak of."""

LARGEST_SHARE = 1 / 8
"""A part that saves more than this is divided, unless it is one of several alike. Eight parts or more let
a plan use its budget to within an eighth; repeated blocks are the parts that people checkpoint."""


def find_units(trace: Trace) -> tuple[str, ...]:
    """Units of the model, in the order in which their forwards begin.

    Starting from the whole model, a part is divided into its children as long as it saves a large share and is
    not one of several alike (the blocks of a transformer or a ResNet) and its children free enough. A plain
    `Sequential` of small parts is divided into runs instead. No unit begins by changing its input in place, as
    an in-place ReLU does: there would be nothing left to recompute it from.

    Args:
        trace: A capture without recomputation.

    Returns:
        Paths of modules, and runs "parent[first..last]" of a Sequential's children.
    """
    tree = _Tree(trace)
    units = [unit for unit in tree.divide("") if tree.saved_by(unit) >= SMALLEST_SHARE * tree.total_bytes]
    return tuple(sorted(units, key=tree.first_op))


def divide_unit(trace: Trace, unit: str) -> tuple[str, ...]:
    """Parts that can take the place of a unit: children of it or deeper, or two runs of a Sequential's.

    Args:
        trace: A capture without recomputation.
        unit: Path of a module or a run.

    Returns:
        In the order in which their forwards begin, parts of which at least two free an eighth of the unit or
        more when they are recomputed; the unit alone if it has none such. A part that frees nothing may be
        among them: if it is nested, its input is let go.
    """
    tree = _Tree(trace)
    return tuple(sorted(tree.parts(unit), key=tree.first_op)) or (unit,)


class _Tree:
    """The modules of a trace with what each saves in the first micro-batch."""

    def __init__(self, trace: Trace) -> None:
        self._children = children_of(trace)
        self._classes = dict(trace.module_classes)
        self._ops = trace.ops
        self._saved: dict[str, int] = defaultdict(int)
        self._first: dict[str, int] = {}
        self._result: dict[str, Storage] = {}
        """By path, the first storage that its last op to make any has made."""
        self._made_bytes: dict[int, list[int]] = defaultdict(list)
        """By op, the sizes of the storages that it makes."""
        self.total_bytes = 0
        for index, op in enumerate(trace.ops):
            if _is_of_first_forward(op):
                for path in ancestors(op.module):
                    self._first.setdefault(path, index)
        for storage in trace.storages:
            if storage.op is None or not _is_of_first_forward(trace.ops[storage.op]):
                continue
            self._made_bytes[storage.op].append(storage.size_bytes)
            is_saved = storage.category is Category.SAVED_TENSORS
            self.total_bytes += storage.size_bytes * is_saved
            for path in ancestors(trace.ops[storage.op].module):
                self._saved[path] += storage.size_bytes * is_saved
                if path not in self._result or self._result[path].op != storage.op:
                    self._result[path] = storage

    def saved_by(self, unit: str) -> int:
        """Bytes that a unit saves."""
        return self._saved_by(self._paths(unit))

    def first_op(self, unit: str) -> int:
        """Index of the first forward op of a unit."""
        return min(self._first[path] for path in self._paths(unit) if path in self._first)

    def divide(self, path: str) -> Iterator[str]:
        """The units in `path`; itself, if it is not to be divided."""
        children = [child for child in self._children[path] if self._saved[child] > 0]
        if self._is_run(path, children):
            yield from self._runs(path)
        elif self._frees_more_whole(path, children) and self._can_begin(path):
            yield path
        elif sum(self._saved[child] for child in children) * 2 < self._saved[path] and self._can_begin(path):
            yield path  # most of what it saves would be in none of its children
        else:
            repeated = self._repeated(children)
            for child in children:
                is_small = child in repeated or self._saved[child] <= LARGEST_SHARE * self.total_bytes
                if is_small and self._is_called(child) and self._can_begin(child):
                    yield child
                else:
                    yield from self.divide(child)

    def parts(self, unit: str) -> list[str]:
        """Parts of a unit of which two free much of it; none if there are no such parts."""
        needed_bytes = LARGEST_SHARE * self.saved_by(unit)
        if Span.parse(unit) is not None or self._classes.get(unit) == "Sequential":
            return self._halves(unit, needed_bytes)
        children = [child for child in self._called_children(unit) if self._can_begin(child)]
        freeing = [child for child in children if self._freed_by([child]) >= needed_bytes]
        if len(freeing) != 1:
            return children if freeing else []
        inside = self.parts(freeing[0])
        return [child for child in children if child not in freeing] + inside if inside else []

    def _halves(self, unit: str, needed_bytes: float) -> list[str]:
        """Two runs of the children of a Sequential, or of a run of them, that save as much as each other."""
        children = self._children[unit] if Span.parse(unit) is None else list(self._paths(unit))
        halves = [
            (children[:cut], children[cut:])
            for cut in range(1, len(children))
            if self._can_begin(children[cut])
            and min(self._freed_by(children[:cut]), self._freed_by(children[cut:])) >= needed_bytes
        ]
        best = min(halves, key=lambda runs: max(map(self._saved_by, runs)), default=())
        return [str(Span.of(run)) if len(run) > 1 else run[0] for run in best]

    def _called_children(self, path: str) -> list[str]:
        """Children that run in the forward; of those that are never called, theirs."""
        return [
            called
            for child in self._children[path]
            if child in self._first
            for called in ([child] if self._is_called(child) else self._called_children(child))
        ]

    def _paths(self, unit: str) -> tuple[str, ...]:
        return paths_of(unit, self._children)

    def _saved_by(self, paths: Iterable[str]) -> int:
        return sum(self._saved[path] for path in paths)

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

    def _frees_more_whole(self, path: str, children: list[str]) -> bool:
        """Whether recomputing a part frees more than twice what recomputing its children one by one does.

        Layers that save what they hand on, as convolutions and BatchNorm do, free nothing by themselves.
        """
        if not path or self._classes.get(path) in (
            "ModuleList",
            "ModuleDict",
        ):  # what is never called is no unit
            return False
        return 2 * sum(self._freed_by([child]) for child in children) < self._freed_by([path])

    def _is_called(self, path: str) -> bool:
        """Whether a part has a forward; containers of modules have none."""
        return self._classes.get(path) not in ("ModuleList", "ModuleDict")

    def _freed_by(self, run: Sequence[str]) -> int:
        """Bytes that recomputing frees: what a run of parts saves less what it hands on."""
        result = next((self._result[path] for path in reversed(run) if path in self._result), None)
        is_saved = result is not None and result.category is Category.SAVED_TENSORS
        return self._saved_by(run) - (result.size_bytes if result is not None and is_saved else 0)

    def _is_run(self, path: str, children: list[str]) -> bool:
        """Whether `path` is a plain Sequential whose children have nothing inside that could be divided."""
        is_plain = self._classes.get(path) == "Sequential"
        return is_plain and bool(children) and not any(self._children[child] for child in children)

    def _runs(self, path: str) -> Iterator[str]:
        """Runs of children, each of which frees an eighth of the whole when it is recomputed, if they can.

        A run frees what it saves less what it hands on, from which the next one is recomputed. It ends where
        that is little, and saved anyway.
        """
        children = self._children[path]
        needed_bytes = LARGEST_SHARE * self.total_bytes
        runs: list[tuple[int, int]] = []
        first, saved_bytes, result = 0, 0, None
        for index, child in enumerate(children):
            if first == index and not self._can_begin(child):
                first += 1
                continue
            saved_bytes += self._saved[child]
            result = self._result.get(child, result)
            if index + 1 == len(children):
                runs.append((first, index))
            elif result is not None and self._can_begin(children[index + 1]):
                is_saved = result.category is Category.SAVED_TENSORS
                freed_bytes = saved_bytes - result.size_bytes
                if is_saved and freed_bytes >= max(needed_bytes, 2 * result.size_bytes):
                    runs.append((first, index))
                    first, saved_bytes, result = index + 1, 0, None
        if len(runs) > 1 and saved_bytes < needed_bytes:  # the rest is too little for a run of its own
            runs[-2:] = [(runs[-2][0], runs[-1][1])]
        for first, last in runs:
            is_whole = (first, last) == (0, len(children) - 1)
            yield path if is_whole else str(Span.of(children[first : last + 1]))

    def _can_begin(self, path: str) -> bool:
        """Whether a unit can begin with `path`: not if the first thing it does is to write over its input.

        What is written over is not recorded; taken for the input is a block as large as one that the op before
        made, or wrote.
        """
        first = self._first.get(path, 0)
        if first == 0:
            return True
        module = self._ops[first].module
        end = first + 1
        if not self._children[module]:  # in-place dropout draws its mask first
            while end < len(self._ops) and self._ops[end].module == module:
                end += 1
        before = first - 1
        sizes_bytes = self._made_bytes.get(before, ()) or (self._ops[before].written_bytes,)
        return not any(_is_in_place(op) and op.written_bytes in sizes_bytes for op in self._ops[first:end])


def _is_of_first_forward(op: Op) -> bool:
    return op.phase is Phase.FORWARD and op.step == 0 and op.micro_batch == 0


def _is_in_place(op: Op) -> bool:
    """Whether an op's name says that it writes over its first argument: "aten.relu_.default"."""
    return op.name.split(".")[1].endswith("_") if "." in op.name else False
