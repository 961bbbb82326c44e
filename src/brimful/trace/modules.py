"""The modules of a trace as a tree of paths, and which unit each op belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from brimful.settings import Span, has_input_ops, module_part, op_kind
from brimful.trace.records import Phase, Trace

INPUT_OP_KINDS = frozenset(
    {"cat", "stack", "_to_copy", "constant_pad_nd", "avg_pool2d", "avg_pool3d"}
    | {"_adaptive_avg_pool2d", "_adaptive_avg_pool3d"}
    | {"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d"}
    | {"upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"}
)
"""Kinds of the ops that the functions in `transforms.input_ops` run: they make a unit's input from tensors that
other layers hold, at the price of a copy. Autocast may cast those first."""

INPUT_MODULES = frozenset({f"ConvTranspose{n}d" for n in (1, 2, 3)} | {"Upsample", "AvgPool2d", "AvgPool3d"})
"""Classes of modules that run a function in `transforms.input_ops`. An upward convolution is among them: in
U-Nets it computes little beside the convolutions that follow."""


LOSS, OPTIMIZER = "<loss>", "<optimizer>"
"""In place of the path of a module: of ops outside of the model, and of those of the update."""


def shown_module(path: str | None) -> str:
    """The path of a module, or words for what is outside of all; "" for None."""
    return {None: "", "": "the model itself", LOSS: "the loss", OPTIMIZER: "the optimizer"}.get(
        path, path or ""
    )


def unit_of_each_op(trace: Trace, units: Iterable[str]) -> list[int]:
    """By op, the index of its unit; -1 if it is in none, as ops of the loss and the optimizer are.

    `units` are paths and runs, none inside another; with the ops that make their input or without.
    """
    units, children = tuple(units), children_of(trace)
    unit_of = {path: index for index, unit in enumerate(units) for path in paths_of(unit, children)}
    of_module: dict[str, int] = {}
    for module in (*children, *(child for siblings in children.values() for child in siblings)):
        inside = (unit_of[path] for path in ancestors(module) if path in unit_of)
        of_module[module] = next(inside, -1)
    owner = [of_module.get(op.module, -1) for op in trace.ops]
    for index, unit in _input_ops(trace, owner, frozenset(i for i, u in enumerate(units) if has_input_ops(u))):
        owner[index] = unit
    return owner


def _input_ops(trace: Trace, owner: Sequence[int], units: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Ops that run right before some units and make their input, each with its unit."""
    classes = dict(trace.module_classes)
    unit = -1
    following: Phase | None = None
    for index in range(len(trace.ops) - 1, -1, -1) if units else ():
        op = trace.ops[index]
        if owner[index] >= 0:
            unit, following = owner[index] if owner[index] in units else -1, op.phase
        elif (
            unit >= 0
            and op.phase is following
            and (op.phase is Phase.FORWARD or op.recomputed)
            and (op_kind(op.name) in INPUT_OP_KINDS or classes.get(op.module) in INPUT_MODULES)
        ):
            yield index, unit
        elif op_kind(op.name) != "clone":  # of a run's buffers, which its recomputation works on
            unit = -1


def own_checkpoints(trace: Trace) -> int:
    """Regions of the last captured micro-batch that run again in backward though the settings do not say so.

    A region is counted each time ops outside of the settings' units begin to run again.
    """
    settings = trace.settings
    chunked = _chunked_modules(trace)
    last = (trace.captured_steps - 1, trace.captured_micro_batches - 1)
    count, is_inside = 0, False
    for op, unit in zip(trace.ops, unit_of_each_op(trace, settings.changed), strict=True):
        if (op.step, op.micro_batch) == last and op.phase is Phase.BACKWARD:
            is_own = op.recomputed and unit < 0 and op.module not in chunked
            count += is_own and not is_inside
            is_inside = is_own
    return count


def own_checkpointed_units(kept: Trace, units: Sequence[str]) -> frozenset[int]:
    """Places of the units whose forward runs again in backward although `kept` keeps every unit.

    The model checkpoints them. Checkpointing begins with a region's first op and stops early, once it has what
    backward needs. So a unit counts if its first op runs again, and a third of all: not one that only contains
    a small region.
    """
    chunked = _chunked_modules(kept)
    forward, again = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for op, unit in zip(kept.ops, unit_of_each_op(kept, units), strict=True):
        if op.phase is Phase.FORWARD:
            forward[unit].append(op.name)
        elif op.phase is Phase.BACKWARD and op.recomputed and op.module not in chunked:
            again[unit].append(op.name)
    return frozenset(
        unit
        for unit, ops in again.items()
        if unit >= 0 and ops[:1] == forward[unit][:1] and 3 * len(ops) >= len(forward[unit])
    )


def _chunked_modules(trace: Trace) -> set[str]:
    """Modules of a loss in chunks, which is computed again in backward by its own rules."""
    chunked = trace.settings.chunked_loss
    return {LOSS, chunked.layer} if chunked else set()


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
        return (module_part(unit),)
    prefix = f"{span.parent}." if span.parent else ""
    siblings = children[span.parent]
    start = siblings.index(prefix + span.first)
    stop = siblings.index(prefix + span.last)
    return tuple(siblings[start : stop + 1])
