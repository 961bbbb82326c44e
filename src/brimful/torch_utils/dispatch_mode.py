"""Dispatch modes under which compiled code runs eagerly, and is compiled again afterwards.

In plain torch one call of compiled code under a dispatch mode turns the compiler off for the whole process,
without a warning: everything that was compiled runs eagerly until `torch._dynamo.reset()` (seen in torch 2.13).
Under the stance "force_eager" the compiler is not called at all.

Private torch API used here: `torch._dynamo`, which `torch.compile` imports (checked: torch 2.13).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Eager:
    """The stance "force_eager", which is of the whole process: from the first that asks for it to the last."""

    def __init__(self) -> None:
        self._lock, self._count, self._stance = threading.Lock(), 0, ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let compiled code run eagerly while the context is open, in all threads."""
        with self._lock:
            if self._count == 0:
                self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._stance.close()


compiled_code_runs_eagerly = _Eager()


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode that sees the ops of compiled code as well, because the code runs eagerly."""

    def __enter__(self) -> Self:
        """Put the mode in force."""
        self._stack = ExitStack()
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
            self._stack.enter_context(compiled_code_runs_eagerly())
        try:
            super().__enter__()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the mode."""
        try:
            super().__exit__(kind, error, traceback)
        finally:
            self._stack.close()
