"""Recognize out-of-memory errors, free memory after one, and try again.

Steps are retried as `retries.py` says. Everything else that a run may do twice (copies for a save, checks of
the weights, their average, the state of random generators) uses `with_room`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Protocol, TypeVar

import torch

from brimful.errors import BrimfulError, OutOfMemoryError, PartialUpdateError
from brimful.execution.explained import Expected, Explanation
from brimful.torch_utils.forward_lines import recorded_lines

_WORDS = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "NOT_INITIALIZED when calling `cublasCreate",
    "NOT_INITIALIZED when calling `cublasLtCreate",
    "NOT_INITIALIZED when calling `cusolverDnCreate",
    "NOT_INITIALIZED when calling `cusparseCreate",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "Failed to CUDA calloc",
    "can't allocate memory",
    "not enough memory",
)
"""Parts of the messages of a `RuntimeError` that is raised if no memory could be allocated: "CUDA error: out of
memory" and "CUDA driver error: out of memory" of calls past the allocator, the libraries' own (torch 2.13:
aten/src/ATen/cuda/CUDABlas.cpp, Exceptions.cpp), and the CPU's allocator (c10/core/impl/alloc_cpu.cpp).
NOT_INITIALIZED is what `cublasCreate` and its like return where their handle finds no memory, at the first
product of a process (torch's forum and issues; a broken driver gives it too, and is then reported with the
words of the library). torch makes every handle of cuDNN itself, so there the status alone says so. NCCL's own
is "Failed to CUDA calloc"."""


def out_of_memory(error: BaseException, handled: BaseException | None = None) -> str | None:
    """The first line of an out-of-memory error's message; None for other errors.

    Causes and contexts of `error` are checked too, up to one of brimful's own errors: it already reports what
    happened before, and an error that is raised while it is handled is another one. `handled` is the error that
    was being handled before the action that raised: Python makes it a context, and it is not of the action,
    unless the action raises it again.
    """
    found = _itself(error, handled)
    return None if found is None else (str(found) or type(found).__name__).splitlines()[0]


def _itself(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """The out-of-memory error among an error and those before it."""
    for each in _chain(error, handled):
        is_by_type = isinstance(each, torch.OutOfMemoryError | MemoryError)
        if is_by_type or (isinstance(each, RuntimeError) and any(word in str(each) for word in _WORDS)):
            return each
    return None


def explain(
    error: BaseException,
    expected: Expected | None = None,
    *,
    handled: BaseException | None = None,
    first_node: int = 0,
) -> BaseException | None:
    """Add to an out-of-memory error what held the memory, and what to change; other errors stay as they are.

    An error that is raised from it gets the note. One that is raised while it is handled is another one and
    stays as it is: its traceback shows the note where it shows the out-of-memory error.

    Args:
        error: Any error.
        expected: What a plan predicted.
        handled: As for `out_of_memory`.
        first_node: Number of the running step's first autograd node.

    Returns:
        The error that has the note; None if memory did not run out.
    """
    found = _itself(error, handled)
    if found is None:
        return None
    cause = error
    while cause is not found and cause.__cause__ is not None:
        cause = cause.__cause__
    noted = error if cause is found else found
    return Explanation.of(found, first_node=first_node).added_to(noted, expected)


@contextmanager
def explaining(expected: Expected | None) -> Iterator[None]:
    """Explain out-of-memory errors that pass through, with the lines of the ops inside."""
    handled = sys.exc_info()[1]
    try:
        with recorded_lines():
            yield
    except Exception as error:
        explain(error, expected, handled=handled)
        raise


Result = TypeVar("Result")
_Error = TypeVar("_Error", bound=BaseException)


@dataclass(frozen=True, slots=True)
class RanOut:
    """Returned in place of an action's result if memory ran out."""

    message: str
    """Message of the error."""
    refused: str = ""
    """The error that an attempt with less raised; "" if memory ran out in it."""
    explanation: Explanation | None = None

    @property
    def place(self) -> str:
        """The line that asked for memory."""
        found = None if self.explanation is None else self.explanation.found
        return found.line if found is not None and found.line else "in brimful's own code"

    def explained(self, error: _Error, expected: Expected | None = None) -> _Error:
        """An error that ends the attempts, with what held the memory in the last of them."""
        return error if self.explanation is None else self.explanation.added_to(error, expected)


def unless_out_of_memory(action: Callable[[], Result]) -> Result | RanOut:
    """Call an action once, and return `RanOut` if memory runs out in it; its other errors are raised.

    The error is freed when this returns, and with it what the functions that it passed through held.
    """
    handled = sys.exc_info()[1]
    try:
        return action()
    except Exception as error:
        message = out_of_memory(error, handled)
        if message is None:
            raise
        explanation = Explanation.of(_itself(error, handled) or error)
        free_frames(error)
    return RanOut(message, explanation=explanation)


def free_frames(error: BaseException) -> None:
    """Free what the functions held that an error passed through, also where they hold the error itself.

    So for the errors before it: undoing a step that ran out of memory may run out too. Of the errors, only the
    messages may be needed afterwards. If they are left to the garbage collector, a DataLoader waits five
    seconds for each worker, as its queues are finalised before its iterator (torch 2.13).
    """
    remaining, seen = [error], set[int]()
    while remaining:
        each = remaining.pop()
        seen.add(id(each))
        clear_frames(each.__traceback__)
        before = (each.__cause__, each.__context__)
        remaining += [other for other in before if other is not None and id(other) not in seen]


class StepOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """Memory ran out in a step, and no smaller attempt remains; also a `torch.OutOfMemoryError`."""


_ENDS = (PartialUpdateError, OSError, ImportError, NameError)
"""Errors that end the attempts: a timeout is an OSError, and names are missing for any batch."""


class Recover(Protocol):
    """Called between two attempts."""

    def __call__(self, ran_out: RanOut, /, *, is_retry: bool) -> None:
        """Make the next attempt smaller if the last was a retry already, or raise what ends the attempts."""


def with_retries(
    attempt: Callable[[], Result],
    recover: Recover,
    device: torch.device,
    *,
    but: tuple[type[Exception], ...] = (),
    expected: Expected | None = None,
    is_only: bool = False,
) -> Result:
    """Run an attempt, and repeat it for as long as memory runs out in it.

    Once an attempt takes less, its other errors are reasons to take still less too: a model may refuse some
    numbers of samples, as BatchNorm refuses one.

    Args:
        attempt: Runs a step, or leaves everything as before.
        recover: Called after each attempt that is to be repeated, once cached memory has been released.
        device: Where memory runs out.
        but: Errors that end the attempts.
        expected: What a plan predicted, for the explanation of an error that ends the attempts.
        is_only: Whether `recover` permits no second attempt, as other processes would wait for it.

    Returns:
        The result of the last attempt.
    """
    ends: tuple[type[Exception], ...] = (*_ENDS, *but)
    ran_out: RanOut | None = None
    takes_less = False
    while True:
        try:
            # The last attempt is explained; recording lines takes time in each step.
            with recorded_lines() if is_only or ran_out is not None else nullcontext():
                found = unless_out_of_memory(attempt)
        except ends:
            raise
        except Exception as error:
            if not takes_less:
                raise
            assert ran_out is not None
            found = replace(ran_out, refused=f"{type(error).__name__}: {error}")
        if not isinstance(found, RanOut):
            return found
        make_room(device)
        takes_less = ran_out is not None
        try:
            recover(found, is_retry=takes_less)
        except BrimfulError as error:
            found.explained(error, expected)
            raise
        ran_out = found


def with_room(action: Callable[[], Result], *, during: str) -> Result:
    """Run an action, and run it once more after freeing memory if memory runs out in it.

    Args:
        action: May be called twice: until it returns it changes nothing, or nothing that a second call minds.
            It must not wait for other ranks, which call it once.
        during: What is done, for the error: "memory ran out while …".

    Returns:
        The result of `action`.

    Raises:
        OutOfMemoryError: Memory ran out in both calls.
    """
    found = unless_out_of_memory(action)
    if isinstance(found, RanOut):
        make_room(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
        found = unless_out_of_memory(action)
    if isinstance(found, RanOut):
        raise found.explained(
            OutOfMemoryError(f"memory ran out while {during}, twice in a row: {found.message}.")
        )
    return found


def despite_out_of_memory(action: Callable[[], object], device: torch.device) -> None:
    """Call an action, and call it once more, after freeing memory, if memory runs out in it."""
    if isinstance(unless_out_of_memory(action), RanOut):
        make_room(device)
        action()


def make_room(device: torch.device) -> None:
    """Free what nothing uses: garbage in reference cycles, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _chain(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]() if error is handled else {id(handled)}
    each: BaseException | None = error
    while each is not None and id(each) not in seen and not isinstance(each, BrimfulError):
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
