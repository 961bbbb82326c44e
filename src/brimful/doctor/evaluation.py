"""The first evaluation of a run, which comes after the steps that are recorded."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from brimful.batches import tensors_in
from brimful.doctor.evidence import Gathered, UnusedGraph
from brimful.torch_utils.graphs import saved_bytes, storage_key, storages_of_model
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


class FirstEvaluation:
    """Waits for the first forward in evaluation mode, and notes what it saves if it builds a graph.

    It is one that no backward uses if none runs until the model is called again, or until the run ends. Without
    a graph, what names hold on the device before each of some forwards shows whether results are gathered.
    `sees` says whether what happens now is watched.
    """

    def __init__(self, sees: Callable[[], bool], device_type: str) -> None:
        self.found: tuple[UnusedGraph, ...] = ()
        self._depth, self._sees, self._held = 0, sees, HeldResults(device_type)
        self._expected: tuple[UnusedGraph, weakref.ref[nn.Module]] | None = None
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def note_backward(self) -> None:
        """Note that backward runs."""
        if self._expected is not None or self._held.has_any:
            self._expected = None
            self._remove()

    def end(self) -> None:
        """Note that the run has ended."""
        if self._expected is not None:
            self.found = (self._expected[0],)
        self._remove()

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
        if self._depth == 1 and self._expected is not None and self._expected[1]() is model:
            self.end()
        elif self._depth == 1 and not (model.training or torch.is_grad_enabled()):
            self._note_held(model)

    def _after(self, model: nn.Module, _args: Any, output: Any) -> None:
        if not self._sees() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth or self._expected is not None or model.training:
            return
        parameters = list(model.parameters())
        if not any(each.requires_grad for each in parameters):
            return
        if not torch.is_grad_enabled():
            return
        try:
            size_bytes = saved_bytes(tensors_in(output), parameters)
        except Exception:  # of tensors without a storage: the evaluation is not looked at
            self._remove()
            return
        self._expected = UnusedGraph(line=calling_line(), saved_bytes=size_bytes), weakref.ref(model)


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
