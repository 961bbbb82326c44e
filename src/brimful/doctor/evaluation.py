"""The first evaluation of a run, which comes after the steps that are recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from brimful.batches import tensors_in
from brimful.doctor.evidence import UnusedGraph
from brimful.torch_utils.graphs import saved_bytes
from brimful.torch_utils.lines import calling_line


class FirstEvaluation:
    """Waits for the first forward in evaluation mode, and notes what it saves if it builds a graph.

    It is one that no backward uses if none runs until the model is called again, or until the run ends. `sees`
    says whether what happens now is watched.
    """

    def __init__(self, sees: Callable[[], bool]) -> None:
        self.found: tuple[UnusedGraph, ...] = ()
        self._depth, self._sees = 0, sees
        self._expected: tuple[UnusedGraph, weakref.ref[nn.Module]] | None = None
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def note_backward(self) -> None:
        """Note that backward runs."""
        if self._expected is not None:
            self._expected = None
            self._remove()

    def end(self) -> None:
        """Note that the run has ended."""
        if self._expected is not None:
            self.found = (self._expected[0],)
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
            self._remove()
            return
        try:
            size_bytes = saved_bytes(tensors_in(output), parameters)
        except Exception:  # of tensors without a storage: the evaluation is not looked at
            self._remove()
            return
        self._expected = UnusedGraph(line=calling_line(), saved_bytes=size_bytes), weakref.ref(model)
