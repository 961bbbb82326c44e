"""Units: the parts of a model that can each be kept or recomputed, found from what they save.

A unit is a module, or a run of consecutive children of a plain `Sequential`, written `features[0..4]` with the
names of its first and last child.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from brimful.settings import Span, has_input_ops, module_part, with_input_ops
from brimful.trace.modules import INPUT_MODULES, unit_of_each_op
from brimful.trace.records import Category, Phase, Trace
from brimful.trace.saved_tree import SavedTree

SMALLEST_SHARE = 1 / 200
"""A part that saves a smaller fraction of the whole is not a unit: recomputing it would gain almost nothing.
Parts of one class in one module are units all the same if together they save `LARGEST_SHARE`: 300 blocks."""

LARGEST_SHARE = 1 / 8
"""A part that saves a larger fraction is divided, unless it is one of several alike. With eight parts or more a
plan can use its budget to within an eighth; repeated blocks are what is usually checkpointed."""

LEAST_RETURNED_SHARE = 1 / 10
"""Fraction of what a pair saves that its first part must return. A bottleneck block of a ResNet returns 0.12 to
0.25 of that, a transformer's block 0.03."""

LEAST_SAVED_BY_RUNS = 1 / 8
"""Fraction that runs must take less than other units, as they are captured too. A choice of ours: the blocks of
a ResNet-50 would gain less, layers by the hundred gain more."""

RATIO_OF_BOUNDS = 0.85
"""Each bound tried for nested runs is this fraction of the one before. A choice: the longest run is then within
a sixth of the best."""


def find_units(trace: Trace) -> tuple[str, ...]:
    """Units of the model, from a capture without recomputation, in the order in which their forwards begin.

    Starting from the whole model, a part is divided into its children as long as it saves a large share and is
    not one of several alike (the blocks of a transformer or a ResNet) and its children free enough. A plain
    `Sequential` of small parts is divided into runs "parent[first..last]" instead. No unit begins by changing
    its input in place, as an in-place ReLU does: there would be nothing left to recompute it from.
    """
    tree = SavedTree(trace)
    by_kind: dict[tuple[str, str], list[str]] = defaultdict(list)
    for unit in _divide(tree, ""):
        by_kind[unit.rpartition(".")[0], tree.classes.get(unit, unit)].append(unit)
    units = []
    for alike in by_kind.values():
        is_large = sum(map(tree.saved_by, alike)) >= LARGEST_SHARE * tree.total_bytes
        units += [
            each for each in alike if is_large or tree.saved_by(each) >= SMALLEST_SHARE * tree.total_bytes
        ]
    return tuple(sorted(units, key=tree.first_op))


def join_input_ops(trace: Trace, units: Sequence[str]) -> tuple[str, ...]:
    """The units, each together with the ops that make its input where that is large and would be held.

    Modules that run such ops are not units of their own then. The trace is a capture without recomputation, the
    units are in the order in which their forwards begin.
    """
    tree = SavedTree(trace)
    others = [unit for unit in units if tree.classes.get(unit) not in INPUT_MODULES]
    made_bytes = _input_bytes(trace, others)
    joined = {
        unit
        for unit, size_bytes in zip(others, made_bytes, strict=True)
        if size_bytes >= SMALLEST_SHARE * tree.total_bytes
    }
    kept = [u for u, after in zip(units, [*units[1:], ""], strict=True) if u in others or after not in joined]
    return tuple(with_input_ops(unit) if unit in joined else unit for unit in kept)


def undivided(trace: Trace, units: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Coarser units: each time those that make up one module are replaced by it.

    A part that hands on more than it frees had better be a part of a larger unit, which holds its input only.
    The trace is a capture without recomputation, the units are in the order in which their forwards begin.
    """
    tree = SavedTree(trace)
    for parent in dict.fromkeys(unit.rpartition(".")[0] for unit in units):
        children = [child for child in tree.children[parent] if tree.first_ops.get(child) is not None]
        place = units.index(children[0]) if children and children[0] in units else len(units)
        is_all = list(units[place : place + len(children)]) == children
        if parent and len(children) > 1 and is_all and tree.only_calls_children(parent):
            yield (*units[:place], parent, *units[place + len(children) :])


def paired(trace: Trace, units: Sequence[str]) -> tuple[str, ...]:
    """Coarser units: two neighbours in a Sequential as one, where much of what they save is what one passes on.

    A pair holds its input only. What its first part passes on is one of the results that it may save, or make
    again by cheap ops, as in a residual network, whose blocks end in an addition. No pair saves more than a
    quarter of the whole, which its recomputation makes at once.

    The trace is a capture without recomputation, the units are in the order in which their forwards begin.
    """
    tree = SavedTree(trace)
    found: list[str] = []
    place = 0
    while place < len(units):
        pair = units[place : place + 2]
        saved_bytes = tree.bytes_saved(pair)
        is_pair = (
            len(pair) > 1
            and tree.are_neighbours(pair)
            and saved_bytes <= 2 * LARGEST_SHARE * tree.total_bytes
            and tree.bytes_returned(pair[0]) >= LEAST_RETURNED_SHARE * saved_bytes
        )
        found.append(str(Span.of(pair)) if is_pair else units[place])
        place += 1 + is_pair
    return tuple(found)


def freed_bytes(trace: Trace, units: Sequence[str]) -> int:
    """Bytes less that the first micro-batch holds at most where all units are recomputed, one by one.

    The trace is a capture without recomputation, the units are in the order in which their forwards begin.
    """
    tree = SavedTree(trace)
    runs = [tree.paths(unit) for unit in units]
    return sum(map(tree.bytes_saved, runs)) - _recomputed_bytes(tree, runs)


def in_runs(trace: Trace, units: Sequence[str]) -> tuple[str, ...]:
    """Checkpoint segments of any length that take least where all are recomputed: runs of a Sequential's units.

    A step that recomputes everything holds most in the backward of some run: what that run saves, and the
    inputs of all runs up to it. Given a bound of these bytes, each run is as long as the bound permits, so the
    first run is the longest. The smallest bound that suffices is searched. n equal layers that each save s and
    return r take about √(2nrs), where √n segments of one length take 2√(nrs).

    The units are returned as they are where runs do not take an eighth less. The trace is a capture without
    recomputation, the units are in the order in which their forwards begin.
    """
    tree = SavedTree(trace)
    parts = [part for unit in units for part in _parts_of_run(tree, unit)]
    unit_bytes = _recomputed_bytes(tree, [tree.paths(unit) for unit in units])
    least_bytes, most_bytes = 0, int(unit_bytes * (1 - LEAST_SAVED_BY_RUNS))
    found: tuple[str, ...] = tuple(units)
    while most_bytes - least_bytes > max(SMALLEST_SHARE * most_bytes, 1):
        bound_bytes = (least_bytes + most_bytes) // 2
        runs = _runs_within(tree, parts, bound_bytes)
        needed_bytes = _recomputed_bytes(tree, runs)
        if needed_bytes <= bound_bytes:
            found, most_bytes = tuple(_unit_of_run(tree, run) for run in runs), needed_bytes
        else:
            least_bytes = bound_bytes
    return found


def in_nested_runs(trace: Trace, units: Sequence[str]) -> tuple[str, ...]:
    """Checkpoint segments that take least where they are nested in longer ones; see `in_runs`.

    All runs save about as much then. k runs whose inputs take r each, in segments of √k, hold about 2r√k of
    inputs: the first of each segment, and those inside one. Bounds on what a run saves are tried from all that
    is saved to what the largest part saves, below which runs only become more. The units are returned as they
    are where that does not take an eighth less.
    """
    tree = SavedTree(trace)
    parts = [part for unit in units for part in _parts_of_run(tree, unit)]

    def nested_bytes(runs: Sequence[Sequence[str]]) -> float:
        inputs_bytes = [tree.bytes_returned(run[-1]) for run in runs[:-1]]
        largest_bytes = max(tree.bytes_saved(run) for run in runs)
        return largest_bytes + 2 * math.sqrt(sum(inputs_bytes) * max(inputs_bytes, default=0))

    largest_share = max(map(tree.saved_by, parts)) / tree.total_bytes
    steps = math.ceil(math.log(largest_share, RATIO_OF_BOUNDS))
    bounds = [tree.total_bytes * RATIO_OF_BOUNDS**step for step in range(steps + 1)]
    runs = min((_runs_within(tree, parts, bound, holds_inputs=False) for bound in bounds), key=nested_bytes)
    unit_bytes = nested_bytes([tree.paths(unit) for unit in units])
    is_less = nested_bytes(runs) <= unit_bytes * (1 - LEAST_SAVED_BY_RUNS)
    return tuple(_unit_of_run(tree, run) for run in runs) if is_less else tuple(units)


def _parts_of_run(tree: SavedTree, unit: str) -> tuple[str, ...]:
    """The children of a Sequential or of a run of its children; any other unit alone.

    A small Sequential in a Sequential is one of its blocks, of which runs are made whole.
    """
    if has_input_ops(unit):
        return (unit,)
    is_inside = tree.classes.get(unit.rpartition(".")[0]) == "Sequential"
    is_block = is_inside and tree.saved_by(unit) <= LARGEST_SHARE * tree.total_bytes
    if tree.classes.get(unit) == "Sequential" and not is_block:
        return tuple(child for child in tree.children[unit] if child in tree.first_ops) or (unit,)
    return tuple(tree.paths(unit))


def _runs_within(
    tree: SavedTree, parts: Sequence[str], bound_bytes: float, *, holds_inputs: bool = True
) -> list[tuple[str, ...]]:
    """Runs of neighbours, each as long as what it saves, and the inputs held then, stay within a bound."""
    runs: list[tuple[str, ...]] = []
    held_bytes = saved_bytes = 0
    for part in parts:
        part_bytes = tree.saved_by(part)
        is_next = bool(runs) and tree.are_neighbours((runs[-1][-1], part))
        fits = held_bytes + saved_bytes + part_bytes <= bound_bytes
        if is_next and (fits or not tree.can_begin(part)):
            runs[-1], saved_bytes = (*runs[-1], part), saved_bytes + part_bytes
        else:
            held_bytes += tree.bytes_returned(runs[-1][-1]) if runs and holds_inputs else 0
            runs.append((part,))
            saved_bytes = part_bytes
    return runs


def _recomputed_bytes(tree: SavedTree, runs: Sequence[Sequence[str]]) -> int:
    """The most bytes that recomputing runs holds: what one saves, and the inputs of all up to it."""
    held_bytes = itertools.accumulate((tree.bytes_returned(run[-1]) for run in runs[:-1]), initial=0)
    return max((held + tree.bytes_saved(run) for held, run in zip(held_bytes, runs, strict=False)), default=0)


def _unit_of_run(tree: SavedTree, run: Sequence[str]) -> str:
    """The unit that a run of neighbours makes: their parent, if that is all of its children."""
    parent = run[0].rpartition(".")[0]
    if len(run) == 1:
        return run[0]
    return parent if parent and list(run) == tree.children[parent] else str(Span.of(run))


def _input_bytes(trace: Trace, units: Sequence[str]) -> list[int]:
    """For each unit, bytes saved for backward of what the ops make that make its input, in one micro-batch."""
    plain = unit_of_each_op(trace, map(module_part, units))
    joined = unit_of_each_op(trace, map(with_input_ops, units))
    made_bytes = [0] * len(units)
    for storage in trace.storages:
        if storage.category is Category.SAVED_TENSORS and storage.op is not None:
            op, unit = trace.ops[storage.op], joined[storage.op]
            is_first = op.phase is Phase.FORWARD and op.step == 0 and op.micro_batch == 0
            made_bytes[unit] += storage.size_bytes * (is_first and unit != plain[storage.op])
    return made_bytes


def divide_unit(trace: Trace, unit: str, *, freeing_inputs: bool = False) -> tuple[str, ...]:
    """Parts that can take the place of a unit: children of it or deeper, or two runs of a Sequential's.

    The parts are in the order in which their forwards begin, and at least two free an eighth of the unit or
    more when they are recomputed; the unit alone if it has none such. A part that frees nothing may be among
    them: if it is nested, its input is freed. The trace is a capture without recomputation.

    `freeing_inputs` is whether the ops that make a part's input will belong to it, and it is enough if the
    first of two runs frees much: the second then holds nothing of the first in its own backward.
    """
    tree = SavedTree(trace)
    parts = _parts(trace, tree, module_part(unit), freeing_inputs)
    if not all(any(path in tree.first_ops for path in tree.paths(part)) for part in parts):
        return (unit,)  # a part does not run by itself, such as a layer whose loss is computed in chunks
    parts = sorted(parts, key=tree.first_op)
    if parts and has_input_ops(unit):
        parts[0] = with_input_ops(parts[0])
    return tuple(parts) or (unit,)


def _divide(tree: SavedTree, path: str) -> Iterator[str]:
    """The units in `path`; itself, if it is not to be divided."""
    children = [child for child in tree.children[path] if tree.saved[child] > 0]
    if _is_run(tree, path, children):
        yield from _runs(tree, path)
    elif _frees_more_whole(tree, path, children) and tree.can_begin(path):
        yield path
    elif sum(tree.saved[child] for child in children) * 2 < tree.saved[path] and tree.can_begin(path):
        yield path  # most of what it saves would be in none of its children
    else:
        repeated = _repeated(tree, children)
        for child in children:
            is_small = child in repeated or tree.saved[child] <= LARGEST_SHARE * tree.total_bytes
            if is_small and tree.is_called(child) and tree.can_begin(child):
                yield child
            else:
                yield from _divide(tree, child)


def _parts(trace: Trace, tree: SavedTree, unit: str, freeing_inputs: bool) -> list[str]:
    """Parts of a unit of which two free much of it; none if there are no such parts."""
    needed_bytes = LARGEST_SHARE * tree.saved_by(unit)
    if Span.parse(unit) is not None or tree.classes.get(unit) == "Sequential":
        return _halves(tree, unit, needed_bytes, _input_bytes(trace, [unit])[0] if freeing_inputs else None)
    children = [child for child in _called_children(tree, unit) if tree.can_begin(child)]
    freeing = [child for child in children if tree.bytes_freed([child]) >= needed_bytes]
    if freeing_inputs and not freeing and tree.only_calls_children(unit):
        # Applying it fails if this is not a Sequential.
        return _halves(tree, unit, needed_bytes, _input_bytes(trace, [unit])[0])
    if len(freeing) != 1:
        return children if freeing else []
    inside = _parts(trace, tree, freeing[0], freeing_inputs)
    return [child for child in children if child not in freeing] + inside if inside else []


def _halves(tree: SavedTree, unit: str, needed_bytes: float, input_bytes: int | None) -> list[str]:
    """Two runs of the children of a Sequential, or of a run of them, that save as much as each other.

    Both free much. If the ops that make the input belong to the first, of `input_bytes`, it is enough if that
    does.
    """
    children = tree.children[unit] if Span.parse(unit) is None else list(tree.paths(unit))
    cuts = [cut for cut in range(1, len(children)) if tree.can_begin(children[cut])]

    def bytes_freed(cut: int) -> tuple[int, int]:
        return tree.bytes_freed(children[:cut]) + (input_bytes or 0), tree.bytes_freed(children[cut:])

    def largest(cut: int) -> int:
        return max(tree.bytes_saved(children[:cut]) + (input_bytes or 0), tree.bytes_saved(children[cut:]))

    both = [cut for cut in cuts if min(bytes_freed(cut)) >= needed_bytes]
    if not both and input_bytes is not None:
        both = [cut for cut in cuts if bytes_freed(cut)[0] >= needed_bytes]
    if not both:
        return []
    best = min(both, key=largest)
    runs = (children[:best], children[best:])
    return [str(Span.of(run)) if len(run) > 1 else run[0] for run in runs]


def _called_children(tree: SavedTree, path: str) -> list[str]:
    """Children that run in the forward, and the children of those that are never called."""
    return [
        called
        for child in tree.children[path]
        if child in tree.first_ops
        for called in ([child] if tree.is_called(child) else _called_children(tree, child))
    ]


def _repeated(tree: SavedTree, children: list[str]) -> frozenset[str]:
    """Children that have a sibling of the same class, and children of their own."""
    by_class = defaultdict(list)
    for child in children:
        by_class[tree.classes.get(child)].append(child)
    return frozenset(
        child
        for name, alike in by_class.items()
        if name is not None and name != "Sequential" and len(alike) > 1
        for child in alike
        if tree.children[child]
    )


def _frees_more_whole(tree: SavedTree, path: str, children: list[str]) -> bool:
    """Whether recomputing a part frees more than twice what recomputing its children one by one does.

    Layers that save what they hand on, as convolutions and BatchNorm do, free nothing by themselves.
    """
    if not path or tree.classes.get(path) in (
        "ModuleList",
        "ModuleDict",
    ):  # a module that is never called is not a unit
        return False
    return 2 * sum(tree.bytes_freed([child]) for child in children) < tree.bytes_freed([path])


def _is_run(tree: SavedTree, path: str, children: list[str]) -> bool:
    """Whether `path` is a plain Sequential whose children have nothing inside that could be divided.

    Nor are small children divided.
    """
    is_plain = tree.classes.get(path) == "Sequential"
    least_bytes = SMALLEST_SHARE * tree.total_bytes
    return (
        is_plain
        and bool(children)
        and not any(tree.children[child] and tree.saved[child] >= least_bytes for child in children)
    )


def _runs(tree: SavedTree, path: str) -> Iterator[str]:
    """Runs of children, each of which frees an eighth of the whole when it is recomputed, if they can.

    A run frees what it saves less what it hands on, from which the next one is recomputed. It ends where
    that is little, and saved anyway.
    """
    children = tree.children[path]
    needed_bytes = LARGEST_SHARE * tree.total_bytes
    runs: list[tuple[int, int]] = []
    first, saved_bytes, result = 0, 0, None
    for index, child in enumerate(children):
        if first == index and not tree.can_begin(child):
            first += 1
            continue
        saved_bytes += tree.saved[child]
        result = tree.result.get(child, result)
        if index + 1 == len(children):
            runs.append((first, index))
        elif result is not None and tree.can_begin(children[index + 1]):
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
