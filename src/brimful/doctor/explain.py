"""An out-of-memory error, explained where it passes through.

Private torch APIs used here: `torch.cuda.memory._record_memory_history`, `_dump_snapshot`,
`torch._C._cuda_isHistoryEnabled`, `torch._C._autograd._get_sequence_nr` (checked: torch 2.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from brimful.errors import CallError
from brimful.execution.out_of_memory import explain
from brimful.torch_utils.forward_lines import record_again, recorded_lines

Function = TypeVar("Function", bound=Callable[..., Any])
_MOST_EVENTS = 100_000
"""Allocations that a snapshot keeps. A choice: some steps of a model."""


class explain_out_of_memory(ContextDecorator):  # noqa: N801  # it is used as a function, as torch.no_grad is
    """Explain an out-of-memory error of any code, as a context or a decorator::

        with bf.explain_out_of_memory():
            train(model, loader)

    The error is raised as it is, with notes, which its traceback shows: what was asked for and by which line,
    what held the memory by category, module and line of code, what else is on the card, and what to change,
    with what each change frees. Live tensors are found when memory has run out; of what runs before, only the
    line of each op with a gradient is noted, which takes 4 µs per op. Results are the same. `brimful run`
    records memory too, and sees also what no Python object holds.

    Args:
        snapshot: A file to write when memory has run out on CUDA: https://pytorch.org/memory_viz opens it.
            Torch then records each allocation with its lines, which takes some microseconds.
    """

    def __new__(cls, function: Callable[..., Any] | None = None, /, **_arguments: Any) -> Any:
        """The context; with a function the function in it, as of a decorator without parentheses."""
        return super().__new__(cls) if function is None else cls()(function)

    def __init__(self, *, snapshot: Path | str | None = None) -> None:
        self._snapshot = None if snapshot is None else Path(snapshot)
        self._ends = ExitStack()
        self._step_began = 0
        """Number of the first autograd node of the running step."""
        self._handled: BaseException | None = None
        """The error that was being handled before."""

    def __call__(self, function: Function) -> Function:
        """The function in the context; CallError for one whose call returns before its body runs."""
        returns_early = (isgeneratorfunction, isasyncgenfunction, iscoroutinefunction)
        if any(each(function) for each in returns_early):
            raise CallError(
                f"explain_out_of_memory cannot decorate {function.__qualname__}: a call of a generator or an "
                "async function returns before its body runs. Write `with bf.explain_out_of_memory():` around "
                "the loop over it, or around what awaits it."
            )
        return super().__call__(function)

    def _recreate_cm(self) -> Self:
        return type(self)(snapshot=self._snapshot)

    def __enter__(self) -> Self:
        self._step_began, self._handled = 0, sys.exc_info()[1]
        with ExitStack() as ends:
            ends.enter_context(recorded_lines())
            ends.callback(register_optimizer_step_post_hook(self._after_step).remove)
            has_history = not torch.cuda.is_available() or torch._C._cuda_isHistoryEnabled()
            if self._snapshot is not None and not has_history:
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_EVENTS)
                ends.callback(torch.cuda.memory._record_memory_history, enabled=None)
            self._ends = ends.pop_all()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        with self._ends:
            if error is not None:
                noted = explain(error, handled=self._handled, first_node=self._step_began)
                if noted is not None and self._snapshot is not None:
                    noted.add_note(_written_snapshot(self._snapshot))

    def _after_step(self, _optimizer: Optimizer, _args: object, _named: object) -> None:
        self._step_began = torch._C._autograd._get_sequence_nr()
        record_again()


def _written_snapshot(path: Path) -> str:
    """Write torch's record of the memory; returns where it is, or why there is none."""
    if not torch.cuda.is_available():
        return f"  snapshot: {path} was not written, as torch records none of a CPU's memory"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except Exception as error:  # it must not replace the error that is explained
        return f"  snapshot: {path} could not be written: {type(error).__name__}: {error}"
    return f"  snapshot: {path}, which https://pytorch.org/memory_viz opens"
