"""Snapshots of state that a forward pass changes, such as BatchNorm's running statistics, before a step.

The state is buffers, frozen parameters (a momentum teacher's) and what modules hold as attributes.

Private torch API used here: `_NormBase`, the class of all layers with running statistics, `Module._buffers`,
`Module._parameters` and `Module._modules` (checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from brimful.errors import PartialUpdateError
from brimful.execution.random_state import copied_to_host
from brimful.torch_utils.held_values import HeldSnapshot, have_same_values, is_mostly_frozen

_WATCHED_STEPS = 2
"""Steps in which everything is copied, to find what changes."""
_Place = tuple[nn.Module, str]
"""The module that a buffer is directly in, and its name there."""


class BufferSnapshot:
    """Keeps what a step's forward passes may change, until the step has succeeded.

    Only what is known to change is copied. In the first two steps that is everything, except frozen parameters
    if they take more memory than the others: a write through `.data` has no new version and shows by values,
    and a moving average may have the values of what it follows in the first step. `buffers_only` omits frozen
    parameters and attributes.
    """

    def __init__(self, model: nn.Module, *, buffers_only: bool = False) -> None:
        self._model = model
        self._watches_frozen = not buffers_only and is_mostly_frozen(model)
        """Whether frozen parameters are watched, as they are not copied in the first step."""
        self._watches_held = not buffers_only
        self._held: HeldSnapshot | None = None
        self._changing_held: set[str] = set()
        """Attributes and frozen parameters that forwards were seen to change."""
        self._changing: set[_Place] = set()
        self._steps_to_watch = _WATCHED_STEPS
        self._modules: Sequence[nn.Module] = ()
        """Modules that existed before the step; none between steps."""
        self._kept: list[_Kept] = []

    def take(self, modules: Sequence[nn.Module] | None = None) -> None:
        """Copy the buffers; `modules` are all modules of the model, None if they are not known."""
        modules = modules_of(self._model) if modules is None else modules
        kept = [
            _Kept(
                place=place,
                buffer=buffer,
                version=0 if buffer is None else buffer._version,
                values=None if buffer is None else self._copy(place, buffer),
            )
            for place, buffer in self._state(modules)
        ]
        held = None
        if self._watches_held and self._steps_to_watch:
            held = HeldSnapshot(self._model, "cpu")
        elif self._changing_held:
            held = HeldSnapshot(self._model, only=self._changing_held)
        self._modules, self._kept, self._held = modules, kept, held  # all or, where a copy fails, none

    def end_of_forward(self) -> None:
        """After the last forward pass, and before the update: learn by their values which buffers change.

        It runs ops, which may raise; so it comes where the step can be undone.
        """
        if self._steps_to_watch and self._modules:
            self._changing |= {kept.place for kept in self._kept if kept.differs()}
            if self._held is not None:
                self._changing_held |= self._held.changed(by_values=True)

    def release(self) -> None:
        """After a step that succeeded: learn by their versions which buffers change, and drop the copies."""
        if self._steps_to_watch and self._modules:
            # BatchNorm's kernel writes its statistics without a new version (torch 2.13).
            self._changing |= {place for place, _ in _buffers(self._modules) if isinstance(place[0], _NormBase)}
            self._steps_to_watch -= 1
        self._changing |= {kept.place for kept in self._kept if kept.has_changed()}
        if self._held is not None:
            self._changing_held |= self._held.changed()
        self._modules, self._kept, self._held = (), [], None

    def restore(self) -> None:
        """After a step that failed: restore the values that were copied, if there are any.

        Raises `PartialUpdateError` if a buffer changed that never did before, and has no copy.
        """
        made = {place for place, _ in self._state(self._modules)} - {kept.place for kept in self._kept}
        lost = [kept.place for kept in self._kept if kept.values is None and kept.is_written()]
        for module, name in made:
            delattr(module, name)
        for kept in self._kept:
            module, name = kept.place
            if kept.buffer is not None and kept.values is not None and (kept.is_written() or kept.differs()):
                with torch.no_grad():
                    kept.buffer.copy_(kept.values)
            if kept.values is not None or kept.has_changed():
                setattr(module, name, kept.buffer)
        of_held: list[str] = []
        if self._held is not None:
            of_held = self._held.lost()
            with torch.no_grad():
                self._held.restore()
        self._modules, self._kept, self._held = (), [], None
        for name in (*(f"{name!r} of {type(module).__name__}" for module, name in lost), *map(repr, of_held)):
            raise PartialUpdateError(
                f"the buffer, tensor or frozen parameter {name} changed for the first time in a step that has "
                "to be undone, and has no copy. Resume from the last checkpoint."
            )

    def _copy(self, place: _Place, buffer: Tensor) -> Tensor | None:
        if self._steps_to_watch and not isinstance(buffer, nn.Parameter):
            return copied_to_host(buffer)  # all buffers, twice: no plan counts that on a GPU
        return buffer.detach().clone() if place in self._changing else None

    def _state(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Tensor | None]]:
        yield from _buffers(modules)
        for module in modules if self._watches_frozen else ():
            for name, parameter in module._parameters.items():
                if parameter is not None and not parameter.requires_grad:
                    yield (module, name), parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    place: _Place
    buffer: Tensor | None
    version: int
    values: Tensor | None

    def has_changed(self) -> bool:
        """Whether the module has another buffer now, or the buffer has other values."""
        module, name = self.place
        of_module = module._buffers if name in module._buffers else module._parameters
        return of_module.get(name) is not self.buffer or self.is_written()

    def differs(self) -> bool:
        """Whether the buffer has other values than the copy, if there is one."""
        return (
            self.buffer is not None
            and self.values is not None
            and not have_same_values(self.buffer, self.values)
        )

    def is_written(self) -> bool:
        """Whether the buffer has been written to."""
        return self.buffer is not None and self.buffer._version != self.version


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules in a model, in any order; `Module.modules`, which keeps the order, takes 3 times as long."""
    found: dict[int, nn.Module] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) not in found:
            found[id(module)] = module
            pending += [child for child in module._modules.values() if child is not None]
    return list(found.values())


def _buffers(modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Tensor | None]]:
    """Every buffer and its place. (Names from the root would take as long again, and are not needed.)"""
    for module in modules:
        for name, buffer in module._buffers.items():
            yield (module, name), buffer
