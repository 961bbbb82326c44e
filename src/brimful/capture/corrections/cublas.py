"""cuBLAS takes a workspace from torch's allocator at the first matmul of each thread, and keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from brimful.capture.corrections.base import Rule

aten = torch.ops.aten

_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})

WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""8.125 MiB: ":4096:2:16:8". Source: torch CublasHandlePool.cpp, parseChosenWorkspaceSize; 8,519,680 B stand
in public memory snapshots of Ampere cards (pytorch issue 95668)."""

HOPPER_WORKSPACE_BYTES = 32 * 1024 * 1024
"""Compute capability 9.0 and later. Source: as above, pytorch pull request 89027; on Blackwell the default went
back and forth (pull requests 175344, 182669)."""


@dataclass
class CublasWorkspace(Rule):
    """Add one workspace for the forward's thread and one for autograd's."""

    name = "cublas_workspace"
    source = "torch aten/src/ATen/cuda/CublasHandlePool.cpp (checked: 2.9; public snapshots)"
    lasts = True
    watches_ops = True

    threads_seen: set[bool] = field(default_factory=set)
    """Whether the forward's (False) and autograd's (True) thread has its workspace."""

    def before_op(self, recorder: Any, func: Any, args: tuple[Any, ...], *, in_backward: bool) -> None:
        """Allocate the thread's workspace before its first matmul."""
        if func in _MATMULS and in_backward not in self.threads_seen:
            self.threads_seen.add(in_backward)
            major = (self.target.compute_capability or (0, 0))[0]
            size_bytes = HOPPER_WORKSPACE_BYTES if major >= 9 else WORKSPACE_BYTES
            recorder.allocate_block(size_bytes, "cuBLAS workspace")
            self.count(size_bytes)
