"""What an out-of-memory error held is freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from brimful.execution.out_of_memory import RanOut, unless_out_of_memory


class Held:
    pass


@pytest.fixture
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collection")
def test_what_functions_held_is_freed_although_they_hold_the_error() -> None:
    alive: list[weakref.ref[Held]] = []

    def batches() -> Iterator[Held]:
        held = Held()
        alive.append(weakref.ref(held))
        yield held

    def reraised() -> None:  # as a DataLoader does with an error of its workers
        error = torch.OutOfMemoryError("CUDA out of memory.")
        raise error

    def reads() -> None:
        for _ in batches():
            try:
                reraised()
            except torch.OutOfMemoryError as error:
                raise RuntimeError("CUDA out of memory. In a step.") from error

    assert isinstance(unless_out_of_memory(reads), RanOut)
    assert [each() for each in alive] == [None]
