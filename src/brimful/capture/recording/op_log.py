"""The ops of a step in the order in which they run: whose they are, in which phase, and where they are called.

Private torch APIs used here: `torch._C._current_autograd_node`, `torch._C._autograd._get_sequence_nr` (checked:
torch 2.13, 2.11).
"""

from __future__ import annotations

import torch

from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.op_info import OpInfo
from brimful.capture.recording.position import StepPosition
from brimful.capture.recording.work import OpWork
from brimful.torch_utils.lines import calling_line
from brimful.trace import Op, Phase
from brimful.trace.modules import OPTIMIZER
from brimful.utils.quantities import MIB

LOCATED_BYTES = MIB
"""Ops that write less are not looked for in the code: walking the stack takes longer than recording them."""


class OpLog:
    """Records ops, each with the module and the phase that it belongs to.

    Ops that write at least `located_bytes` have the line of code that calls them.
    """

    def __init__(
        self, modules: ModuleCalls, position: StepPosition, *, located_bytes: int = LOCATED_BYTES
    ) -> None:
        self.ops: list[Op] = []
        self._located_bytes = located_bytes
        self._modules, self._position = modules, position
        self._lines: dict[int, str] = {}
        """Lines where forward ops were called, by the numbers of their autograd nodes."""

    def add(self, info: OpInfo, work: OpWork, made_ops_ago: int) -> int:
        """Record an op, and return its index."""
        at = self._position
        self.ops.append(
            Op(
                name=info.name,
                module=OPTIMIZER if at.is_in_optimizer else self._modules.owner(),
                phase=at.phase,
                step=at.step,
                micro_batch=at.micro_batch,
                flops=work.flops,
                read_bytes=work.read_bytes,
                written_bytes=work.written_bytes,
                dtype=work.dtype,
                recomputed=at.phase is Phase.BACKWARD and _is_recomputing(),
                random=info.is_random,
                weight_bytes=work.weight_bytes,
                made_ops_ago=made_ops_ago,
                on_host=at.is_on_host,
                compiled=at.is_compiled,
                extents=work.extents,
                line=self._line() if work.written_bytes >= self._located_bytes else "",
            )
        )
        return len(self.ops) - 1

    def _line(self) -> str:
        """The line of Python where the op is called; in backward, where its forward op was."""
        node = torch._C._current_autograd_node()
        if node is not None and not torch.is_grad_enabled():
            return self._lines.get(node._sequence_nr(), "")
        line = calling_line()
        if torch.is_grad_enabled():
            # Autograd makes an op's node, and so counts on, before the op comes here.
            self._lines[torch._C._autograd._get_sequence_nr() - 1] = line
        return line


def _is_recomputing() -> bool:
    """Whether a backward node runs a piece of forward: backward itself runs without gradients."""
    return torch.is_grad_enabled() and torch._C._current_autograd_node() is not None
