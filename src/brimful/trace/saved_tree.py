"""Bytes that each module of a trace saves, and frees if recomputed, in the first micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from brimful.trace.modules import ancestors, children_of, paths_of
from brimful.trace.records import Category, Op, Phase, Storage, Trace


class SavedTree:
    """The modules of a trace with what each saves in the first micro-batch."""

    def __init__(self, trace: Trace) -> None:
        self.children = children_of(trace)
        self.classes = dict(trace.module_classes)
        self._ops = trace.ops
        self.saved: dict[str, int] = defaultdict(int)
        self.first_ops: dict[str, int] = {}
        """By path, the index of its first forward op."""
        self._with_ops: set[str] = set()
        self.result: dict[str, Storage] = {}
        """By path, the first storage that its last op to make any has made."""
        self._made_bytes: dict[int, list[int]] = defaultdict(list)
        """By op, the sizes of the storages that it makes."""
        self.total_bytes = 0
        for index, op in enumerate(trace.ops):
            if _is_of_first_forward(op):
                self._with_ops.add(op.module)
                for path in ancestors(op.module):
                    self.first_ops.setdefault(path, index)
        for storage in trace.storages:
            if storage.op is None or not _is_of_first_forward(trace.ops[storage.op]):
                continue
            self._made_bytes[storage.op].append(storage.size_bytes)
            is_saved = storage.category is Category.SAVED_TENSORS
            self.total_bytes += storage.size_bytes * is_saved
            for path in ancestors(trace.ops[storage.op].module):
                self.saved[path] += storage.size_bytes * is_saved
                if path not in self.result or self.result[path].op != storage.op:
                    self.result[path] = storage

    def saved_by(self, unit: str) -> int:
        """Bytes that a unit saves."""
        return self.bytes_saved(self.paths(unit))

    def first_op(self, unit: str) -> int:
        """Index of the first forward op of a unit."""
        return min(self.first_ops[path] for path in self.paths(unit) if path in self.first_ops)

    def bytes_saved(self, paths: Iterable[str]) -> int:
        """Bytes that several parts save."""
        return sum(self.saved[path] for path in paths)

    def bytes_freed(self, run: Sequence[str]) -> int:
        """Bytes that recomputing frees: what a run of parts saves less what it hands on."""
        result = next((self.result[path] for path in reversed(run) if path in self.result), None)
        is_saved = result is not None and result.category is Category.SAVED_TENSORS
        return self.bytes_saved(run) - (result.size_bytes if result is not None and is_saved else 0)

    def bytes_returned(self, path: str) -> int:
        """Bytes of what a part returns, which is taken to be as large as the last tensor that it makes."""
        return self.result[path].size_bytes if path in self.result else 0

    def are_neighbours(self, pair: Sequence[str]) -> bool:
        """Whether two parts are children of one Sequential that are called one after the other."""
        parent = pair[0].rpartition(".")[0]
        siblings = self.children[parent]
        if self.classes.get(parent) != "Sequential" or pair[0] not in siblings:
            return False
        return siblings[siblings.index(pair[0]) :][:2] == list(pair)

    def can_begin(self, path: str) -> bool:
        """Whether a unit can begin with `path`: not if the first thing it does is to write over its input.

        What is written over is not recorded; taken for the input is a block as large as one that the op before
        made, or wrote.
        """
        first = self.first_ops.get(path, 0)
        if first == 0:
            return True
        module = self._ops[first].module
        end = first + 1
        if not self.children[module]:  # in-place dropout draws its mask first
            while end < len(self._ops) and self._ops[end].module == module:
                end += 1
        before = first - 1
        sizes_bytes = self._made_bytes.get(before, ()) or (self._ops[before].written_bytes,)
        return not any(_is_in_place(op) and op.written_bytes in sizes_bytes for op in self._ops[first:end])

    def only_calls_children(self, path: str) -> bool:
        """Whether a part runs no ops between its children: it may be a `Sequential` of another name."""
        return path in self.classes and path not in self._with_ops and self.is_called(path)

    def is_called(self, path: str) -> bool:
        """Whether a part has a forward; containers of modules have none."""
        return self.classes.get(path) not in ("ModuleList", "ModuleDict")

    def paths(self, unit: str) -> tuple[str, ...]:
        """The modules of a unit."""
        return paths_of(unit, self.children)


def _is_of_first_forward(op: Op) -> bool:
    return op.phase is Phase.FORWARD and op.step == 0 and op.micro_batch == 0


def _is_in_place(op: Op) -> bool:
    """Whether an op's name says that it writes over its first argument: "aten.relu_.default"."""
    return op.name.split(".")[1].endswith("_") if "." in op.name else False
