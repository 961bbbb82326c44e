"""Writes of a forward to tensors that outlive it, found by the ops that write."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from brimful.torch_utils.dispatch_mode import EagerDispatchMode, has_writes, written_tensors
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts


class WrittenStorages(EagerDispatchMode):
    """A dispatch mode that notes which of some tensors are written to, through `.data` and views too.

    torch counts writes by a tensor's version, but not those through `.data`.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._places = {storage_of(tensor) for tensor in tensors} - {None}
        self._written: set[int | None] = set()

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor was written to."""
        return storage_of(tensor) in self._written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what an op writes to, and run it."""
        kwargs = kwargs or {}
        if any(map(calls_ops_on_parts, types)):
            return NotImplemented  # the ops on the parts come here again
        if has_writes(func):
            self._written |= self._places.intersection(map(storage_of, written_tensors(func, args, kwargs)))
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> int | None:
    """Address of the storage, which tensors that share memory have in common; None without an own storage."""
    is_plain = tensor.layout is torch.strided and not calls_ops_on_parts(type(tensor))
    return tensor.untyped_storage()._cdata if is_plain else None
