"""The journal of a step in a loop that brimful does not run: what the step did so far can be run again.

The loop calls what it does in a step through `StepJournal.run`: forward and backward of each micro-batch, and
clipping. Its calls of a loss scaler's `unscale_` are run that way too. If memory runs out in one of them, the
gradients of the step are cleared, random numbers and buffers are restored to those of its start, and all of its
actions are run again. An update in which memory runs out is completed. A loss scaler discards what it found
about gradients that are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from brimful.errors import OutOfMemoryError, PartialUpdateError, UsageError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.out_of_memory import RanOut, StepOutOfMemoryError, make_room, with_retries, with_room
from brimful.execution.precision import device_of
from brimful.execution.random_state import RandomState
from brimful.execution.retries import Retries, Shrink
from brimful.execution.scaled_update import ScaledUpdates, enabled, replace_step
from brimful.execution.update import ResumableUpdate
from brimful.torch_utils.replaced import replace_attribute

Result = TypeVar("Result")

_OF_TORCH = ("torch.optim", "brimful.optimizers")
"""Modules of optimizers whose `step` runs a closure once, before its update; LBFGS is an exception."""


class StepJournal:
    """The actions of the optimizer step so far, run again where memory runs out in one of them.

    Args:
        model: The model, before or after it is wrapped.
        optimizer: An optimizer without a wrapper. Its `step` ends a step.
        retries: The samples of a micro-batch, and the records of the retries.
        why_nothing_less: Why an action in which memory runs out twice takes nothing less.
        scaler: The loop's loss scaler; it steps the optimizer. A disabled one is ignored.
        wrapper: Accelerate's wrapper of the optimizer; None without one.
        snapshot: Copies what else an action changes; the function that it returns restores that.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        retries: Retries[int],
        *,
        why_nothing_less: str,
        scaler: GradScaler | None = None,
        wrapper: Any = None,
        snapshot: Callable[[], Callable[[], object]] = lambda: lambda: None,
    ) -> None:
        self.retries, self._why_nothing_less, self._snapshot = retries, why_nothing_less, snapshot
        self._device = device_of(model)
        self._buffers = BufferSnapshot(model)
        self._random: RandomState | None = None
        """Random numbers at the start of the step; None between steps."""
        self._is_undone = False
        self._done: list[_Action] = []
        self._has_gradients = False
        self._is_within = False
        """Whether an action or an update is running."""
        self._runs_closures = type(optimizer).step.__module__.startswith(_OF_TORCH) and not isinstance(
            optimizer, torch.optim.LBFGS
        )
        of_optimizer = (p for group in optimizer.param_groups for p in group["params"])
        self._parameters = tuple({id(p): p for p in (*model.parameters(), *of_optimizer)}.values())
        self._changes = ExitStack()
        self._changes.callback(replace_step(optimizer, wrapper, self._step_of(optimizer)))
        self._changes.callback(replace_attribute(optimizer, "zero_grad", self._zero_grad_of(optimizer)))
        self._scaled: ScaledUpdates | None = None
        if (scaling := enabled(scaler)) is not None:
            self._scaled = ScaledUpdates(scaling, optimizer, self._device, self.run, self._end)
            self._changes.callback(self._scaled.remove)

    def remove(self) -> None:
        """Restore the methods of the optimizer and the scaler; calling it again does nothing."""
        self._changes.close()

    def run(
        self, function: Callable[..., Result], *arguments: Any, shrink: Shrink[int] | None = None
    ) -> Result:
        """Run an action of the step: forward and backward of a micro-batch, or clipping.

        `arguments`, such as the micro-batch, are kept until the step ends. Raises `StepOutOfMemoryError` if
        memory ran out twice in a row, and `shrink` finds no smaller micro-batch.
        """
        if self._is_within:  # an update calls it
            return function(*arguments)
        if self._random is None or not self._has_any_gradient():  # they were cleared without an update
            self._end()
            with_room(self._begin, during="a training step begins")
        action, start, restore = _Action.of(function, arguments), self._random, self._snapshot()
        assert start is not None

        def attempt() -> Result:
            if self._is_undone:
                self._begin(start)
                for each in self._done:
                    each.function(*each.arguments)
                restore()
            return function(*arguments)

        with self._within():
            try:
                found = self.retries.run(attempt, shrink or self._nothing_less, partial(self._undo, start))
            except BaseException:
                if self._is_undone:
                    self._end()
                raise
        self._done.append(action)
        return found

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._is_within = True
        try:
            yield
        finally:
            self._is_within = False

    def _has_any_gradient(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _end(self) -> None:
        """Drop what is kept for the step."""
        if self._random is not None and not self._is_undone:
            self._buffers.release()
        self._random, self._done, self._is_undone = None, [], False

    def _begin(self, start: RandomState | None = None) -> None:
        self._has_gradients = self._has_any_gradient()
        self._buffers.take()
        self._random, self._is_undone = start or RandomState.now(self._device), False

    def _undo(self, start: RandomState, ran_out: RanOut) -> None:
        """Undo the step so far, if it can be run again."""
        if self._random is None and not self._is_undone:
            raise PartialUpdateError(
                f"memory ran out after an action had stepped the optimizer: {ran_out.message}. The action "
                "cannot be run again, and parameters are those after the update. Call optimizer.step() outside "
                "of what prepared.retry runs."
            )
        if self._has_gradients:
            raise StepOutOfMemoryError(
                f"memory ran out in a training step: {ran_out.message}. It cannot be taken again, because "
                "there were gradients before its first action. Call optimizer.zero_grad() after each "
                "optimizer.step()."
            )
        for parameter in self._parameters:
            parameter.grad = None
        if self._scaled is not None:
            self._scaled.forget()
        self._is_undone = True
        start.restore(self._device)
        self._buffers.restore()
        for each in self._done:
            each.check()

    def _nothing_less(self, _size: int) -> int:
        raise OutOfMemoryError(self._why_nothing_less)

    def _step_of(self, optimizer: Optimizer) -> Callable[..., Any]:
        """Replacement of the optimizer's `step`: it ends a step, and is completed if memory runs out in it."""
        update, own = _completed_update(optimizer, self._device), optimizer.step

        @wraps(own)  # with the mark of a learning-rate scheduler, which counts the steps
        def step(closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            loss = None
            if closure is None or self._runs_closures:
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                with_room(self._buffers.end_of_forward, during="buffers are compared before an update")
                update(partial(own, **options))
            else:  # it may run the closure several times, or at other parameters
                with self._within():
                    loss = own(closure, **options)
            self._end()
            self.retries.step += 1
            return loss

        return step

    def _zero_grad_of(self, optimizer: Optimizer) -> Callable[..., None]:
        """Replacement of the optimizer's `zero_grad`: it ends a step too, as a loop may skip its update."""
        own = optimizer.zero_grad

        @wraps(own)
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            if not self._is_within:
                self._end()

        return zero_grad


def _completed_update(optimizer: Optimizer, device: torch.device) -> Callable[[Callable[[], object]], None]:
    """A function that runs updates of an optimizer, and completes those in which memory runs out.

    It takes a function that calls the optimizer's `step`, and raises `PartialUpdateError` if an update can
    neither be completed nor undone. Room is made on `device`.
    """
    update = ResumableUpdate(optimizer, partial(make_room, device))

    def recover(ran_out: RanOut, *, is_retry: bool) -> None:  # parameters and state are as before the update
        if is_retry:
            raise StepOutOfMemoryError(
                f"memory ran out twice in an optimizer's update: {ran_out.message}. Parameters and optimizer "
                "are as before it. Plan for a smaller budget."
            )

    return lambda step: with_retries(partial(update.run, step), recover, device)


@dataclass(frozen=True, slots=True)
class _Action:
    """A call, and the values outside of its function that the function reads."""

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    surroundings: tuple[Any, ...]

    @classmethod
    def of(cls, function: Callable[..., object], arguments: tuple[Any, ...]) -> _Action:
        return cls(function, arguments, _surroundings(function))

    def check(self) -> None:
        """Raise `UsageError` if the function would read other variables than before."""
        now = _surroundings(self.function)
        if any(a is not b for a, b in zip(now, self.surroundings, strict=True)):
            name = getattr(self.function, "__name__", "an action")
            raise UsageError(
                f"memory ran out, and {name} cannot be run again: it reads variables that have changed since. "
                "Model and optimizer are as before the step. Pass the micro-batch as an argument: "
                "prepared.retry(function, batch)."
            )


_MISSING = object()


def _surroundings(function: Callable[..., object]) -> tuple[Any, ...]:
    """The values of variables outside of a function that it reads."""
    code = getattr(function, "__code__", None)
    if code is None:  # a partial function or a callable object
        return ()
    variables: dict[str, Any] = function.__globals__
    return (
        *(_contents(cell) for cell in function.__closure__ or ()),
        *(variables.get(name, _MISSING) for name in code.co_names),
    )


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING
