"""Faults that happen when a test wants them to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OutOfMemoryAt(TorchDispatchMode):
    """Raises out-of-memory in place of one op; counts the ops.

    Args:
        number: Of the op, from 0; None raises nothing.
        fails: Asked on every op instead, with its name and arguments.
    """

    def __init__(self, number: int | None = None, fails: Callable[[str, Any], bool] | None = None) -> None:
        super().__init__()
        self._number = number
        self._fails = fails
        self.ops: list[str] = []
        self.raised = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.ops.append(name)
        is_due = len(self.ops) - 1 == self._number
        if is_due or (self._fails is not None and self._fails(name, args)):
            self.raised += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1 GiB in {name}.")
        return func(*args, **(kwargs or {}))
