"""Choices of models by unknown numbers: the experts of a token, the best classes, an order.

A router's scores are unknown, and so is which of n experts receives a token; but each row chooses k of n. So
the indices that such an op returns are assumed, and results computed from them have the sizes of a real step:
n experts together get rows × k, for any code that gathers their rows. `Guess` defines how rows choose.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from brimful.trace import Guess

aten = torch.ops.aten

_CHOOSE_SEVERAL = {aten.topk.default: (1, 2), aten.multinomial.default: (1, None)}
"""Positions of how many are chosen and of the dimension, None for the last."""
_CHOOSE_ONE = {
    aten.argmax.default: (1, 2),
    aten.argmin.default: (1, 2),
    aten.max.dim: (1, 2),
    aten.min.dim: (1, 2),
}
"""Positions of the dimension and of whether it is kept."""
_ORDER = {aten.sort.default: 1, aten.sort.stable: None}
"""Position of the dimension; None where it is given by name."""

CHOICES = frozenset({*_CHOOSE_SEVERAL, *_CHOOSE_ONE, *_ORDER})
"""Ops that choose."""


def chosen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], guess: Guess) -> Tensor | None:
    """The indices that an op is assumed to return as its last output; None if the op chooses nothing.

    The arguments have fake tensors among them; the indices are real. `guess` says how rows choose.
    """

    def argument(position: int | None, name: str, default: Any) -> Any:
        is_given = position is not None and len(args) > position
        return args[position] if is_given else kwargs.get(name, default)  # type: ignore[index]

    tensor = args[0] if args else None
    if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.numel() == 0:
        return None
    if func in _CHOOSE_SEVERAL:
        count, dim = _CHOOSE_SEVERAL[func]
        how_many = argument(count, "num_samples" if dim is None else "k", 1)
        return _choices(tensor.shape, how_many, argument(dim, "dim", -1), guess)
    if func in _CHOOSE_ONE:
        at_dim, at_keepdim = _CHOOSE_ONE[func]
        along, keeps = argument(at_dim, "dim", None), argument(at_keepdim, "keepdim", False)
        if along is None:  # one number of a whole tensor, which no rows choose
            return None
        one = _choices(tensor.shape, 1, along, guess)
        return one if keeps else one.squeeze(along)
    if func in _ORDER:
        along = argument(_ORDER[func], "dim", -1)
        return _choices(tensor.shape, tensor.shape[along], along, guess)
    return None


def _choices(shape: torch.Size, count: int, dim: int, guess: Guess) -> Tensor:
    """Indices into dimension `dim`, `count` of them in its place."""
    others = [size for index, size in enumerate(shape) if index != dim % len(shape)]
    rows = _rows(math.prod(others), count, shape[dim], guess)
    return rows.view(*others, count).movedim(-1, dim).contiguous()


def _rows(rows: int, count: int, options: int, guess: Guess) -> Tensor:
    """(rows, count): what each row chooses, each option once before any is repeated."""
    places = torch.arange(count) % options
    if guess is Guess.EXPECTED:  # in every place all options equally often: code may look at the first alone
        return (torch.arange(rows)[:, None] + places) % options
    same = places.repeat(rows, 1)
    if guess is Guess.LEAST:
        return same
    once = (torch.arange(math.ceil(options / count))[:, None] * count + places) % options
    return torch.cat([once, same])[:rows]
