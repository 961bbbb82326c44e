"""Ops whose results have a shape that depends on values: `x[mask]`, `nonzero`, `unique`, packed sequences.

Fake tensors cannot run them. Where the values are known (see `brimful.capture.values`), so is the shape. Where
they are not, a result is as large as it can be, or as small where that is asked.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._pytree` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from brimful.capture.values.known import LARGEST_KNOWN_NUMEL, KnownValues, NotKnownError
from brimful.trace import Guess

aten = torch.ops.aten

SHAPED_BY_VALUES = frozenset({aten._pack_padded_sequence.default})
"""Ops whose results have a shape that depends on values, and that torch has not tagged so."""

_UNIQUES = frozenset(
    {
        aten._unique.default,
        aten._unique2.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.unique_dim_consecutive.default,
    }
)


def run_with_known_shape(known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output shape depends on known values; returns fake tensors of the shapes they lead to.

    Raises `NotKnownError` if the values that decide are not known.
    """
    if func in _RUNS:
        return _RUNS[func](known, *args, **kwargs)
    like = next((tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor)), None)
    return tree_map_only(Tensor, partial(known.to_fake, like=like), known.compute(func, args, kwargs))


def run_with_largest_shape(known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op whose output shape depends on unknown values as if it were the largest there can be.

    A mask is true everywhere, and counts as such from then on, which `known` keeps; elements differ; sequences
    have their full length; what is to be repeated an unknown number of times is repeated once, as an unknown
    number reads as 1. Under `Guess.LEAST` a mask is true nowhere, elements are equal, sequences have the length
    1, and nothing is repeated.

    Raises `NotKnownError` if nothing says how large the results can be.
    """
    if func in _UNIQUES:
        return _all_different(known, func, args, kwargs)
    if func not in _ASSUMED:
        raise NotKnownError
    position, values_for = _ASSUMED[func]

    def assumed(tensor: Any) -> Any:
        with suppress(NotKnownError):
            return known.of(tensor)
        with unset_fake_temporarily():
            values: Tensor = _least(func, tensor) if known.guess is Guess.LEAST else values_for(tensor, args)
        if tensor.dtype is torch.bool:
            known.remember(tensor, values)
        return values

    decides = args[position]
    if func is aten.index.Tensor:
        instead: Any = [assumed(index) if index is not None and _is_mask(index) else index for index in decides]
    else:
        instead = assumed(decides)
    return run_with_known_shape(known, func, (*args[:position], instead, *args[position + 1 :]), kwargs)


def _index(known: KnownValues, tensor: Tensor, indices: Iterable[Tensor | None]) -> Any:
    """Index a tensor, each boolean index given by the positions at which it is true."""
    plain: list[Tensor | None] = []
    for index in indices:
        plain += _positions(known, index) if index is not None and _is_mask(index) else [index]
    return aten.index.Tensor(tensor, plain)


def _nonzero(known: KnownValues, tensor: Tensor) -> Tensor:
    positions = _positions(known, tensor)
    table = torch.empty((positions[0].numel() if positions else 0, tensor.dim()), dtype=torch.int64)
    with suppress(NotKnownError):
        columns = [known.of(column) for column in positions]
        with unset_fake_temporarily():
            values = torch.stack(columns, 1)
        known.remember(table, values, like=tensor)
    return table


def _masked_select(known: KnownValues, tensor: Tensor, mask: Tensor) -> Tensor:
    values = known.of(mask)
    with unset_fake_temporarily():
        selected = int(values.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
    return tensor.new_empty(selected)


def _ctc_loss(
    known: KnownValues,
    log_probs: Tensor,
    _targets: Tensor,
    _lengths: Tensor,
    target_lengths: Tensor,
    *_others: Any,
) -> tuple[Tensor, Tensor]:
    """Losses (B,) and log alphas (B, T, 2 · longest target + 1) for log probabilities (T, B, classes).

    The CPU's kernel makes them so (torch 2.13).
    """
    with unset_fake_temporarily():
        longest = int(known.of(target_lengths).max())
    steps, samples, _classes = log_probs.shape
    return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * longest + 1)


def _pack(known: KnownValues, padded: Tensor, lengths: Tensor, _batch_first: bool) -> tuple[Tensor, Tensor]:
    """Rows of (B, T, ...), those of one time together, and how many there are at each time.

    The numbers of rows are a real tensor: recurrent layers read them, below any dispatch.
    """
    real = known.of(lengths)
    with unset_fake_temporarily():
        _, sizes = torch._VF._pack_padded_sequence(torch.empty(len(real), int(real.max()), 1), real, True)
        rows = int(sizes.sum())
    return padded.new_empty(rows, *padded.shape[2:]), sizes


def _all_different(
    known: KnownValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The elements, the place of each and how often it is there, if all of those searched differ."""
    tensor = args[0]
    if tensor.numel() > LARGEST_KNOWN_NUMEL:
        raise NotKnownError
    with unset_fake_temporarily():
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        if known.guess is Guess.LEAST:
            numbers = torch.zeros_like(numbers)
        if not tensor.is_floating_point():
            numbers = numbers.to(tensor.dtype)  # of a type of 8 bits no more than 256 differ
    elements, *about = known.compute(func, (numbers, *args[1:]), kwargs)
    return tensor.new_empty(elements.shape), *(known.to_fake(each) for each in about)


def _positions(known: KnownValues, tensor: Tensor) -> list[Tensor]:
    """Positions where a mask is not zero, one fake tensor for each dimension; known if they are few."""
    mask = known.of(tensor)
    with unset_fake_temporarily():
        if (
            not mask.is_contiguous() and 0 not in mask.stride()
        ):  # to read strided integers once, not three times
            mask = mask != 0
        count = int(mask.count_nonzero())
        is_few = count * mask.dim() <= LARGEST_KNOWN_NUMEL
        real = mask.nonzero(as_tuple=True) if is_few else ()
    if is_few:
        return [known.to_fake(positions, like=tensor) for positions in real]
    return [torch.empty(count, dtype=torch.int64) for _ in range(mask.dim())]


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _least(func: Any, tensor: Tensor) -> Tensor:
    """Values at which a result is smallest: sequences have a length of 1, else there is nothing."""
    is_length = func in (aten._ctc_loss.Tensor, aten._pack_padded_sequence.default)
    return torch.full((), int(is_length), dtype=tensor.dtype).expand(tensor.shape)


def _true_everywhere(tensor: Tensor, _args: tuple[Any, ...]) -> Tensor:
    return torch.ones((), dtype=torch.bool).expand(tensor.shape)


_RUNS: dict[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._pack_padded_sequence.default: _pack,
}
"""Ops of which some arguments need not be known."""

_ASSUMED: dict[Any, tuple[int, Callable[[Tensor, tuple[Any, ...]], Tensor]]] = {
    aten.index.Tensor: (1, _true_everywhere),
    aten.nonzero.default: (0, _true_everywhere),
    aten.masked_select.default: (1, _true_everywhere),
    aten.bincount.default: (0, lambda tensor, _args: torch.arange(tensor.numel())),
    aten.repeat_interleave.Tensor: (0, lambda tensor, _args: torch.ones(tensor.shape, dtype=tensor.dtype)),
    aten._ctc_loss.Tensor: (3, lambda lengths, args: torch.full(lengths.shape, args[1].shape[-1])),
    aten._pack_padded_sequence.default: (
        1,
        lambda lengths, args: torch.full(lengths.shape, args[0].shape[1 if args[2] else 0]),
    ),
}
"""Position of the argument that decides, and its values at which the result is largest."""
