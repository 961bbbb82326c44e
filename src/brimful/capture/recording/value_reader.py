"""Values that code reads from tensors during a capture: known ones, or assumed ones and a note.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch._C._DisableTorchDispatch` (checked: torch
2.13, 2.11).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from brimful.capture.recording.facts import StepFacts
from brimful.capture.recording.modules import ModuleCalls
from brimful.capture.recording.op_info import OpInfo
from brimful.capture.recording.position import StepPosition
from brimful.capture.values.follower import ValueFollower
from brimful.capture.values.known import KnownValues, NotKnownError
from brimful.capture.values.shapes import run_with_known_shape, run_with_largest_shape
from brimful.trace import Guess

aten = torch.ops.aten

UNKNOWN_NUMBER = 1.0
"""The number that code reads where it cannot be known: that of a step count, or of a label that counts."""
_ASSUMED = {
    Guess.EXPECTED: "assumed to spread evenly over the options",
    Guess.MOST: "assumed to be the same for all rows, after each option once",
    Guess.LEAST: "assumed to be the same for all rows",
}
"""Words for the assumption about choices, by guess."""


class ValueReader:
    """Answers what reads values, and notes which sizes they decide.

    `known` has the values of some tensors. The optimizer's own numbers, by `position`, decide no sizes.
    """

    def __init__(
        self, known: KnownValues, modules: ModuleCalls, position: StepPosition, facts: StepFacts
    ) -> None:
        self.known = known
        self._modules, self._position, self._facts = modules, position, facts
        self._follower = ValueFollower(known)
        self._first_choice = ""
        """The first op that chose, and where."""

    def empty_copy(self, tensor: Tensor) -> Tensor:
        """A tensor of the same shape and type, on the device, with the same values where they are known."""
        copied = torch.empty_like(tensor)
        self.known.carry_over(tensor, copied)
        return copied

    def sizes_from(self, tensor: Tensor) -> Tensor:
        """The values of a tensor that decide sizes, as a real tensor on the CPU.

        Raises `NotKnownError` if they are not known.
        """
        values = self.known.of(tensor)
        self._note_decision(tensor)
        return values

    def array_of(self, tensor: Tensor) -> Tensor | None:
        """The values of a fake tensor that the host reads together; None, and a note, if they are not known.

        Whole numbers are taken to decide sizes.
        """
        try:
            values = self.known.of(tensor)
        except NotKnownError:
            if not self._position.is_in_optimizer:
                self._facts.note(f"numbers read from a tensor in {self._modules.shown_owner()}")
            return None
        if not values.is_floating_point() and not self._position.is_in_optimizer:
            self._note_decision(tensor)
        return values

    def follow(
        self,
        info: OpInfo,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        """Keep the values that an op returns, where they are known or assumed."""
        if info.chooses and not self._first_choice:
            self._first_choice = f"{info.name} in {self._modules.shown_owner()}"
        if not info.is_random:
            self._follower.follow(func, args, kwargs, inputs, outputs)
        elif self._follower.follow_draw(func, args, kwargs, outputs):
            self._facts.drawn_in.setdefault(self._modules.owner())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose result is not a tensor, or is one of a shape that depends on values."""
        if func is aten._local_scalar_dense.default and type(args[0]) is FakeTensor:  # fakes take longer
            if args[0].constant is None:
                return self._number(func, args, kwargs)
            with torch._C._DisableTorchDispatch():
                return args[0].constant.item()
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            return self._number(func, args, kwargs)
        except DynamicOutputShapeException:
            with suppress(NotKnownError):
                out = run_with_known_shape(self.known, func, args, kwargs)
                self._note_decision(args, kwargs)
                return out
            with suppress(NotKnownError):
                out = run_with_largest_shape(self.known, func, args, kwargs)
                self._facts.sizes_are_guessed = True
                extent = "smallest" if self.known.guess is Guess.LEAST else "largest"
                self._facts.note(
                    f"{func} in {self._modules.shown_owner()}, assumed at its {extent} possible size"
                )
                return out
            raise

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | bool:
        """The result of an op that reads a number: the known number, or `UNKNOWN_NUMBER`."""
        with suppress(NotKnownError):
            if func is aten._local_scalar_dense.default:
                number = self.known.number_of(args[0])
                if type(number) is int and not self._position.is_in_optimizer:
                    self._note_decision(args)
                return number
            answer: bool = self.known.compute(func, args, kwargs)
            return answer
        if not self._position.is_in_optimizer:
            self._facts.note(f"a number read from a tensor in {self._modules.shown_owner()}")
        return _as_number(UNKNOWN_NUMBER, func, args[0])

    def _note_decision(self, *values: Any) -> None:
        """Note that known values, some of them assumed perhaps, decided a size."""
        self._facts.sizes_depend_on_values = True
        if self.known.are_assumed(values):
            self._facts.sizes_are_guessed = True
            assumed = _ASSUMED[self.known.guess]
            self._facts.note(f"sizes that depend on choices (first {self._first_choice}), {assumed}")


def _as_number(value: float, func: Any, tensor: Tensor) -> float | bool:
    """A number as what an op returns that reads one: of the tensor's own type, or whether tensors are equal."""
    if func is not aten._local_scalar_dense.default or tensor.dtype is torch.bool:
        return bool(value)
    return value if tensor.is_floating_point() else int(value)
