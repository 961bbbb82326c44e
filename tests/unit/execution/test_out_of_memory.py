"""What an out-of-memory error held is freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from brimful.errors import OutOfMemoryError
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, unless_out_of_memory


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


@pytest.mark.usefixtures("_without_garbage_collection")
def test_what_was_held_before_undoing_ran_out_of_memory_too_is_freed() -> None:
    alive: list[weakref.ref[Held]] = []

    def reraised() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        error = torch.OutOfMemoryError("CUDA out of memory.")
        raise error

    def undone() -> None:
        try:
            reraised()
        finally:
            raise torch.OutOfMemoryError("CUDA out of memory. While undoing.")

    assert isinstance(unless_out_of_memory(undone), RanOut)
    assert [each() for each in alive] == [None]


def test_an_error_that_is_raised_while_brimful_s_own_is_handled_is_not_out_of_memory() -> None:
    def trains_again() -> None:
        try:
            raise StepOutOfMemoryError("memory ran out in the step with micro-batch 8.")
        except OutOfMemoryError:
            raise KeyError("labels")  # noqa: B904  # as a loss does that is called here

    with pytest.raises(KeyError, match="labels"):
        unless_out_of_memory(trains_again)


def test_the_error_that_is_handled_when_a_step_is_called_is_not_of_the_step() -> None:
    def users() -> None:
        held = Held()
        raise torch.OutOfMemoryError(f"CUDA out of memory. In the user's {type(held).__name__}.")

    def handling(step: Callable[[], None]) -> tuple[object, object]:
        try:
            users()
        except torch.OutOfMemoryError as error:
            found, traceback = unless_out_of_memory(step), error.__traceback__
        while traceback is not None and traceback.tb_next is not None:
            traceback = traceback.tb_next
        return found, traceback and traceback.tb_frame.f_locals.get("held")

    def runs_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. In the step.")

    def fails() -> None:
        raise ValueError("the step is wrong")

    found, held_by_users = handling(runs_out)
    assert isinstance(found, RanOut)
    assert isinstance(held_by_users, Held)
    with pytest.raises(ValueError, match="the step is wrong"):
        handling(fails)
