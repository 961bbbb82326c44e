"""Buffers that a forward pass changes, such as BatchNorm's running statistics, as they were before a step.

Private torch API used here: `_NormBase`, the class of all layers with running statistics (checked: 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from brimful.errors import HalfUpdatedError


class BufferSnapshot:
    """Keeps what a step's forward passes may change, until it is known that the step is good.

    Only what is known to change is copied; in the first step that is everything.

    Args:
        model: Its buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changing: set[str] | None = None
        self._kept: dict[str, _Kept] = {}

    def take(self) -> None:
        """Copy the buffers."""
        self._kept = {
            name: _Kept(buffer=buffer, version=buffer._version, values=self._copy(name, buffer))
            for name, buffer in self._model.named_buffers()
        }

    def release(self) -> None:
        """The step is good: learn which buffers change, and drop the copies."""
        now = dict(self._model.named_buffers())
        changed = {name for name, kept in self._kept.items() if kept.has_changed(now.get(name))}
        if self._changing is None:
            # BatchNorm's kernel writes its statistics without a new version (torch 2.13).
            self._changing = set(_running_statistics(self._model))
        self._changing |= changed
        self._kept = {}

    def restore(self) -> None:
        """The step is not good: give the buffers back the values that were copied.

        Raises:
            HalfUpdatedError: One changed that never did before, and has no copy.
        """
        now = dict(self._model.named_buffers())
        for name, kept in self._kept.items():
            if kept.values is None and kept.has_changed(now.get(name)):
                self._kept = {}
                raise HalfUpdatedError(
                    f"the buffer {name!r} changed for the first time in a step that is to be taken back, and "
                    "has no copy. Resume from the last save."
                )
            if kept.values is not None:
                with torch.no_grad():
                    kept.buffer.copy_(kept.values)
                path, _, leaf = name.rpartition(".")
                setattr(self._model.get_submodule(path), leaf, kept.buffer)
        self._kept = {}

    def _copy(self, name: str, buffer: Tensor) -> Tensor | None:
        return buffer.detach().clone() if self._changing is None or name in self._changing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    buffer: Tensor
    version: int
    values: Tensor | None

    def has_changed(self, buffer: Tensor | None) -> bool:
        return buffer is not self.buffer or buffer._version != self.version


def _running_statistics(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        if isinstance(module, _NormBase):
            yield from (
                f"{path}.{name}" if path else name for name, _buffer in module.named_buffers(recurse=False)
            )
