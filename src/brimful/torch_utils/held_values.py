"""What a model and its loss hold from one forward to the next: tensors, numbers, states, each by its name.

Held is what parameters, buffers and attributes of modules lead to, through lists, dicts, objects, hooks, and
the closures and global names of functions. States are those of generators of random numbers and of NumPy's
arrays. Other objects and functions of libraries are taken to hold nothing. So are torch's modes, in which torch
notes how they were entered, and iterators, whose place cannot be read.

What torch's hooks for weight normalisation, spectral normalisation and pruning set before each forward is not
held: it follows from parameters and buffers. The weights of the step before would stay in memory beside the
new ones.

Private torch APIs used here: `Module._parameters`, `_buffers`, `_modules`, the names of hooks, and
`Tensor._version` (checked: 2.13).
"""

from __future__ import annotations

import ctypes
import operator
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.torch_utils.op_writes import storage_of

_TRAINERS = ("pytorch_lightning", "accelerate", "peft", "trl", "datasets", "wandb", "deepspeed")
_OF_LIBRARIES = frozenset(
    {*sys.stdlib_module_names, "torch", "numpy", "brimful", "transformers", "lightning", *_TRAINERS}
) - {"__main__"}
_MISSING = object()
_NOT_HELD = object()
"""Stands in the place of an attribute that is not held."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_MODULES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", *_HOOKS}
_MOST_ENTRIES = 4096
"""Longer lists are data, such as a vocabulary; nothing in them is looked at. A choice."""
_MOST_IN_ALL = 2**15
"""Entries of all lists of one walk; nested rows of data have more. A choice."""
_MOST_NUMBERS = 2**20
"""Of all arrays of one walk; more are data, and not looked at. A choice."""


class HeldValues:
    """The values that a model and others, such as its loss, hold now.

    Values of the model have the names that `state_dict` has; those of `others`, functions or objects beside it,
    are named after their keys.
    """

    def __init__(self, model: nn.Module, others: dict[str, Any] | None = None) -> None:
        self.values: dict[str, Any] = {}
        """Tensors and numbers."""
        self.puts: dict[str, Callable[[Any], object]] = {}
        """Functions that put another value in the place of a name, where there is one."""
        self._states: list[tuple[str, _State, Any]] = []
        """Generators and arrays, with their states."""
        self._containers: list[tuple[Any, Any]] = []
        """Dicts, lists and sets, and closures' cells, with copies of what is in them."""
        self._long_lists: list[tuple[list[Any], int]] = []
        """Lists that are not looked at, with their lengths: what is appended to them is removed again."""
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        self._left, self._left_numbers = _MOST_IN_ALL, _MOST_NUMBERS
        for path, module in model.named_modules():
            self._add_module(path, module)
        for name, other in (others or {}).items():
            self._add(name, other)

    def restore(self) -> None:
        """Hold again what was held when this was made; tensors keep the numbers that were written to them."""
        for _name, state, before in self._states:
            state.write(before)
        for container, content in self._containers:
            if isinstance(container, dict):  # a class may refuse its own methods, as diffusers' FrozenDict
                for key in container.keys() - content.keys():
                    dict.__delitem__(container, key)
                for key, value in content.items():
                    if value is not _NOT_HELD and dict.get(container, key, _MISSING) is not value:
                        dict.__setitem__(container, key, value)
            elif isinstance(container, set):
                if container != content:  # a set that is filled again may have another order
                    container.clear()
                    container.update(content)
            elif isinstance(container, list | deque):
                if len(container) != len(content) or any(map(_are_two, container, content)):
                    container.clear()
                    container.extend(content)
            elif container.cell_contents is not content:
                container.cell_contents = content
        for names, name, value in self._globals:
            names[name] = value
        for entries, length in self._long_lists:
            del entries[length:]

    def changed_states(self) -> set[str]:
        """Names of generators that have drawn, and of arrays that were written to, since this was made."""
        return {name for name, state, before in self._states if _differ(state.read(), before)}

    def outside_of(self, model: nn.Module) -> HeldValues:
        """What is held beside a model's own modules, such as by closures of hooks, which its copies share."""
        own = {id(held) for each in model.modules() for held in (vars(each), each._parameters, each._buffers)}
        self._containers = [each for each in self._containers if id(each[0]) not in own]
        self.values, self.puts = {}, {}
        return self

    def _add_module(self, path: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        attributes, set_by_hooks = vars(module), dict.fromkeys(_set_by_hooks(module), _NOT_HELD)
        own = {k: v for k, v in attributes.items() if k not in _OF_MODULES and k not in set_by_hooks}
        self._containers.append((attributes, attributes | set_by_hooks))
        for name, value in own.items():
            if name in ("_parameters", "_buffers"):
                self._add(path, value)
            elif name in _HOOKS:
                for hook in value.values():
                    self._add(_joined(path, "hook"), hook)
            else:
                self._add(_joined(path, name), value, partial(operator.setitem, attributes, name))
        self._add(path, getattr(type(module), "forward", None))

    def _add(self, name: str, value: Any, put: Callable[[Any], object] | None = None) -> None:
        kind = type(value)
        if kind is str or value is None:
            return
        if isinstance(value, Tensor | int | float):
            self.values.setdefault(name, value)
            if put is not None:
                self.puts.setdefault(name, put)
            return
        if id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._add_module(_joined(name, path), module)
        elif isinstance(value, TorchDispatchMode | TorchFunctionMode):
            return
        elif (state := _state_of(value)) is not None:
            self._seen.add(id(value))
            count = value.size if isinstance(value, np.ndarray) else 0
            if count <= self._left_numbers:
                self._left_numbers -= count
                self._states.append((name, state, state.read()))
        elif isinstance(value, set):
            if len(value) <= _MOST_ENTRIES:
                self._seen.add(id(value))
                self._containers.append((value, set(value)))
        elif isinstance(value, dict | list | tuple | deque):
            if len(value) > min(_MOST_ENTRIES, self._left):
                if isinstance(value, list):
                    self._long_lists.append((value, len(value)))
                return
            self._left -= len(value)
            can_put = not isinstance(value, tuple)
            if not isinstance(value, tuple):  # one made here is gone at once, and the next may have its id
                self._seen.add(id(value))
                self._containers.append((value, _entries(value)))
            for key, each in dict.items(value) if isinstance(value, dict) else enumerate(tuple(value)):
                put = partial(operator.setitem, value, key) if can_put else None
                self._add(_joined(name, str(key)), each, put)
        elif kind is MethodType:
            self._add(name, value.__self__)
            self._add(name, value.__func__)
        elif kind is partial:
            self._add(name, (value.func, value.args, value.keywords))
        elif kind is FunctionType:
            self._add_function(name, value)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not _is_of_library(kind):
            self._seen.add(id(value))
            self._add(name, vars(value))
            self._add(name, vars(kind).get("__call__"))

    def _add_function(self, name: str, function: FunctionType) -> None:
        if _is_of_library(function):
            return
        self._seen.add(id(function))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if variable != "__class__" and id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._containers.append((cell, content))
                self._add(_joined(name, variable), content, partial(setattr, cell, "cell_contents"))
        self._add(name, (function.__defaults__, function.__kwdefaults__))
        for variable in _names_in(function.__code__):
            if variable in (names := function.__globals__):
                self._globals.append((names, variable, names[variable]))
                self._add(_joined(name, variable), names[variable], partial(operator.setitem, names, variable))


class _State(NamedTuple):
    """How the state of an object is read and written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _state_of(value: Any) -> _State | None:
    """The state of a generator of random numbers or of an array; None for anything else."""
    if isinstance(value, torch.Generator):
        return _State(value.get_state, value.set_state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return _State(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _State(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        return _State(lambda: value.bit_generator.state, partial(setattr, value.bit_generator, "state"))
    if type(value) is np.ndarray and value.flags.writeable and not value.dtype.hasobject:
        return _State(value.copy, partial(value.__setitem__, ...))
    return None


def _differ(one: Any, other: Any) -> bool:
    return _as_bytes(one) != _as_bytes(other)


def _as_bytes(state: Any) -> bytes:
    if isinstance(state, Tensor):  # not by an op, which a capture would run on a fake
        return ctypes.string_at(state.data_ptr(), state.nbytes)
    return pickle.dumps(state)


def _set_by_hooks(module: nn.Module) -> Iterator[str]:
    """Names of the attributes that hooks of torch set before each forward, from parameters and buffers."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm):
            yield hook.name
        elif isinstance(hook, BasePruningMethod):
            yield hook._tensor_name


def _names_in(code: Any) -> Iterator[str]:
    """Global names that a function uses, and those of functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names_in(constant)


def _is_of_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").partition(".")[0] in _OF_LIBRARIES


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _entries(container: dict[Any, Any] | list[Any] | deque[Any]) -> dict[Any, Any] | list[Any]:
    """What a container holds; classes of libraries may have other ways to copy or to get an entry."""
    return dict.copy(container) if isinstance(container, dict) else list(container)


def _are_two(one: Any, other: Any) -> bool:
    return one is not other


class HeldSnapshot:
    """Attributes of a model's modules as they are now, with copies of plain tensors among them.

    Buffers and trained parameters are not copied. Frozen parameters are, if they take no more than the others:
    their gradients will take as much, and a momentum teacher is as large as what it follows.

    `device` is that of the copies, None each tensor's own; `only` has the names of the tensors to copy, None
    copies all.
    """

    def __init__(
        self, model: nn.Module, device: str | None = None, *, only: Container[str] | None = None
    ) -> None:
        self._model = model
        self._held = held = HeldValues(model)
        self._others = others = {id(tensor) for tensor in (*_not_copied(model), *model.buffers())}
        self._copies = {
            name: value.detach().to(device or value.device, copy=True)
            for name, value in held.values.items()
            if isinstance(value, Tensor) and id(value) not in others and not value.requires_grad
            if only is None or name in only
        }
        self._marks = {name: mark_of(value) for name, value in held.values.items() if id(value) not in others}

    def changed(self, *, by_values: bool = False) -> set[str]:
        """Names of what is not as it was; a write through `.data` shows by the values of copied tensors."""
        now = HeldValues(self._model)
        marks = {name: mark_of(value) for name, value in now.values.items() if id(value) not in self._others}
        changed = {
            name for name in marks.keys() | self._marks.keys() if marks.get(name) != self._marks.get(name)
        }
        changed |= self._held.changed_states()
        unmarked = {name: copy for name, copy in self._copies.items() if by_values and name not in changed}
        values = self._held.values
        return changed | {name for name, copy in unmarked.items() if not have_same_values(values[name], copy)}

    def copied(self) -> list[Tensor]:
        """The tensors that were copied."""
        return [self._held.values[name] for name in self._copies]

    def has_copy(self, name: str) -> bool:
        """Whether a tensor can be given the numbers that it had."""
        return name in self._copies

    def lost(self) -> list[str]:
        """Names of tensors that were written to and have no copy."""
        values, marks = self._held.values, self._marks
        written = (name for name, mark in marks.items() if mark != mark_of(values[name]))
        return [name for name in written if isinstance(values[name], Tensor) and name not in self._copies]

    def restore(self) -> None:
        """Give everything back, with the numbers that it had."""
        self._held.restore()
        for name, copy in self._copies.items():
            self._held.values[name].copy_(copy)

    def stand_in(self) -> None:
        """Put everything back, with copies in the place of tensors, which may be written to."""
        self._held.restore()
        for name, copy in self._copies.items():
            if name in self._held.puts:
                self._held.puts[name](copy.clone())


def have_same_values(tensor: Tensor, copy: Tensor) -> bool:
    """Whether a plain tensor has the bytes of a copy, which may be on another device.

    Of other tensors, such as sparse or sharded ones, only a new version shows a write: True for them.
    """
    kinds = (Tensor, nn.Parameter, nn.Buffer)
    if type(tensor) not in kinds or tensor.layout is not torch.strided or tensor.is_quantized:
        return True
    return torch.equal(_in_bytes(tensor.detach().to(copy.device)), _in_bytes(copy))


def _in_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def is_mostly_frozen(model: nn.Module) -> bool:
    """Whether frozen parameters take more than the others, as those under adapters do."""
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    return sizes[False] > sizes[True]


def _not_copied(model: nn.Module) -> list[nn.Parameter]:
    has_frozen = is_mostly_frozen(model)
    return [each for each in model.parameters() if each.requires_grad or has_frozen]


def mark_of(value: Any) -> Any:
    """What changes where a tensor or its memory is replaced or written to, or a number is another."""
    if not isinstance(value, Tensor):
        return value
    return id(value), 0 if value.is_inference() else value._version, storage_of(value)
