"""Blocks that a model repeats, such as the layers of a transformer: captured once, not once for each of many.

The first capture is whole. Where blocks that follow one another ran the same ops in it, later captures run only
the first and the last ones of each row that is treated alike; `trace.repeated` puts the others in. The
optimizer updates the parameters of all blocks: those that did not run get a gradient like that of a block that
did.

That a short capture shows the whole one is checked twice: neighbours in it must do the same, and a short
capture under the settings of the first one must give that trace exactly. Whatever fails is captured whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from brimful.capture.fakes.wrapper import Wrapper
from brimful.capture.recording.recorder import Recorder
from brimful.errors import BrimfulError
from brimful.settings import Action, Settings, Span, has_input_ops
from brimful.torch_utils.module_names import plain_modules, plain_namer, unwrapped
from brimful.trace import Phase, Trace
from brimful.trace.block_regions import ShortRow
from brimful.trace.repeated import Counts, with_all_blocks

_MARGIN, _MARGIN_WITH_COPIES = 2, 3
"""Blocks that run at either end of a row: one that is like no other, for what comes before the row or after it
is not alike, and one that is like those in between. What is offloaded leaves and comes back while the block
after it runs. So where blocks are offloaded, and at the beginning of a row behind such blocks, the second one
is not like the others either."""

_LEAST_ROW = 5
"""Fewest blocks of a row of which any can be omitted."""

_LEAST_OMITTED_WITH_COPIES = 3
"""Fewest blocks to omit of a group that is offloaded alike. Neighbours among a few may differ, and then the
capture is in vain: with 7 of 32 blocks of an 8B Llama offloaded, blocks 2 and 4 do. A choice."""

_LEAST_OMITTED_SHARE = 0.25
"""Smallest fraction of all repeated blocks to omit. Omitting fewer saves less time than putting them in takes.
A choice."""


@dataclass(slots=True)
class Shortening:
    """What a short capture omits, and what it notes for the whole one."""

    blocks: tuple[str, ...]
    """Blocks that run, in order."""
    omitted: Mapping[int, tuple[str, ...]]
    """Blocks that do not run, as in `trace.block_regions.ShortRow`."""
    reach: int
    placeholders: set[str] = field(default_factory=set)
    counts: Counts = field(default_factory=dict)
    _modules: dict[str, nn.Module] = field(default_factory=dict)
    _whole: list[tuple[nn.Module, dict[str, nn.Module | None]]] = field(default_factory=list)

    def reduced(self, settings: Settings) -> Settings:
        """The settings without the actions of omitted blocks."""
        names = {fqn for row in self.omitted.values() for fqn in row}
        units = tuple(unit for unit in settings.units if _block_of(unit.fqn, names) is None)
        return replace(settings, units=units)

    def begin(self, model: nn.Module) -> None:
        """Take the omitted blocks out of the lists that hold them."""
        self._modules = plain_modules(model)
        names: dict[str, set[str]] = {}
        for row in self.omitted.values():
            for fqn in row:
                parent, _, name = fqn.rpartition(".")
                names.setdefault(parent, set()).add(name)
        for parent, omitted in names.items():
            container = unwrapped(self._modules[parent])
            children = container._modules
            self._whole.append((container, children))
            container.__dict__["_modules"] = {
                name: child for name, child in children.items() if name not in omitted
            }

    def end(self, model: nn.Module, recorder: Recorder) -> None:
        """Put the omitted blocks back, and give their parameters gradients for the optimizer."""
        while self._whole:
            container, children = self._whole.pop()
            container.__dict__["_modules"] = children
        plain_name = plain_namer(model)
        names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
        wrapper = Wrapper()
        with recorder.paused(), torch.no_grad(), torch._C.DisableTorchFunction():
            for block, row in self.omitted.items():
                like = dict(_gradients_of(self._modules[self.blocks[block]]))
                for fqn in row:
                    for name, parameter in self._modules[fqn].named_parameters():
                        if name in like and parameter.grad is None:
                            parameter.grad = wrapper.empty(*like[name])
                            self.placeholders.add(names[id(parameter)])

    def whole(self, trace: Trace, settings: Settings) -> Trace | None:
        """The trace with all blocks; None where the short one does not show that."""
        row = ShortRow(
            blocks=self.blocks,
            omitted=self.omitted,
            reach=self.reach,
            placeholders=frozenset(self.placeholders),
        )
        return with_all_blocks(trace, row, settings, self.counts)


_Gradient = tuple[FakeTensorMode, torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _gradients_of(block: nn.Module) -> Iterator[tuple[str, _Gradient]]:
    """For each parameter with a gradient: its name, and what it takes to make another gradient like it."""
    for name, parameter in block.named_parameters():
        made = parameter.grad
        if made is not None:
            assert type(made) is FakeTensor
            yield name, (made.fake_mode, made.shape, made.stride(), made.dtype, made.fake_device)


ShortCapture = Callable[[Settings, Shortening], Trace | None]
"""Captures one step under whole settings; None where the short capture does not show the whole one."""


class RepeatedBlocks:
    """Captures steps of a model short, where its blocks repeat.

    The first of `captures` whose short step gives the whole one is used; where it returns None, the ones after
    it are.
    """

    def __init__(self, captures: Sequence[ShortCapture]) -> None:
        self._captures = tuple(captures)
        self._first: tuple[Settings, Trace] | None = None
        self._rows: tuple[tuple[str, ...], ...] | None = None
        """Blocks that ran alike in the first capture; None before they are looked for."""

    def learn_from(self, other: RepeatedBlocks, prefix: str = "") -> None:
        """Take the rows that captures of the job on another device found, and the short captures that hold.

        `other` has the same short captures, on its device. Until it has looked for rows, nothing is taken.
        `prefix` is what paths of modules begin with here, and not there.
        """
        if other._rows is not None:
            failed = len(self._captures) - len(other._captures)
            self._rows = tuple(tuple(f"{prefix}{fqn}" for fqn in row) for row in other._rows)
            self._captures = self._captures[failed:]

    def learn(self, settings: Settings, trace: Trace) -> None:
        """Take a whole capture to look for repeated blocks in, if it is the first that may show them."""
        if self._first is None and _may_be_short(settings) and _shows_all(trace):
            self._first = settings, trace

    def captured(self, settings: Settings) -> Trace | None:
        """A step captured short; None where it must be captured whole."""
        if not _may_be_short(settings):
            return None
        if self._rows is None:
            if self._first is None:
                return None
            first, whole = self._first
            self._rows = tuple(rows_of_alike_blocks(whole))
            while self._captures and self._rows and self._captured(first) != whole:
                self._captures = self._captures[1:]
        return self._captured(settings)

    def _captured(self, settings: Settings) -> Trace | None:
        for capture in self._captures:
            shortening = self._shortening(settings) if self._rows else None
            if shortening is None:
                return None
            try:
                trace = capture(settings, shortening)
            except BrimfulError:  # the model may count its blocks
                return None
            if trace is not None:
                return trace if _shows_all(trace) else None
        return None

    def _shortening(self, settings: Settings) -> Shortening | None:
        """The blocks to omit under some settings; None if that saves little."""
        assert self._rows is not None
        actions = _actions_by_block(settings, [fqn for row in self._rows for fqn in row])
        if actions is None:
            return None
        blocks: list[str] = []
        omitted: dict[int, tuple[str, ...]] = {}
        for row in self._rows:
            follows_copies = bool(settings.offloaded)  # perhaps those of a unit before the row
            for what, group in groupby(row, key=lambda fqn: actions.get(fqn, ())):
                alike, copies = tuple(group), _copies(what)
                first = _MARGIN_WITH_COPIES if copies or follows_copies else _MARGIN
                last = _MARGIN_WITH_COPIES if copies else _MARGIN
                least = _LEAST_OMITTED_WITH_COPIES if copies else 1
                if len(alike) >= first + last + least:
                    omitted[len(blocks) + first - 1] = alike[first:-last]
                    blocks += (*alike[:first], *alike[-last:])
                else:
                    blocks += alike
                follows_copies = copies
        count = sum(map(len, omitted.values()))
        if count < _LEAST_OMITTED_SHARE * (len(blocks) + count):
            return None
        reach = (_MARGIN_WITH_COPIES if settings.offloaded else _MARGIN) - 1
        return Shortening(tuple(blocks), omitted, reach)


def rows_of_alike_blocks(trace: Trace) -> Iterator[tuple[str, ...]]:
    """Rows of children of one list that follow one another and run the same ops, if worth shortening.

    `trace` is a whole capture of one step. A row has the paths of its blocks, in the order of their forwards.
    """
    numbered = [fqn for fqn, _ in trace.module_classes if fqn.rpartition(".")[2].isdecimal()]
    outermost = [
        fqn for fqn in numbered if not any(fqn.startswith(f"{other}.") for other in numbered if other != fqn)
    ]
    did: dict[str, list[tuple[object, ...]]] = {fqn: [] for fqn in outermost}
    for op in trace.ops:
        if op.phase is Phase.FORWARD and op.micro_batch == 0:
            block = _block_of(op.module, did.keys())
            if block is not None:
                rest = op.module[len(block) :]
                did[block].append((op.name, rest, op.flops, op.read_bytes, op.written_bytes, op.extents))
    row: list[str] = []
    for before, fqn in pairwise(("", *outermost)):
        if row and not (_follows(before, fqn) and did[fqn] == did[before]):
            if len(row) >= _LEAST_ROW:
                yield tuple(row)
            row = []
        row.append(fqn)
    if len(row) >= _LEAST_ROW:
        yield tuple(row)


def _follows(before: str, fqn: str) -> bool:
    (parent, _, number), (other, _, following) = before.rpartition("."), fqn.rpartition(".")
    return parent == other and int(following) == int(number) + 1


def _block_of(name: str, blocks: object) -> str | None:
    """The block that a dotted name is inside of; None if it is in none."""
    end = len(name)
    while end > 0:
        if name[:end] in blocks:  # type: ignore[operator]
            return name[:end]
        end = name.rfind(".", 0, end)
    return None


def _actions_by_block(
    settings: Settings, blocks: Sequence[str]
) -> dict[str, tuple[tuple[object, ...], ...]] | None:
    """The actions on each block, by fqn relative to it; None if a unit has several blocks in it."""
    known = set(blocks)
    parents = {fqn[:end] for fqn in blocks for end, letter in enumerate(fqn) if letter == "."} | {""}
    actions: dict[str, tuple[tuple[object, ...], ...]] = {}
    for unit in settings.units:
        span = Span.parse(unit.fqn)
        block = _block_of(unit.fqn if span is None else span.parent, known)
        if block is not None:
            what = (unit.fqn[len(block) :], unit.action, unit.saved, unit.most_offloaded_bytes)
            actions[block] = (*actions.get(block, ()), what)
        elif (unit.fqn if span is None else span.parent) in parents:
            return None
    return actions


def _copies(what: tuple[tuple[object, ...], ...]) -> bool:
    """Whether some of what is done to a block is offloading."""
    return any(action is Action.OFFLOAD for _, action, *_ in what)


def _may_be_short(settings: Settings) -> bool:
    """Whether nothing is asked that acts across blocks, or before backward ends."""
    return (
        settings.world_size == 1
        and not settings.optimizer_in_backward
        and not any(unit.action is Action.NEST or has_input_ops(unit.fqn) for unit in settings.units)
    )


def _shows_all(trace: Trace) -> bool:
    """Whether a capture of some blocks shows what all of them do."""
    return depends_on_ops_alone(trace) and not trace.batch_coupled_modules


def depends_on_ops_alone(trace: Trace) -> bool:
    """Whether nothing is in a capture of one step that depends on more than its ops, such as values."""
    return not (
        trace.is_own_loop
        or trace.couples_samples
        or trace.sizes_are_guessed
        or trace.sizes_depend_on_values
        or trace.compiled_lines
        or trace.captured_steps > 1
    )
