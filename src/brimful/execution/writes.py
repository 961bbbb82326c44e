"""How often each tensor of an optimizer was written to since a step began.

torch counts writes by ops on single tensors (a tensor's version); a dispatch mode counts those by ops on lists
of tensors (`foreach`, `fused`), which torch does not, and those of a replay, where a skipped write raises a
version too.

Private torch API used here: `Tensor._version`, `_base` (checked: torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from brimful.torch_utils.dispatch_mode import EagerDispatchMode
from brimful.torch_utils.op_writes import written_tensors

Place = tuple[int, int]
"""Address of a tensor's bytes, and their number: the same for a tensor and a view of the whole of it."""


class Layout:
    """The tensors and numbers of an optimizer; the same from step to step once its state is made."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        self.tensors = {id(p): (p, *state_tensors(optimizer, p)) for p in parameters}
        """By the id of each parameter: itself and the tensors of its state."""
        self.all_tensors = [tensor for each in self.tensors.values() for tensor in each]
        self.ids = tuple(map(id, self.all_tensors))
        self.holders_of_numbers = [holder for holder in states if _numbers_in(holder)]
        self._known = [(id(parameter), len(state)) for parameter, state in zip(parameters, states, strict=True)]

    def is_of(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether no parameter or state was added or removed since."""
        state = optimizer.state
        return self._known == [(id(p), len(state[p]) if p in state else 0) for p in parameters]


class StepWrites:
    """The state of an optimizer before a step, and how often each of its tensors changed since."""

    def __init__(self, optimizer: Optimizer, layout: Layout | None) -> None:
        self._optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        is_known = layout is not None and layout.is_of(optimizer, self.parameters)
        self.layout = layout if layout is not None and is_known else Layout(optimizer, self.parameters)
        self._gradients: list[Tensor] = [p.grad for p in self.parameters if p.grad is not None]
        takes_lists = any(map(_takes_lists, optimizer.param_groups))
        ids = (*self.layout.ids, *map(id, self._gradients))
        self._counter = _WriteCounter(dict.fromkeys(ids, 0)) if takes_lists else None
        versions = self._counter is None
        self._versions = [tensor._version for tensor in self.layout.all_tensors] if versions else []
        self._gradient_versions = [gradient._version for gradient in self._gradients] if versions else []
        holders = (*optimizer.param_groups, *self.layout.holders_of_numbers)
        self._numbers = [(holder, _numbers_in(holder)) for holder in holders]

    def options_in_use(self) -> list[tuple[str, bool]]:
        """Numeric options of groups, and whether each is nonzero: how often a step writes depends on it."""
        groups = self._optimizer.param_groups
        return [(name, bool(value)) for group in groups for name, value in _numbers_in(group).items()]

    def counting(self) -> AbstractContextManager[object]:
        """Context that counts changes, if torch does not count them."""
        return nullcontext() if self._counter is None else self._counter

    def counting_replays(self) -> AbstractContextManager[object]:
        """Context that counts changes by what is executed, not by versions."""
        if self._counter is None:
            self._counter = _WriteCounter({id(tensor): times for tensor, times in self._changes()})
        return self._counter

    def has_seen_all(self) -> bool:
        """Whether the step made no state that was not known before."""
        return self.layout.is_of(self._optimizer, self.parameters)

    def has_changed_nothing(self) -> bool:
        """Whether parameters and state are what they were, numbers aside."""
        kept = islice(self._changes(), len(self.layout.all_tensors))  # the gradients come after them
        return self.has_seen_all() and not any(times for _tensor, times in kept)

    def changes(self) -> dict[Place, int]:
        """How often each tensor was changed since the step began."""
        return {place_of(tensor): times for tensor, times in self._changes()}

    def changes_by_parameter(self) -> dict[int, tuple[int, ...]]:
        """How often each parameter and each tensor of its state was changed, by the parameter's id."""
        changes = {id(tensor): times for tensor, times in self._changes()}
        return {
            key: tuple(changes[id(tensor)] for tensor in tensors)
            for key, tensors in self.layout.tensors.items()
        }

    def restore_numbers(self) -> None:
        """Restore the numbers of state and groups; a step that is run again changes them again."""
        for holder, numbers in self._numbers:
            holder.update(numbers)

    def _changes(self) -> Iterator[tuple[Tensor, int]]:
        tensors = [*self.layout.all_tensors, *self._gradients]
        if self._counter is not None:
            yield from ((tensor, self._counter.changes(tensor)) for tensor in tensors)
            return
        for tensor, version in zip(tensors, [*self._versions, *self._gradient_versions], strict=True):
            yield tensor, tensor._version - version


def _numbers_in(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in holder.items() if isinstance(value, int | float)}


class _WriteCounter(EagerDispatchMode):
    """Counts the changes of tensors; those of a view with those of the whole.

    `changes` says how often each tensor was changed already, by the id of one that lives longer than this.
    """

    def __init__(self, changes: dict[int, int]) -> None:
        super().__init__()
        self._changes = changes

    def changes(self, tensor: Tensor) -> int:
        """How often a tensor was changed."""
        return self._changes[id(tensor)]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        changes = self._changes
        for tensor in written_tensors(func, args, kwargs or {}):
            key = id(tensor) if id(tensor) in changes else id(tensor._base)
            if key in changes:
                changes[key] += 1
        return result


def state_tensors(optimizer: Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """The tensors in the state of a parameter."""
    return list(filter(is_tensor, optimizer.state.get(parameter, {}).values()))


def _takes_lists(group: Mapping[str, Any]) -> bool:
    """Whether a group of parameters is updated by ops on lists of tensors; on CUDA that is torch's default."""
    on_cuda = any(parameter.is_cuda for parameter in group["params"][:1])
    return bool(group.get("fused") or group.get("foreach") or (group.get("foreach") is None and on_cuda))


def place_of(tensor: Tensor) -> Place:
    """Address and number of a tensor's bytes."""
    return tensor.data_ptr(), tensor.nbytes


def is_tensor(value: Any) -> bool:
    """Whether a leaf is a tensor."""
    return isinstance(value, Tensor)
