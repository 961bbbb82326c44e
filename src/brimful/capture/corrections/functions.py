"""The function mode that calls the functions of rules instead of torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from brimful.capture.corrections.rule import Rule
from brimful.capture.recording.places import Places


class CorrectedFunctions(TorchFunctionMode):
    """Calls the functions of the rules instead of torch's, in backward too.

    A function mode is out of force inside `Tensor.backward`; a recomputation there would choose other ops than
    the forward did. So backward runs under the mode once more. `places` follows where functions put what they
    make.
    """

    def __init__(self, rules: Iterable[Rule], places: Places) -> None:
        super().__init__()
        self._places = places
        self._rules = tuple(rules)
        self._stand_ins = {
            function: stand_in for rule in self._rules for function, stand_in in rule.functions().items()
        }
        self.names = frozenset(self._stand_ins)
        """The functions that are called otherwise."""
        self._on_backward: Callable[[bool], None] = lambda _begins: None
        self._backward_depth = 0
        """Reentrant checkpointing runs a backward pass inside another."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            with self._in_backward():
                return func(*args, **kwargs)
        stand_in = self._stand_ins.get(func)
        if stand_in is not None:
            return stand_in(*args, **kwargs)
        place = self._places.asked(func, kwargs)
        if place is None:
            return func(*args, **kwargs)
        named = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if str(named.get("device")).startswith("cuda"):
            named["device"] = "cpu"  # where the fakes are
        with self._places.making(place):
            return func(*args, **named)

    @contextmanager
    def follow_backward(self, call: Callable[[bool], None]) -> Iterator[None]:
        """Call `call` with True as a backward pass begins and with False as it ends."""
        before, self._on_backward = self._on_backward, call
        try:
            yield
        finally:
            self._on_backward = before

    def _backward(
        self,
        tensors: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
        grad_tensors: Any = None,
        **_unused: Any,
    ) -> None:
        roots = tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)
        given = gradient if gradient is not None else grad_tensors
        if given is None:
            with torch.no_grad():
                given = tuple(torch.ones_like(root) for root in roots)
        elif isinstance(given, torch.Tensor):
            given = (given,)
        for rule in self._rules:
            rule.begin_backward(roots)
        wanted = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        with self._in_backward(), self:
            torch.autograd.graph._engine_run_backward(
                roots,
                tuple(given),
                create_graph if retain_graph is None else retain_graph,
                create_graph,
                wanted,
                allow_unreachable=True,
                accumulate_grad=True,
            )

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        if self._backward_depth == 0:
            self._on_backward(True)
        self._backward_depth += 1
        try:
            yield
        finally:
            self._backward_depth -= 1
            if self._backward_depth == 0:
                self._on_backward(False)
