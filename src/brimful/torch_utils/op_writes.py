"""What ops write to, from their schemas; and which of some tensors were written to, by the ops that ran.

Private torch APIs used here: `OpOverload._schema`, `UntypedStorage._cdata` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from brimful.torch_utils.dispatch_mode import EagerDispatchMode
from brimful.torch_utils.wrapper_tensors import calls_ops_on_parts

aten = torch.ops.aten

_WRITE_UNSAID: dict[Any, tuple[int, ...]] = {aten.native_batch_norm.default: (3, 4)}
"""Positions of arguments that an op writes to, its running statistics, though its schema does not say so."""
_TRAINS = 5
"""Position of `training` in `native_batch_norm`: in evaluation mode it writes nothing."""


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


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    positions, names = _writes(func)
    if func in _WRITE_UNSAID and not args[_TRAINS]:
        return
    for written in (*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names)):
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, Tensor):
                yield tensor


def has_writes(func: Any) -> bool:
    """Whether an op writes to any of its arguments."""
    return any(_writes(func))


@cache
def _writes(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the arguments that an op writes to."""
    if func in _WRITE_UNSAID:
        return _WRITE_UNSAID[func], ()
    written = [
        (position, argument)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(position for position, _ in written), tuple(argument.name for _, argument in written)
