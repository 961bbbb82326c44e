"""The first evaluation of a run, which comes after the steps that are recorded.

Private torch APIs used here: `torch._C._autograd._get_sequence_nr`, `torch._C._current_autograd_node` (checked:
torch 2.13).
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from traceback import walk_stack
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from brimful.batches import tensors_in
from brimful.doctor.evidence import Gathered, UnusedGraph
from brimful.torch_utils.graphs import grad_fn_of, saved_bytes, storage_key, storages_of_model
from brimful.torch_utils.held_names import tensors_of_names
from brimful.torch_utils.lines import calling_line, is_users_own, shown_file

FORWARDS = 6
"""Forwards of an evaluation without gradients that are looked at. A choice."""
_LEAST_GROWN = 3
"""How often in them a name must hold more, as a batch may take more than one forward. A choice."""


class HeldResults:
    """What names hold on the device before each of the first forwards of an evaluation without gradients."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._held: list[dict[str, _Held]] = []

    def note(self, model: nn.Module) -> None:
        """Note what names hold before a forward of a model."""
        if not self.is_full:
            own = storages_of_model(model)
            self._held.append(dict(_held_by_names(sys._getframe(), own, self._device_type)))

    @property
    def has_any(self) -> bool:
        """Whether a forward was noted."""
        return bool(self._held)

    @property
    def is_full(self) -> bool:
        """Whether all forwards that are looked at were noted."""
        return len(self._held) == FORWARDS

    @property
    def gathered(self) -> tuple[Gathered, ...]:
        """Names that held results of more and more samples."""
        found = []
        for name, last in self._held[-1].items() if self._held else ():
            held = [each.get(name, _NOTHING) for each in self._held]
            if _is_growing(held):
                growth_bytes = (last.size_bytes - held[0].size_bytes) // (len(held) - 1)
                found.append(Gathered(name=name, line=last.line, growth_bytes=growth_bytes))
        return tuple(found)


@dataclass(slots=True)
class CallingLine:
    """A line of code that calls a model with gradients, in one of its modes."""

    line: str
    saved_bytes: int
    """Bytes that the graph of its first call saves."""
    trains: bool
    """Whether the model is in training mode."""
    is_used: bool = False
    """Whether backward has run through what a call of it returned."""
    alive: WeakSet[_Graph] = field(default_factory=WeakSet)
    """Graphs of its calls that are there, and that no backward has used."""
    most_alive: int = 1
    """How many of them there were at once."""
    left: deque[_Call] = field(default_factory=lambda: deque(maxlen=FORWARDS))
    """The last of its calls that no backward has followed until the next one of the model, or the run's end."""

    @property
    def found(self) -> UnusedGraph:
        """The line, with what all graphs save that there were at once."""
        return UnusedGraph(line=self.line, saved_bytes=self.saved_bytes * self.most_alive)

    def is_unused(self, backwards: int) -> bool:
        """Whether no backward runs through calls of it, of those that one of all `backwards` has followed.

        A loop may skip a step, as for a loss of NaN: of a line that trains, it takes two such calls with no
        backward between them.
        """
        calls = Counter(each.backwards for each in self.left if not each.is_used and each.backwards < backwards)
        return max(calls.values(), default=0) > self.is_used


class _Graph:
    """Stands for the graph of a call, whose last node holds it: it is there as long as that."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def note_backward(self, *_: Any) -> None:
        """Note that backward runs through it."""
        self._call.is_used = self._call.line.is_used = True
        self._call.line.alive.discard(self)


@dataclass(slots=True)
class _Call:
    """A call of a model with gradients."""

    line: CallingLine
    backwards: int
    """How often backward had run before it."""
    is_used: bool = False


class FirstEvaluation:
    """Waits for the first evaluation after the recorded steps, and notes what it saves if it builds graphs.

    In either mode, it calls a model, no backward runs until that model is called again, or until the run ends,
    and none ever runs through what the call returned, as hooks on the last nodes of its graph show. Without a
    graph, what names hold on the device before each of some forwards shows whether results are gathered.
    `sees` says whether what happens now is watched.
    """

    def __init__(self, sees: Callable[[], bool], device_type: str) -> None:
        self._depth, self._sees, self._held = 0, sees, HeldResults(device_type)
        self._first_node = self._backwards = 0
        """Number of the running call's first autograd node, and how often backward has run."""
        self._lines: dict[tuple[str, bool], CallingLine] = {}
        self._last_calls: dict[int, _Call] = {}
        """Calls that no backward has followed yet, by id of the model."""
        self._has_evaluated = False
        """Whether there were unused graphs when backward ran the last time."""
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def note_backward(self) -> None:
        """Note that backward runs."""
        is_unused = bool(self.unused)
        if self._held.has_any or (is_unused and self._has_evaluated):
            self._remove()
        self._backwards += 1
        self._last_calls.clear()
        self._has_evaluated = bool(self.unused)

    def end(self, *, is_whole: bool = True) -> None:
        """Note that the run has ended; if it is not whole, a backward might have followed its last calls."""
        if is_whole:
            for each in self._last_calls.values():
                each.line.left.append(each)
            self._backwards += 1
        self._remove()

    @property
    def unused(self) -> list[CallingLine]:
        """Lines whose graphs no backward has used."""
        return [each for each in self._lines.values() if each.is_unused(self._backwards)]

    @property
    def gathered(self) -> tuple[Gathered, ...]:
        """Names that held results of more and more samples."""
        return self._held.gathered

    def _note_held(self, model: nn.Module) -> None:
        if any(each.requires_grad for each in model.parameters()):
            try:
                self._held.note(model)
            except Exception:  # of tensors without a storage: the evaluation is not looked at
                self._remove()
            if self._held.is_full:
                self._remove()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: nn.Module, _args: Any) -> None:
        if not self._sees():
            return
        self._depth += 1
        if self._depth > 1:
            return
        self._first_node = torch._C._autograd._get_sequence_nr()
        if (before := self._last_calls.pop(id(model), None)) is not None:
            before.line.left.append(before)
        if not (model.training or torch.is_grad_enabled()):
            self._note_held(model)

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._sees() or self._depth == 0:
            return
        self._depth -= 1
        is_recomputed = torch._C._current_autograd_node() is not None
        if self._depth or is_recomputed or not torch.is_grad_enabled():
            return
        try:
            self._note_graph(model, args, [*tensors_in(output)])
        except Exception:  # of tensors without a storage: the evaluation is not looked at
            self._remove()

    def _note_graph(self, model: nn.Module, args: Any, outputs: list[Tensor]) -> None:
        """Follow whether backward runs through what a model returned."""
        at = calling_line(), model.training
        if at not in self._lines:
            parameters = list(model.parameters())
            has_graph = any(each.requires_grad for each in parameters)
            # A slice of a dataset in memory takes none of its own.
            slices = (each for each in tensors_in(args) if each.nbytes < each.untyped_storage().nbytes())
            beside = [*parameters, *slices]
            size_bytes = saved_bytes(outputs, beside, self._first_node) if has_graph else 0
            self._lines[at] = CallingLine(at[0], size_bytes, model.training)
        line = self._lines[at]
        if line.saved_bytes:
            call = self._last_calls[id(model)] = _Call(line, self._backwards)
            graph = _Graph(call)
            for node in {grad_fn_of(each) for each in outputs} - {None}:
                node.register_prehook(graph.note_backward)
                line.alive.add(graph)
            line.most_alive = max(line.most_alive, len(line.alive))


@dataclass(frozen=True, slots=True)
class _Held:
    """What a name holds on the device."""

    samples: int
    """First dimensions of its tensors together."""
    size_bytes: int
    line: str


_NOTHING = _Held(0, 0, "")


def _held_by_names(frame: FrameType, own: set[int], device_type: str) -> Iterator[tuple[str, _Held]]:
    """What names hold, those of libraries too: a `Trainer` gathers results in a variable of its own.

    Their line is that of the user's code that calls them.
    """
    calls = (each for each, _ in walk_stack(frame) if is_users_own(each.f_code.co_filename))
    call = next(calls, frame)
    for name, found, _, tensors in tensors_of_names(frame, own, is_meant=shown_file):
        line = found if re.search(r":\d+$", found) else f"{shown_file(call.f_code.co_filename)}:{call.f_lineno}"
        there = [each for each in tensors if each.device.type == device_type and each.dim()]
        sizes = {storage_key(each): each.nbytes for each in there}
        yield name, _Held(sum(each.shape[0] for each in there), sum(sizes.values()), line)


def _is_growing(held: list[_Held]) -> bool:
    """Whether a name holds more and more samples; a cache of a generation holds those of one batch."""
    steps = [
        (after.samples - before.samples, after.size_bytes - before.size_bytes)
        for before, after in pairwise(held)
    ]
    grown = sum(samples > 0 and size_bytes > 0 for samples, size_bytes in steps)
    return grown >= _LEAST_GROWN and all(samples >= 0 for samples, _ in steps)
