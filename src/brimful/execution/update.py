"""An optimizer step that is completed even if memory runs out in the middle of it.

An optimizer writes to the parameters and its own state op by op; where memory runs out between two of them,
some are written and others are not. Nothing is copied beforehand for that rare case. Instead `writes.py` counts
how often each tensor was written to, and `replay.py` runs the step again and skips the writes that were already
made. So the step ends as if memory had not run out, or raises an error if it cannot. Only until it is known how
often a step writes to each tensor, usually in the first two steps, are parameters and state copied to the host,
and a step is undone instead.

Any other error is raised to the caller. Parameters and state are then as before the step if nothing was written
yet, or if there are copies; else the error is a `PartialUpdateError`.

If there is not enough memory for all parameters at once (`foreach` takes a copy of all) they are updated by
halves, quarters, … down to single ones, which compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.batches import map_leaves
from brimful.errors import PartialUpdateError
from brimful.execution.out_of_memory import RanOut, unless_out_of_memory
from brimful.execution.random_state import copied_to_host
from brimful.execution.replay import replay
from brimful.execution.writes import Layout, StepWrites

ATTEMPTS_OF_LEAST = 5
"""Attempts at the least that can be updated at once. A choice: an attempt takes no longer than an update, and
giving up loses the model, though memory that something else holds may be free at the next."""


class AtomicUpdate:
    """An optimizer step that completes or ends the run.

    It is for parameters that are sharded over ranks, and for updates on the host, which need no device memory.
    `what` is what it updates, for messages; `way_out` takes the out-of-memory message and returns how the user
    can continue; `has_begun` says whether the running step may have changed something.
    """

    def __init__(
        self, what: str, way_out: Callable[[str], str], has_begun: Callable[[], bool] = lambda: True
    ) -> None:
        self._what = what
        self._way_out = way_out
        self._has_begun = has_begun

    def run(self, step: Callable[[], object]) -> None:
        """Run one step; `step` calls the optimizer's `step`. Errors before it has begun are raised unchanged.

        Raises `PartialUpdateError` if an error was raised once the step had begun.
        """
        try:
            ran_out = _whether_ran_out(step)
        except PartialUpdateError:
            raise
        except BaseException as error:
            if not self._has_begun():
                raise
            raise _half_updated(f"the optimizer's update of {self._what}", error) from error
        if ran_out is None:
            return
        if not self._has_begun():
            raise torch.OutOfMemoryError(ran_out.message)
        raise PartialUpdateError(
            f"memory ran out in the optimizer's update of {self._what}: {ran_out.message}.\n"
            f"  {self._way_out(ran_out.message)}"
        )


class ResumableUpdate:
    """An optimizer step that can be finished or undone if memory runs out during it.

    `make_room` is called each time that memory ran out.
    """

    def __init__(self, optimizer: Optimizer, make_room: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._make_room = make_room
        # brimful's own optimizer consists of torch's
        self._is_of_torch = type(optimizer).step.__module__.startswith(("torch.optim", "brimful.optimizers"))
        self._layout: Layout | None = None
        self._usual: dict[int, tuple[int, ...]] = {}
        """Changes that a step makes to a parameter and its state, by id; empty until they are known."""
        self._options: list[tuple[str, bool]] = []
        """Options of the groups with which a step makes these changes."""

    def run(self, step: Callable[[], object]) -> None:
        """Run one step; `step` calls the optimizer's `step`.

        Raises `torch.OutOfMemoryError` if memory ran out and the step cannot be finished, or the error of
        `step`; everything is then as before. Raises `PartialUpdateError` if the step can neither be finished
        nor undone.
        """
        before = StepWrites(self._optimizer, self._layout)
        self._layout = before.layout
        if self._options != (options := before.options_in_use()):
            self._options, self._usual = options, {}
        is_known = all(id(parameter) in self._usual for parameter in before.parameters)
        copies = None if is_known else _Copies(self._optimizer, before)
        try:
            with before.counting():
                ran_out = _whether_ran_out(step)
            if ran_out is None:
                if not is_known and before.has_seen_all():
                    self._usual |= before.changes_by_parameter()
                return
            self._make_room()
            ran_out = self._finish(step, before) if copies is None else self._retry(step, before, copies)
            if ran_out is not None:
                raise self._unfinished(ran_out, is_undone=copies is not None)
        except PartialUpdateError:
            raise
        except BaseException as error:
            self._undo(before, copies, error)
            raise

    def _unfinished(self, ran_out: RanOut, *, is_undone: bool) -> Exception:
        """The error of a step in which memory ran out and that cannot be finished."""
        what = f"memory ran out in the update by {type(self._optimizer).__name__}, and it cannot be finished"
        with_less = (
            "with less: another optimizer_implementation ('fused' takes no temporaries), a smaller optimizer, "
            "or a smaller budget."
        )
        if is_undone:
            return ran_out.explained(torch.OutOfMemoryError(f"{what}: {ran_out.message}. Train {with_less}"))
        return ran_out.explained(
            PartialUpdateError(
                f"{what}: {ran_out.message}. Some parameters are updated and others not. Resume from the last "
                f"checkpoint, {with_less}"
            )
        )

    def _undo(self, before: StepWrites, copies: _Copies | None, error: BaseException) -> None:
        """Leave parameters and state as before a step that raised, or raise `PartialUpdateError`."""
        if copies is None and not (self._is_of_torch and before.has_changed_nothing()):
            raise _half_updated(f"the update by {type(self._optimizer).__name__}", error) from error
        try:
            if copies is not None:
                copies.restore(before.parameters)
            before.restore_numbers()
        except BaseException as failure:
            raise _half_updated("taking back an update", failure) from error

    def _retry(self, step: Callable[[], object], before: StepWrites, copies: _Copies) -> RanOut | None:
        """Restore the beginning of a step, and run it again."""

        def again(some: Sequence[nn.Parameter]) -> None:
            copies.restore(some)
            before.restore_numbers()
            step()

        return self._by_parts(before.parameters, lambda some: _whether_ran_out(partial(again, some)))

    def _finish(self, step: Callable[[], object], before: StepWrites) -> RanOut | None:
        """Complete a step in which memory ran out."""
        if not self._is_of_torch:
            return RanOut("what an optimizer of another library has written is unknown")

        def attempt(some: Sequence[nn.Parameter]) -> RanOut | None:
            before.restore_numbers()
            with before.counting_replays():
                return _whether_ran_out(partial(replay, step, before.changes(), self._optimizer, some))

        changes = before.changes_by_parameter()
        return self._by_parts(
            [p for p in before.parameters if changes[id(p)] != self._usual.get(id(p))], attempt
        )

    def _by_parts(
        self, parameters: Sequence[nn.Parameter], attempt: Callable[[Sequence[nn.Parameter]], RanOut | None]
    ) -> RanOut | None:
        """Attempt all parameters, halves, quarters, …; returns the error if a single one cannot be updated."""
        pending = [parameters] if parameters else []
        while pending:
            some = pending.pop()
            is_least = len(some) == 1 or not self._is_of_torch  # others may not treat parameters one by one
            with _only(self._optimizer, some):
                for _ in range(ATTEMPTS_OF_LEAST if is_least else 1):
                    ran_out = attempt(some)
                    if ran_out is None:
                        break
                    self._make_room()
            if ran_out is None:
                continue
            if is_least:
                return ran_out
            middle = len(some) // 2
            pending += [some[middle:], some[:middle]]
        return None


class _Copies:
    """Copies on the host of parameters and state before a step."""

    def __init__(self, optimizer: Optimizer, before: StepWrites) -> None:
        self._optimizer = optimizer
        self._parameters = {id(p): _Copy(p) for p in before.parameters}
        state = optimizer.state
        self._states = {
            id(p): map_leaves(dict(state[p]), Tensor, _Copy, into_objects=False)
            for p in before.parameters
            if p in state
        }

    def restore(self, parameters: Sequence[nn.Parameter]) -> None:
        """Restore some parameters and their state."""
        for parameter in parameters:
            self._parameters[id(parameter)].restored()
            if id(parameter) not in self._states:
                self._optimizer.state.pop(parameter, None)
                continue
            state = self._optimizer.state[parameter]
            before = map_leaves(self._states[id(parameter)], _Copy, _Copy.restored, into_objects=False)
            state.clear()
            state.update(before)


class _Copy:
    """A tensor and a copy of its values on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._values = copied_to_host(tensor)

    def restored(self) -> Tensor:
        """The tensor, with the values that were copied."""
        with torch.no_grad():
            self._tensor.copy_(self._values)
        return self._tensor


def _half_updated(where: str, error: BaseException) -> PartialUpdateError:
    return PartialUpdateError(
        f"an error was raised in {where}: {type(error).__name__}: {error}. Some parameters may be updated and "
        "others not. Resume from the last checkpoint."
    )


def _whether_ran_out(step: Callable[[], object]) -> RanOut | None:
    found = unless_out_of_memory(step)
    return found if isinstance(found, RanOut) else None


@contextmanager
def _only(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, all other parameters have no gradient, so that a step skips them."""
    chosen = {id(parameter) for parameter in parameters}
    others = [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in chosen
    ]
    for parameter, _gradient in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others:
            parameter.grad = gradient
