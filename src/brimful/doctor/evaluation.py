"""The first evaluation of a run, which comes after the steps that are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from brimful.capture.recording.lines import calling_line
from brimful.doctor.evidence import Evaluation


class FirstEvaluation:
    """Waits for the first forward in evaluation mode, and notes what it saves if it builds a graph."""

    def __init__(self) -> None:
        self.found: tuple[Evaluation, ...] = ()
        self._depth = 0
        self._saved: dict[int, int] = {}
        self._counting: saved_tensors_hooks | None = None
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: nn.Module, _args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not model.training and any(p.requires_grad for p in model.parameters()):
            if torch.is_grad_enabled():
                parameters = {p.untyped_storage()._cdata for p in model.parameters()}
                self._counting = saved_tensors_hooks(lambda saved: self._count(saved, parameters), _same)
                self._counting.__enter__()
            else:
                self.remove()

    def _after(self, _model: nn.Module, _args: Any, _output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and self._counting is not None:
            self._counting.__exit__()
            self._counting = None
            self.found = (Evaluation(line=calling_line(), saved_bytes=sum(self._saved.values())),)
            self.remove()

    def _count(self, saved: Tensor, parameters: set[int]) -> Tensor:
        storage = saved.untyped_storage()
        if storage._cdata not in parameters:
            self._saved[storage._cdata] = storage.nbytes()
        return saved


def _same(saved: Tensor) -> Tensor:
    return saved
