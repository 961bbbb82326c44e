"""cuBLAS takes a workspace from torch's allocator at the first matmul of each thread, and keeps it."""

from __future__ import annotations

from typing import Any

import torch

from brimful.capture.corrections.rule import Rule
from brimful.devices import Device
from brimful.settings import Settings
from brimful.trace import CUBLAS_WORKSPACE

aten = torch.ops.aten

_MATMULS = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten.bmm,
        aten.baddbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
    }
)


class CublasWorkspace(Rule):
    """Add one workspace for the forward's thread and one for autograd's; `Device` knows its size.

    cuBLASLt works in the same block since January 2026 (pytorch pull requests 168175, 173002); before, it took
    1 MiB of its own.
    """

    name = "cublas_workspace"
    source = "torch aten/src/ATen/cuda/CublasHandlePool.cpp (checked: 2.9, early 2026; public snapshots)"
    lasts = True

    def __init__(self, target: Device, settings: Settings) -> None:
        super().__init__(target, settings)
        self._threads: set[bool] = set()
        """Threads that have their workspace: the forward's (False) and autograd's (True)."""

    def watches_op(self, func: Any) -> bool:
        """Whether an op is a matmul."""
        return func.overloadpacket in _MATMULS

    def before_op(self, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Allocate the thread's workspace before its first matmul."""
        if in_backward not in self._threads:
            self._threads.add(in_backward)
            size_bytes = self.target.cublas_workspace_bytes
            self.recorder.ledger.allocate(size_bytes, CUBLAS_WORKSPACE)
            self.count(size_bytes)
