"""Buffers that a forward pass changes, such as BatchNorm's running statistics, as they were before a step.

Private torch API used here: `_NormBase`, the class of all layers with running statistics, and `Module._buffers`
(checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from brimful.errors import HalfUpdatedError

_Place = tuple[nn.Module, str]
"""The module that a buffer is directly in, and its name there."""


class BufferSnapshot:
    """Keeps what a step's forward passes may change, until it is known that the step is good.

    Only what is known to change is copied; in the first step that is everything.

    Args:
        model: Its buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changing: set[_Place] | None = None
        self._kept: list[_Kept] = []

    def take(self) -> None:
        """Copy the buffers."""
        self._kept = [
            _Kept(place=place, buffer=buffer, version=buffer._version, values=self._copy(place, buffer))
            for place, buffer in _buffers(self._model)
        ]

    def release(self) -> None:
        """The step is good: learn which buffers change, and drop the copies."""
        if self._changing is None:
            # BatchNorm's kernel writes its statistics without a new version (torch 2.13).
            self._changing = {place for place, _ in _buffers(self._model) if isinstance(place[0], _NormBase)}
        self._changing |= {kept.place for kept in self._kept if kept.has_changed()}
        self._kept = []

    def restore(self) -> None:
        """The step is not good: give the buffers back the values that were copied.

        Raises:
            HalfUpdatedError: One changed that never did before, and has no copy.
        """
        all_kept, self._kept = self._kept, []
        for kept in all_kept:
            module, name = kept.place
            if kept.values is None and kept.has_changed():
                raise HalfUpdatedError(
                    f"the buffer {name!r} of {type(module).__name__} changed for the first time in a step that "
                    "is to be taken back, and has no copy. Resume from the last save."
                )
            if kept.values is not None:
                with torch.no_grad():
                    kept.buffer.copy_(kept.values)
                setattr(module, name, kept.buffer)

    def _copy(self, place: _Place, buffer: Tensor) -> Tensor | None:
        return buffer.detach().clone() if self._changing is None or place in self._changing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    place: _Place
    buffer: Tensor
    version: int
    values: Tensor | None

    def has_changed(self) -> bool:
        module, name = self.place
        return module._buffers.get(name) is not self.buffer or self.buffer._version != self.version


def _buffers(model: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    """Every buffer and where it is. (Names from the root would take as long again, and are not needed.)"""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer
