"""Which errors say that memory ran out, making room after one, and trying again.

A training step recovers by itself (`trainer/step/recovery.py`). Everything else that a run may do twice
(copies for a save, checks of the weights, their average, the state of random generators) uses `with_room`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from brimful.errors import BrimfulError, OutOfMemoryError

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
        The first line of the message; None if the error is about something else, or brimful's own, which says
        already what became of it.
    """
    if isinstance(error, BrimfulError):
        return None
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
    place: str = ""
    """Where it came from, outside of torch: a file, a line and a function."""


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
        place = _place(error.__traceback__)
    return RanOut(message, place)


class StepOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """Memory ran out in a step, and nothing that takes less is left to try; also a `torch.OutOfMemoryError`."""


class Recover(Protocol):
    """What happens between two attempts."""

    def __call__(self, ran_out: RanOut, /, *, is_retry: bool) -> None:
        """Take less if the attempt was a retry already, or raise what ends the attempts."""


def with_retries(
    attempt: Callable[[], Result],
    recover: Recover,
    device: torch.device,
) -> Result:
    """What an attempt returns, repeated for as long as memory runs out in it.

    Args:
        attempt: Runs a step, or leaves everything as before.
        recover: Called after each attempt in which memory ran out, once what is cached has been released.
        device: Where memory runs out.

    Returns:
        What the last attempt returned.
    """
    is_retry = False
    while True:
        found = unless_out_of_memory(attempt)
        if not isinstance(found, RanOut):
            return found
        make_room(device)
        recover(found, is_retry=is_retry)
        is_retry = True


def with_room(action: Callable[[], Result], *, during: str) -> Result:
    """What an action returns, called once more after making room where memory runs out in it.

    Args:
        action: May be called twice: until it returns it changes nothing, or nothing that a second call minds.
            It must not wait for other ranks, which call it once.
        during: What is done, for the error: "memory ran out while …".

    Returns:
        What the action returned.

    Raises:
        OutOfMemoryError: Memory ran out in both calls.
    """
    found = unless_out_of_memory(action)
    if isinstance(found, RanOut):
        make_room(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        found = unless_out_of_memory(action)
    if isinstance(found, RanOut):
        raise OutOfMemoryError(f"memory ran out while {during}, twice in a row: {found.message}.")
    return found


def despite_out_of_memory(action: Callable[[], object], device: torch.device) -> None:
    """Call an action, and once more if memory runs out in it.

    Args:
        action: May be called twice.
        device: Where room is made in between.
    """
    if isinstance(unless_out_of_memory(action), RanOut):
        make_room(device)
        action()


def make_room(device: torch.device) -> None:
    """Give back what nothing uses: garbage in reference cycles, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _place(traceback: TracebackType | None) -> str:
    """The innermost line of a traceback that is not torch's."""
    place = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        path = Path(code.co_filename)
        if "torch" not in path.parts:
            place = f"{path.name}:{traceback.tb_lineno}, in {code.co_name}"
        traceback = traceback.tb_next
    return place


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
