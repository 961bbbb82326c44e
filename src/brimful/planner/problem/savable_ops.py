"""Which ops of a recomputed unit could be saved instead, what that takes and what it spares, from one capture.

A capture that recomputes every unit shows each op of a unit twice: in the forward and in the recomputation. If
what the op returns is saved, it is held from where the forward freed it to where the recomputation makes it
again; where it is still held then, there is one copy fewer. Nothing else changes, so one capture prices every
set of saved ops.

Time is additive over the ops not saved, up to where the recomputation stops early. So the sets worth trying are
those that fill a knapsack by seconds spared per byte: each is the one before it and one op more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from brimful.memory import rounding_bytes_of
from brimful.settings import has_input_ops, module_part, op_kind
from brimful.trace import EventKind, Op, Phase, Trace, unit_of_each_op
from brimful.utils.quantities import round_up

MOST_SETS = 10
"""Sets of saved ops tried for a unit; with more ops, several are added at once."""

CASTS = "_to_copy"
"""Autocast keeps casts of weights, so a recomputation may run another number of them."""

_CHOICES = frozenset({"topk"})
"""Kinds of ops that are always saved. A router's choice of experts must not come out otherwise when it is
recomputed, and may: CUDA's top-k breaks ties in any order, and scores that differ in their last digit change
places. What they return is small, a few numbers a token."""

_NEVER_SAVED = frozenset({CASTS, "clone", "empty"})
"""Kinds of ops that are never saved. Some clones are of buffers, made by what recomputes, which does not count
them; an empty tensor is nothing to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """How saving a result changes the time for which it is held."""

    first_event: int
    """Event of the trace at which the forward drops it, or the recomputation makes it a second time."""
    stop_event: int
    """Event at which the recomputation makes it again, or the first of two is dropped."""
    size_bytes: int
    """Bytes held more; negative where there is one copy fewer."""
    begins_in_forward: bool
    """Whether it is held between forward and backward. What a unit returns is not: the next unit holds it as
    its input, to the end of its own backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavableOp:
    """An op that a recomputation runs again, and need not."""

    name: str
    """Name of the op, as in `UnitAction.saved`."""
    seconds: float
    """Time to run it again."""
    extensions: tuple[Extension, ...]
    """Extensions of what it returns, in every micro-batch captured."""
    size_bytes: int
    """Bytes held more between forward and backward of one micro-batch."""

    @property
    def is_choice(self) -> bool:
        """Whether what it returns says on what the following ops work."""
        return self.name.partition("#")[0] in _CHOICES


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOps:
    """The ops of one unit in a capture that recomputes it."""

    forward_count: int
    """Ops of its forward."""
    recompute_seconds: float
    """Time of its recomputation, with nothing saved."""
    savable: tuple[SavableOp, ...]
    """Ops, the one most worth saving first; none where forward and recomputation cannot be matched."""

    @property
    def choices(self) -> tuple[SavableOp, ...]:
        """The ops that every set begins with, and that are saved wherever the unit is recomputed."""
        return tuple(op for op in self.savable if op.is_choice)

    def sets(self) -> Iterator[tuple[SavableOp, ...]]:
        """Sets of ops worth saving, each with those before it, the choices alone first; about `MOST_SETS`."""
        total_bytes = sum(op.size_bytes for op in self.savable)
        chosen_bytes = reached_bytes = 0
        for count, op in enumerate(self.savable, 1):
            chosen_bytes += op.size_bytes
            if count < len(self.choices):
                continue
            is_step = chosen_bytes - reached_bytes >= total_bytes / MOST_SETS
            if len(self.savable) <= MOST_SETS or is_step or count == len(self.choices):
                reached_bytes = chosen_bytes
                yield self.savable[:count]


def unit_ops(
    recomputed: Trace, units: Sequence[str], *, micro_batches: int, seconds: Callable[[Op], float]
) -> list[UnitOps]:
    """The ops of each unit in a capture that recomputes every unit, one record a unit.

    Of the captured `micro_batches` that occur, `seconds` prices the last.
    """
    results = _Results(recomputed)
    return [
        UnitOps(
            forward_count=sum(len(call.forward) for call in runs[-1]),
            recompute_seconds=sum(seconds(recomputed.ops[index]) for call in runs[-1] for index in call.again),
            savable=_savable(recomputed, runs, results, seconds),
        )
        for runs in (of_unit[:micro_batches] for of_unit in unit_calls(recomputed, units))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """The ops of one call of a unit in one micro-batch of the last step, by index."""

    forward: tuple[int, ...]
    again: tuple[int, ...]
    """Ops of the recomputation, which stops early."""
    pairs: Mapping[str, tuple[int, int]] | None
    """By an op's name: its index in the forward and in the recomputation. None where the two do not match."""
    input_pairs: tuple[tuple[int, int], ...] = ()
    """Indices in forward and recomputation of the ops that make the unit's input, where they belong to it. None
    of their results can be saved."""


def unit_calls(recomputed: Trace, units: Sequence[str]) -> list[list[list[UnitCall]]]:
    """Forward and recomputation of each call, op by op, by unit and captured micro-batch.

    The capture recomputes every unit.
    """
    owner = unit_of_each_op(recomputed, units)
    forward: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    again: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    input_ops = _input_ops(recomputed, owner)
    before: tuple[int, bool, Phase] | None = None
    for index, (op, unit) in enumerate(zip(recomputed.ops, owner, strict=True)):
        now = unit, op.recomputed, op.phase
        if unit >= 0 and op.step == recomputed.captured_steps - 1:
            calls = again if op.recomputed else forward if op.phase is Phase.FORWARD else None
            if calls is not None:
                if now != before:
                    calls[unit, op.micro_batch].append([])
                calls[unit, op.micro_batch][-1].append(index)
        before = now
    return [
        [
            _calls(recomputed, forward[unit, micro_batch], again[unit, micro_batch], input_ops)
            for micro_batch in range(recomputed.captured_micro_batches)
        ]
        for unit in range(len(units))
    ]


def _input_ops(recomputed: Trace, owner: Sequence[int]) -> frozenset[int]:
    """Ops that make the input of the unit they belong to: they run outside of its module."""
    units = [unit.fqn for unit in recomputed.settings.units]
    if not any(map(has_input_ops, units)):
        return frozenset()
    inside = unit_of_each_op(recomputed, map(module_part, units))
    pairs = enumerate(zip(owner, inside, strict=True))
    return frozenset(index for index, (unit, module) in pairs if unit >= 0 and module < 0)


def _calls(
    trace: Trace, forward: list[list[int]], again: list[list[int]], input_ops: frozenset[int]
) -> list[UnitCall]:
    """Calls of a unit, of which the last is recomputed first; where nothing was saved, none is."""
    if again and len(again) != len(forward):
        forward, again = [[index for call in forward for index in call]], [[i for call in again for i in call]]
    recomputations = again[::-1] or [[] for _ in forward]
    return [_call(trace, ops, same, input_ops) for ops, same in zip(forward, recomputations, strict=True)]


def _call(trace: Trace, forward: Sequence[int], again: Sequence[int], input_ops: frozenset[int]) -> UnitCall:
    made, made_again = ([index for index in part if index in input_ops] for part in (forward, again))
    own, own_again = ([index for index in part if index not in input_ops] for part in (forward, again))
    pairs = _pairs(trace, *_without_copies(trace, own, own_again))
    # The last ops are those that make the input: an earlier op may serve something else.
    input_pairs = tuple(zip(made[max(len(made) - len(made_again), 0) :], made_again, strict=False))
    is_alike = len(input_pairs) == len(made_again) and all(
        trace.ops[first].name == trace.ops[second].name for first, second in input_pairs
    )
    return UnitCall(
        forward=tuple(forward), again=tuple(again), pairs=pairs if is_alike else None, input_pairs=input_pairs
    )


class _Results:
    """What ops return, and when it is dropped."""

    def __init__(self, trace: Trace) -> None:
        self.made: dict[int, list[int]] = defaultdict(list)
        """By op, the storages that it returns."""
        self._allocated: dict[int, int] = {}
        self._freed: dict[int, int] = {}
        self._trace = trace
        self._rounding_bytes = rounding_bytes_of(trace.device_kind)
        for position, event in enumerate(trace.events):
            if event.kind is EventKind.FREE:
                self._freed[event.storage] = position
            elif (maker := trace.storages[event.storage].op) is not None:
                self.made[maker].append(event.storage)
                self._allocated[event.storage] = position

    def extensions(self, forward_op: int, same_op_again: int) -> list[Extension]:
        """The effect of saving the results of an op."""
        pairs = zip(self.made[forward_op], self.made[same_op_again], strict=False)
        return [self._extension(first, second) for first, second in pairs]

    def _extension(self, first: int, second: int) -> Extension:
        """The effect of saving one result, given the storages that forward and recomputation make for it."""
        size_bytes = round_up(self._trace.storages[first].size_bytes, self._rounding_bytes)
        end, made_again = len(self._trace.events), self._allocated[second]
        dropped = self._freed.get(first, end)
        if dropped <= made_again:
            in_forward = self._trace.ops[self._trace.events[dropped].op].phase is Phase.FORWARD
            return Extension(
                first_event=dropped, stop_event=made_again, size_bytes=size_bytes, begins_in_forward=in_forward
            )
        stop_event = min(dropped, self._freed.get(second, end))
        return Extension(
            first_event=made_again, stop_event=stop_event, size_bytes=-size_bytes, begins_in_forward=False
        )


def _savable(
    trace: Trace, runs: Sequence[Sequence[UnitCall]], results: _Results, seconds: Callable[[Op], float]
) -> tuple[SavableOp, ...]:
    """The savable ops of one unit, given its calls by micro-batch; the most seconds per byte first."""
    by_run = [[call.pairs or {} for call in run] for run in runs]
    first = next(chain.from_iterable(by_run), {})
    if any(pairs.keys() != first.keys() for pairs in chain.from_iterable(by_run)):
        return ()
    found = []
    for name, (_in_forward, in_recomputation) in first.items():
        if not results.made[in_recomputation] or not _can_be_saved(trace.ops[in_recomputation]):
            continue
        last_run = [pairs[name][1] for pairs in by_run[-1]]
        written_over = list(_written_over(trace, last_run))
        if any(trace.ops[index].random for index in written_over):
            continue  # numbers drawn in place are drawn again: they cannot be skipped
        extensions = [
            [extension for pairs in run for extension in results.extensions(*pairs[name])] for run in by_run
        ]
        op = SavableOp(
            name=name,
            seconds=sum(seconds(trace.ops[index]) for index in (*last_run, *written_over)),
            extensions=tuple(chain.from_iterable(extensions)),
            size_bytes=sum(each.size_bytes for each in extensions[-1] if each.begins_in_forward),
        )
        found.append(op)
    return tuple(sorted(found, key=lambda op: (not op.is_choice, op.size_bytes / op.seconds)))


def _written_over(trace: Trace, makers: Sequence[int]) -> Iterator[int]:
    """The recomputed ops that write over what some of them made: saved, it is as they left it."""
    for maker in makers:
        index = maker + 1
        while index < len(trace.ops) and trace.ops[index].recomputed:
            if trace.ops[index].made_ops_ago == index - maker:
                yield index
            index += 1


def _without_copies(trace: Trace, forward: list[int], again: list[int]) -> tuple[list[int], list[int]]:
    """Ops of a forward and of its recomputation without copies of buffers that only one of them begins with.

    What recomputes a unit copies the buffers that its forward may change (`transforms.recompute`), before the
    first op of the unit itself. It copies more of them in the first forward; and in the forward of a run,
    copies belong to no unit.
    """
    copies, copies_again = (_leading_copies(trace, part) for part in (forward, again))
    return forward[max(copies - copies_again, 0) :], again[max(copies_again - copies, 0) :]


def _leading_copies(trace: Trace, ops: Sequence[int]) -> int:
    others = (place for place, index in enumerate(ops) if op_kind(trace.ops[index].name) != "clone")
    return next(others, len(ops))


def _pairs(trace: Trace, forward: Sequence[int], again: Sequence[int]) -> dict[str, tuple[int, int]] | None:
    comparable = (
        [index for index in part if op_kind(trace.ops[index].name) != CASTS] for part in (forward, again)
    )
    pairs = {}
    seen: Counter[str] = Counter()
    for in_forward, in_recomputation in zip(*comparable, strict=False):
        name = trace.ops[in_forward].name
        if trace.ops[in_recomputation].name != name:
            return None
        kind = op_kind(name)
        pairs[f"{kind}#{seen[kind]}"] = (in_forward, in_recomputation)
        seen[kind] += 1
    return pairs


def _can_be_saved(op: Op) -> bool:
    kind = op_kind(op.name)
    return kind not in _NEVER_SAVED and not kind.endswith("_")  # not one in place
