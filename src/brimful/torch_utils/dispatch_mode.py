"""Dispatch modes under which compiled code runs eagerly, and is compiled again afterwards; what ops write to.

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
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_WRITE_UNSAID: dict[Any, tuple[int, ...]] = {aten.native_batch_norm.default: (3, 4)}
"""Positions of arguments that an op writes to, its running statistics, though its schema does not say so."""
_TRAINS = 5
"""Position of `training` in `native_batch_norm`: in evaluation mode it writes nothing."""


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


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    positions, names = _writes(func)
    if func in _WRITE_UNSAID and not args[_TRAINS]:
        return
    for written in (*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names)):
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, Tensor):
                yield tensor


def has_writes(func: Any) -> bool:
    """Whether an op writes to any of its arguments."""
    return any(_writes(func))


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an op writes to."""
    if func in _WRITE_UNSAID:
        return _WRITE_UNSAID[func], ()
    written = [
        (position, argument)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(position for position, _ in written), tuple(argument.name for _, argument in written)
