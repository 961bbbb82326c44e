"""Random numbers that belong to samples: a part of a batch draws what the whole batch draws for its samples.

A loss that draws (a diffusion model's noise, augmentation, a sampled latent) gives another value each time, so
the loss of a batch cannot be compared with those of its parts. With `AlignedDraws` it can: the i-th op that
draws runs for the whole batch, from a seed of its own, and a part takes its rows of the result.

An op whose result does not have a number of rows for each sample, such as a permutation or one number for all,
draws the same in every part. The generators of Python and NumPy are not followed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brimful.execution.random_state import RandomState
from brimful.torch_utils.dispatch_mode import EagerDispatchMode

aten = torch.ops.aten

_OF_SIZES = frozenset({aten.rand, aten.randn, aten.randint})
"""Ops that draw a tensor of a size, which is the only list among their arguments."""


class AlignedDraws(EagerDispatchMode):
    """Dispatch mode in which ops draw the same random numbers for `samples` samples as in the whole batch.

    Args:
        begin: Index in the batch of the first sample of this part.
        samples: Samples in this part.
        whole: Samples in the batch.
        dim: The batch dimension of drawn tensors, if its size is that of the samples; else it is the first.
    """

    def __init__(self, *, begin: int, samples: int, whole: int, dim: int = 0) -> None:
        super().__init__()
        self._begin, self._samples, self._whole, self._dim = begin, samples, whole, dim
        self.drawn = 0
        """Number of ops that have drawn random numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op; one that draws, for the whole batch."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.drawn += 1
        if "generator" in kwargs:
            kwargs["generator"] = None
        torch.manual_seed(self.drawn)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._rows_of(func, args)
        if found is None:
            return func(*args, **kwargs)
        rows, dim = found
        begin, every = (count * (rows // self._samples) for count in (self._begin, self._whole))

        def of_whole(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] != rows:
                return value
            own_in_place = (torch.arange(every, device=value.device) - begin) % rows
            return value.index_select(dim, own_in_place)

        def own_rows(drawn: Any) -> Any:  # fused attention also returns its seed, which has no rows
            if not isinstance(drawn, Tensor) or drawn.ndim <= dim or drawn.shape[dim] != every:
                return drawn
            return drawn.narrow(dim, begin, rows).clone()

        if func.overloadpacket in _OF_SIZES:
            sized = [
                [*value[:dim], every, *value[dim + 1 :]] if isinstance(value, list | tuple) else value
                for value in args
            ]
            return own_rows(func(*sized, **kwargs))
        drawn = func(*map(of_whole, args), **{name: of_whole(value) for name, value in kwargs.items()})
        if func._schema.is_mutable:
            return args[0].copy_(own_rows(drawn))
        return tuple(map(own_rows, drawn)) if isinstance(drawn, tuple) else own_rows(drawn)

    def _rows_of(self, func: Any, args: tuple[Any, ...]) -> tuple[int, int] | None:
        """Number of drawn rows and their dimension, if the number is a multiple of the samples; else None."""
        if func.overloadpacket in _OF_SIZES:
            sizes = [value for value in args if isinstance(value, list | tuple)]
        else:
            sizes = [value.shape for value in args[:1] if isinstance(value, Tensor)]
        if not sizes or not sizes[0]:
            return None
        size = sizes[0]
        dim = self._dim if len(size) > self._dim and size[self._dim] == self._samples else 0
        return (int(size[dim]), dim) if size[dim] and size[dim] % self._samples == 0 else None


class DrawWatch(EagerDispatchMode):
    """Dispatch mode that notices whether anything draws random numbers, from whichever generator.

    The generator of `device` counts beside those of the host.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._before = RandomState.now(device).to_save()
        self._has_own_generator = False

    @property
    def has_drawn(self) -> bool:
        """Whether torch, Python or NumPy has drawn since this was made, or an op was given a generator."""
        return self._has_own_generator or not _are_same(self._before, RandomState.now(self._device).to_save())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._has_own_generator = self._has_own_generator or kwargs.get("generator") is not None
        return func(*args, **kwargs)


def _are_same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return torch.equal(before, after)
    if isinstance(before, dict):
        return all(_are_same(value, after[name]) for name, value in before.items())
    return bool(before == after)
