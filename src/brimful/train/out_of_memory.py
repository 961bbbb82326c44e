"""Which errors say that memory ran out, and making room after one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

_WORDS = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
    "not enough memory",
)
"""What messages of a `RuntimeError` have in common where no memory could be had: "CUDA error: out of memory"
and "CUDA driver error: out of memory" of calls past the allocator, the libraries' own (torch 2.13:
aten/src/ATen/cuda/CUDABlas.cpp, Exceptions.cpp), and the CPU's allocator (c10/core/impl/alloc_cpu.cpp)."""


def out_of_memory(error: BaseException) -> str | None:
    """What an error says of memory that ran out.

    Args:
        error: Any; the errors that it was raised from, or while handling, are looked at too.

    Returns:
        The first line of the message; None if the error is about something else.
    """
    for each in _chain(error):
        is_by_type = isinstance(each, torch.OutOfMemoryError | MemoryError)
        if is_by_type or (isinstance(each, RuntimeError) and any(word in str(each) for word in _WORDS)):
            return (str(each) or type(each).__name__).splitlines()[0]
    return None


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RanOut:
    """That memory ran out, in place of what an action would have returned."""

    message: str
    """What the error said."""


def unless_out_of_memory(action: Callable[[], Result]) -> Result | RanOut:
    """Carry out an action, or tell that memory ran out in it.

    The error is gone when this returns, and with it the traceback, which holds every tensor of the functions
    that it went through.

    Args:
        action: Called once; other errors it raises are raised.

    Returns:
        What the action returned, or that memory ran out.
    """
    try:
        return action()
    except Exception as error:
        message = out_of_memory(error)
        if message is None:
            raise
    return RanOut(message)


def make_room(device: torch.device) -> None:
    """Give back what nothing uses: garbage in reference cycles, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
