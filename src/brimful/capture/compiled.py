"""Code for `torch.compile` is captured as it runs eagerly.

A compiled graph calls kernels with the addresses of its tensors, and fakes have none. So nothing is compiled
during capture, and what was compiled before is not used. Where such code is called is noted, as compiled it
takes other memory: fused kernels save and make less, and the backward of a graph returns all its gradients at
once, beside those that they are added to.

Private torch APIs used here: `torch._dynamo.eval_frame._callback_from_stance`, which every compiled function
asks, and `OptimizedModule.__call__`, which adds to a module's a warning of hooks on all modules (checked: torch
2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch import nn

from brimful.batches import own_part
from brimful.capture.recording.recorder import Recorder
from brimful.torch_utils.dispatch_mode import compiled_code_runs_eagerly
from brimful.torch_utils.lines import calling_line, defining_line
from brimful.torch_utils.replaced import replaced


class CompiledCode:
    """The code for `torch.compile` that a capture came upon."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}
        self._modules: dict[int, nn.Module | None] = {}
        self._block: int | None = None

    @contextmanager
    def runs_eagerly(self) -> Iterator[None]:
        """Let the eager original of compiled code run while the context is open; note where it is called."""
        # A fake tensor's mode imports it anyway; without a capture brimful does not.
        from torch._dynamo import eval_frame

        follow_stance: Any = getattr(eval_frame, "_callback_from_stance", None)

        def noted(callback: Any) -> Any:
            if callback is not None and callback is not False:  # those are of what is never compiled
                self._note(sys._getframe(2))  # past `replaced`
            return follow_stance(callback)

        with ExitStack() as stack:
            if follow_stance is not None:
                stack.enter_context(replaced(eval_frame, "_callback_from_stance", noted))
            stack.enter_context(replaced(eval_frame.OptimizedModule, "__call__", nn.Module.__call__))
            stack.enter_context(compiled_code_runs_eagerly())
            yield

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines where compiled code was called, as "file.py:12"."""
        return tuple(self._lines)

    def begin_backward(self, model: nn.Module, recorder: Recorder, *, are_kept_apart: bool) -> None:
        """Record that all gradients of a graph may be there at once, beside those that they are added to.

        `are_kept_apart` says that eager training never has all gradients, because it updates in backward.
        """
        adds = any(parameter.grad is not None for parameter in model.parameters())
        if self._modules and (adds or are_kept_apart):
            most = max(_gradient_bytes(module or model) for module in self._modules.values())
            label = "gradients of compiled code, all at once"
            self._block = recorder.ledger.allocate(0, label, most_bytes=most)

    def end_backward(self, recorder: Recorder) -> None:
        """Record that the gradients of a graph are added up."""
        if self._block is not None:
            recorder.ledger.free(self._block)
            self._block = None

    def _note(self, frame: FrameType) -> None:
        """Note the call of a compiled function, and the module whose method it is, or else the whole model."""
        function = frame.f_locals.get("fn")
        self._lines.setdefault(calling_line() or defining_line(function) or "a compiled model")
        owner = getattr(function, "__self__", None)
        module = owner if isinstance(owner, nn.Module) else None
        self._modules.setdefault(id(module), module)


def _gradient_bytes(module: nn.Module) -> int:
    return sum(own_part(p).nbytes for p in module.parameters() if p.requires_grad)
