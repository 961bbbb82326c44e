"""Values of integer tensors, for the Python code that reads them.

A model may ask whether its attention mask is all ones, a loss which labels count, and run other ops for another
answer. Fake tensors have no values. So the integers and booleans of the real batch and of buffers are kept
beside their fakes, and what is computed from them alone is computed for real as well.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._pytree`,
`torch.utils._python_dispatch` (checked: torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

LARGEST_KNOWN_NUMEL = 2**20
"""Tensors with more elements are not followed. An id for each token of a batch is fewer, a mask for each pair
of tokens is more; so following an op takes a millisecond at most."""

_FOLLOWED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_FILLS: dict[Any, Callable[..., Any]] = {
    aten.zeros_like.default: lambda *_args, **_kwargs: 0,
    aten.ones_like.default: lambda *_args, **_kwargs: 1,
    aten.full_like.default: lambda _tensor, value, **_kwargs: value,
    aten.new_zeros.default: lambda *_args, **_kwargs: 0,
    aten.new_ones.default: lambda *_args, **_kwargs: 1,
    aten.new_full.default: lambda _tensor, _size, value, **_kwargs: value,
}
"""What fills the result of ops that look at no more than the shape of their argument."""

_UNDEFINED = frozenset({aten.empty.memory_format, aten.empty_strided.default})
"""Ops without tensor arguments whose result has no values yet."""


class NotKnownError(Exception):
    """The values asked for are not known."""


class KnownValues:
    """The values that some fake tensors stand for."""

    _ATTRIBUTE = "_brimful_known"

    def __init__(self) -> None:
        self._generation = 0

    def remember(self, fake: Tensor, real: Tensor) -> None:
        """Keep the values of `real`, which `fake` stands for, if they are few integers or booleans."""
        if isinstance(fake, FakeTensor) and _is_followed(real) and real.device.type != "meta":
            with _disable_current_modes():  # the recorder's too: the copy is none of the step's
                self._keep(fake, real.detach().to("cpu", copy=True))

    def carry_over(self, source: Tensor, copy: Tensor) -> None:
        """Keep for a copy the values of its source, if they are known."""
        with suppress(NotKnownError):
            self.remember(copy, self.of(source))

    def of(self, tensor: Tensor) -> Tensor:
        """The values of a tensor.

        Args:
            tensor: A fake one, or a real one, which has its own.

        Returns:
            A real tensor on the CPU.

        Raises:
            NotKnownError: They are not known.
        """
        if type(tensor) is not FakeTensor:
            return tensor
        generation, value = tensor.__dict__.get(self._ATTRIBUTE, (None, None))
        if value is None or generation != self._generation:
            raise NotKnownError
        assert isinstance(value, Tensor)
        return value

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an op returns for the values of its arguments.

        Args:
            func: The op.
            args: Its arguments, fake tensors among them.
            kwargs: Its keyword arguments.

        Returns:
            What it returns for real ones.

        Raises:
            NotKnownError: Those of one argument are not known.
        """
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keep the values of an op's outputs where those of its inputs are known.

        Args:
            func: The op; it draws no random numbers.
            args: Its arguments.
            kwargs: Its keyword arguments.
            inputs: The tensors among them.
            outputs: The tensors it returned.
        """
        if not outputs or func in _UNDEFINED or not all(map(_is_followed, outputs)):
            return
        try:
            if func in _FILLS:
                value = _FILLS[func](*args, **kwargs)
                with unset_fake_temporarily():
                    computed = torch.full(outputs[0].shape, value, dtype=outputs[0].dtype)
            else:
                for tensor in inputs:  # most ops end here, at their first input
                    self.of(tensor)
                computed = self.compute(func, args, kwargs)
        except NotKnownError:
            if func._schema.is_mutable:
                # Views of what was written to may be known. It is rare, so that all is forgotten.
                self._generation += 1
            return
        values = computed if isinstance(computed, (tuple, list)) else (computed,)
        for out, value in zip(outputs, values, strict=True):
            self._keep(out, value)

    def run_with_known_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose output shape depends on values.

        Args:
            func: An op that cannot be run on fake tensors for that reason.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            Fake tensors of the shapes that the known values lead to.

        Raises:
            NotKnownError: The values that decide are not known.
        """
        if func is aten.index.Tensor:
            tensor, indices = args
            return func(tensor, self._without_booleans(indices), **kwargs)
        if func is aten.masked_select.default:
            tensor, mask = args
            known = self.of(mask)
            with unset_fake_temporarily():
                selected = int(known.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
            return tensor.new_empty(selected)
        if func is aten._ctc_loss.Tensor:
            return self._ctc_loss(*args)
        return tree_map_only(Tensor, self._to_fake, self.compute(func, args, kwargs))

    def _ctc_loss(
        self, log_probs: Tensor, _targets: Tensor, _lengths: Tensor, target_lengths: Tensor, *_others: Any
    ) -> tuple[Tensor, Tensor]:
        """Losses (B,) and log alphas (B, T, 2 · longest target + 1) for log probabilities (T, B, classes).

        So the CPU's kernel makes them (torch 2.13).
        """
        with unset_fake_temporarily():
            longest = int(self.of(target_lengths).max())
        steps, samples, _classes = log_probs.shape
        return log_probs.new_empty(samples), log_probs.new_empty(samples, steps, 2 * longest + 1)

    def _without_booleans(self, indices: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Indices with each boolean one given by the positions at which it is true."""
        plain: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                known = self.of(index)
                with unset_fake_temporarily():
                    positions = known.nonzero(as_tuple=True)
                plain += [self._to_fake(position) for position in positions]
            else:
                plain.append(index)
        return plain

    def _to_fake(self, real: Tensor) -> Tensor:
        fake = torch.empty_like(real)  # fake, as the fake mode is in force
        self.remember(fake, real)
        return fake

    def _keep(self, fake: Tensor, value: Tensor) -> None:
        if type(fake) is FakeTensor:
            fake.__dict__[self._ATTRIBUTE] = (self._generation, value)


def _is_followed(tensor: Tensor) -> bool:
    return (
        tensor.dtype in _FOLLOWED
        and tensor.layout is torch.strided
        and math.prod(tensor.shape) <= LARGEST_KNOWN_NUMEL
    )
