"""Finds the module that an op belongs to, in forward and in backward.

Forward: hooks on every module call maintain a stack. Backward: autograd numbers its nodes in the order in which
the forward creates them; the numbers at which the stack changed give the module whose forward created a node. A
unit whose forward runs again in backward for the nested unit behind it is put on the stack as if called, and so
is the module that ran the ops that make a unit's input.

Private torch APIs used here: `torch._C._autograd._get_sequence_nr`, `torch._C._current_autograd_node`,
`_global_forward_hooks_with_kwargs` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from brimful.capture.recording.facts import shown_path
from brimful.torch_utils.module_names import plain_namer
from brimful.torch_utils.replaced import replaced
from brimful.trace.modules import LOSS
from brimful.transforms.input_ops import InputOps, Made
from brimful.transforms.segments import Call

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class ModuleCalls:
    """Follows the module calls of models; modules are named by path, without wrappers.

    Calls by other threads than that which follows are not of the step.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._thread = threading.get_ident()
        self._names: dict[int, str] = {}
        self._classes: dict[str, str] = {}
        for model in models:
            self.add(model)
        self._called: dict[str, None] = {}
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._owners: list[str] = []
        self._last_backward = LOSS
        self._hooks: tuple[RemovableHandle, ...] = ()
        self._add_hooks: Callable[[], tuple[RemovableHandle, ...]] = tuple

    def add(self, model: nn.Module, prefix: str = "") -> None:
        """Name the modules of a model; the paths of a further one begin with `prefix`."""
        plain_name = plain_namer(model)
        paths = [
            (".".join(filter(None, (prefix, plain_name(path)))), each) for path, each in model.named_modules()
        ]
        self._names |= {id(module): fqn for fqn, module in reversed(paths)}
        self._classes |= {fqn: _class_name(module) for fqn, module in paths}

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow calls while the context is open."""

        def enter(module: nn.Module, args: Any) -> None:
            if self._is_followed():
                self._enter(module, args)

        def leave(module: nn.Module, *inputs_and_output: Any) -> None:
            # Positional and keyword arguments; where forward raised, torch gives the positional ones alone.
            if self._is_followed():
                self._leave(module, inputs_and_output[:-1])

        self._thread = threading.get_ident()
        self._add_hooks = lambda: (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        )
        self._hooks = self._add_hooks()
        run_again = Call.run_again

        def followed(call: Call) -> None:
            enter(call.module, ())
            run_again(call)
            leave(call.module, None)

        try:
            with replaced(Call, "run_again", followed), self._follow_input_ops():
                yield
        finally:
            self._remove_hooks()

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Take what runs while the context is open for ops of one module, and follow no calls inside of it.

        Compiled code calls no modules, and hooks would become part of it.
        """
        self._remove_hooks()
        self._enter(module, ())
        try:
            yield
        finally:
            self._leave(module, None)
            self._hooks = self._add_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
            _global_forward_hooks_with_kwargs.pop(hook.id, None)  # which torch leaves there

    @contextmanager
    def _follow_input_ops(self) -> Iterator[None]:
        """Let ops that make a unit's input again belong to the module that made it first."""
        made_in: WeakKeyDictionary[Made, str] = WeakKeyDictionary()
        remember, again = InputOps.remember, Made.again

        def noted(input_ops: InputOps, result: Tensor, made: Made) -> None:
            made_in[made] = self._top()
            remember(input_ops, result, made)

        def followed(made: Made) -> Tensor:
            self._stack.append(made_in[made])
            try:
                return again(made)
            finally:
                self._stack.pop()

        with replaced(InputOps, "remember", noted), replaced(Made, "again", followed):
            yield

    @property
    def classes(self) -> tuple[tuple[str, str], ...]:
        """(path, class name) of the modules called, in the order of first call."""
        return tuple((fqn, self._classes[fqn]) for fqn in self._called)

    def owner(self) -> str:
        """Path of the module the current op belongs to; LOSS outside of the model."""
        if self._stack:
            return self._stack[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return LOSS
        if node.name() != _ACCUMULATE_GRAD:  # it has no number: it belongs where the gradient came from
            index = bisect_right(self._numbers, node._sequence_nr()) - 1
            self._last_backward = self._owners[index] if index >= 0 else LOSS
        return self._last_backward

    def shown_owner(self) -> str:
        """The path of the module the current op belongs to, in quotes, or words for what is outside of all."""
        return shown_path(self.owner())

    def _is_followed(self) -> bool:
        """Whether a call that happens now is of the step."""
        return threading.get_ident() == self._thread

    def _enter(self, module: nn.Module, _args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._called.setdefault(name)
        self._stack.append(name if name is not None else self._top())
        self._mark()

    def _leave(self, _module: nn.Module, _inputs: Any) -> None:
        if self._stack:
            self._stack.pop()
        self._mark()

    def _top(self) -> str:
        return self._stack[-1] if self._stack else LOSS

    def _mark(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._top())


def _class_name(module: nn.Module) -> str:
    """A module's class name; "GraphModule" for a graph of torch.fx, whose class is named as what was traced."""
    return "GraphModule" if isinstance(module, GraphModule) else type(module).__name__
