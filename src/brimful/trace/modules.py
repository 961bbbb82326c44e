"""The modules of a trace as a tree of paths, and which unit each op belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from brimful.settings import Span
from brimful.trace.records import Phase, Trace


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


def own_checkpoints(trace: Trace) -> int:
    """Regions of the last captured micro-batch that run again in backward though the settings do not say so.

    Args:
        trace: Has the ops.

    Returns:
        How often ops outside of the settings' units begin to run again.
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
    """Units whose forward runs again in backward although it is kept: the model checkpoints them.

    Checkpointing begins with a region's first op and stops early, once it has what backward needs. So a unit
    counts if its first op runs again, and a third of all: not one that only contains a small region.

    Args:
        kept: A capture that keeps every unit.
        units: Their names.

    Returns:
        Their places among `units`.
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
    return {"<loss>", chunked.layer} if chunked else set()


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
