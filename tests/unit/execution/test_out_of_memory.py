"""What an out-of-memory error held is freed at once, without the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, unless_out_of_memory, with_room
from brimful.trainer import load_weights


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
    def handling(step: Callable[[], None]) -> object:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. In the user's code.")
        except torch.OutOfMemoryError:
            return unless_out_of_memory(step)

    def runs_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. In the step.")

    def fails() -> None:
        raise ValueError("the step is wrong")

    assert isinstance(handling(runs_out), RanOut)
    with pytest.raises(ValueError, match="the step is wrong"):
        handling(fails)


def test_an_error_that_is_raised_again_while_it_is_handled_is_of_the_step() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. In a worker.")

    def raises_again() -> None:
        raise error

    try:
        raises_again()
    except torch.OutOfMemoryError:
        assert isinstance(unless_out_of_memory(raises_again), RanOut)


@pytest.mark.usefixtures("_without_garbage_collection")
def test_what_a_step_held_is_freed_before_undoing_it_is_tried_again() -> None:
    alive: list[weakref.ref[Held]] = []

    def step() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory. In the step.")

    def undo() -> str:
        if alive[0]() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. The step holds what undoing takes.")
        return "undone"

    try:
        step()
    except torch.OutOfMemoryError:
        assert with_room(undo, during="the step is undone") == "undone"


def test_weights_of_another_model_are_refused_in_words_while_an_error_is_handled(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"other": torch.zeros(1)}, path)
    try:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    except torch.OutOfMemoryError:
        with pytest.raises(UsageError, match="has no weights for this Linear"):
            load_weights(torch.nn.Linear(2, 2), path)
