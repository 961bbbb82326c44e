"""Faults that happen when a test wants them to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import brimful

_OWN = (Path(brimful.__file__).parent, Path(__file__).parent.parent)

Site = tuple[str, ...]
"""An op, and the functions of brimful and of the tests that it was called through, the innermost last."""

_FRAMES_OF_SITE = 3


def out_of_memory(op: str) -> torch.OutOfMemoryError:
    """As the CUDA allocator raises it."""
    return torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate 1 GiB in {op}.")


class OutOfMemoryAt(TorchDispatchMode):
    """Raises out-of-memory in place of one op; counts the ops.

    Args:
        number: Of the op, from 0; None raises nothing.
        fails: Asked on every op instead, with its name and arguments.
        keeps_sites: Keep where each op was called.
        error: Makes another error of the op's name.
    """

    def __init__(
        self,
        number: int | None = None,
        fails: Callable[[str, Any], bool] | None = None,
        *,
        keeps_sites: bool = False,
        error: Callable[[str], BaseException] = out_of_memory,
    ) -> None:
        super().__init__()
        self._number = number
        self._fails = fails
        self._keeps_sites = keeps_sites
        self._error = error
        self.ops: list[str] = []
        self.sites: list[Site] = []
        self.raised = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.ops.append(name)
        if self._keeps_sites:
            self.sites.append((name, *functions_above()))
        is_due = len(self.ops) - 1 == self._number
        if is_due or (self._fails is not None and self._fails(name, args)):
            self.raised += 1
            raise self._error(name)
        return func(*args, **(kwargs or {}))


def functions_above() -> tuple[str, ...]:
    """The functions of brimful and of the tests that are running, with file and line, the innermost last."""
    found = [f"{file}:{line}:{function}" for file, line, function in _frames()]
    return tuple(found[:_FRAMES_OF_SITE][::-1])


def is_within(*functions: str) -> bool:
    """Whether a function of brimful or of the tests by one of these names is running."""
    return any(function in functions for _file, _line, function in _frames())


def _frames() -> Iterator[tuple[str, int, str]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        is_own = any(path.is_relative_to(own) for own in _OWN)  # not by name: a clone may be called brimful
        if is_own and path.name not in ("faults.py", "out_of_memory.py"):
            yield path.name, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
