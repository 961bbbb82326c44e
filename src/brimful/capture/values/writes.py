"""The arguments that an op writes to, from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_WRITE_UNSAID: dict[Any, tuple[int, ...]] = {aten.native_batch_norm.default: (3, 4)}
"""Positions of arguments that an op writes to, its running statistics, though its schema does not say so."""


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    positions, names = _writes(func)
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
