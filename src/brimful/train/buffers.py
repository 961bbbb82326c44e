"""Buffers that a forward pass changes, such as BatchNorm's running statistics, as they were before a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class BufferSnapshot:
    """Keeps what a step's forward passes may change, until it is known that the step is good.

    Only what has been seen to change is copied; before the first step that is everything.

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
        changed = {name for name, kept in self._kept.items() if not kept.is_unchanged(now.get(name))}
        self._changing = changed | (self._changing or set())
        self._kept = {}

    def restore(self) -> None:
        """The step is not good: give the buffers back the values that were copied."""
        for name, kept in self._kept.items():
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

    def is_unchanged(self, buffer: Tensor | None) -> bool:
        return buffer is self.buffer and buffer._version == self.version
