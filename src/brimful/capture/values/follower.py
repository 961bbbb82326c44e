"""Follows the values of tensors from op to op: an op whose inputs are known and few is computed for real too.

What a model chooses is assumed (see `brimful.capture.values.choices`), and what is computed from that and from
constants follows. Where it meets values of the batch or of buffers, nothing is known: whether a class that was
chosen is the true one, say.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._pytree` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from brimful.capture.values.choices import CHOICES, chosen
from brimful.capture.values.known import (
    CHOICE,
    DATA,
    LARGEST_CHOSEN_NUMEL,
    WHOLE,
    KnownValues,
    NotKnownError,
    is_followed,
    is_followed_if_assumed,
)
from brimful.torch_utils.op_writes import written_tensors

aten = torch.ops.aten

_FILLS: dict[Any, Callable[..., Any]] = {
    aten.zeros.default: lambda *_args, **_kwargs: 0,
    aten.ones.default: lambda *_args, **_kwargs: 1,
    aten.zeros_like.default: lambda *_args, **_kwargs: 0,
    aten.ones_like.default: lambda *_args, **_kwargs: 1,
    aten.full_like.default: lambda _tensor, value, **_kwargs: value,
    aten.new_zeros.default: lambda *_args, **_kwargs: 0,
    aten.new_ones.default: lambda *_args, **_kwargs: 1,
    aten.new_full.default: lambda _tensor, _size, value, **_kwargs: value,
}
"""The number that fills the result of ops that look at no more than the shape of their argument."""

_UNDEFINED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_strided.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Ops whose result has no values yet. Integers are taken for zeros, which known ones may be written over."""

_DRAWS = frozenset({aten.rand.default, aten.uniform_.default})
"""Ops that draw numbers evenly between two bounds, 0 and 1 if they are not given."""

_ASK_WHETHER_FINITE = frozenset({aten.isnan.default, aten.isinf.default})
_COMPARE = frozenset(
    {
        getattr(getattr(aten, name), kind)
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
        for kind in ("Scalar", "Tensor")
    }
)
"""Ops that ask something of a loss or a norm, whose numbers are not known. They are taken for 1: finite, and
neither large nor small, so that a step's checks find nothing wrong. More than one number is not compared so: a
mask that comes of it would decide sizes."""

_LOOK_AT_STRIDES = frozenset(
    {
        aten.as_strided.default,
        aten.as_strided_.default,
        aten.as_strided_copy.default,
        aten.as_strided_scatter.default,
    }
)
"""Ops whose result depends on how their first argument lies in memory; its values may lie otherwise."""


class ValueFollower:
    """Keeps the values of what ops return in `known`."""

    def __init__(self, known: KnownValues) -> None:
        self._known = known

    def follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        """Keep the values of an op's outputs where those of its inputs are known, or it chooses.

        The op draws no random numbers. `inputs` are the tensors among its arguments, and `outputs` those that
        it returned.
        """
        try:
            computed, source = self._computed(func, args, kwargs, inputs, outputs)
        except NotKnownError:
            self._known.forget_written(func, args, kwargs)
            self._assume(func, args, kwargs, outputs)
            return
        values = computed if isinstance(computed, (tuple, list)) else (computed,)
        for out, value in zip(outputs, values, strict=True):
            self._known.keep(out, value, source)

    def _assume(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> None:
        """Keep an assumption of what an op chooses, if it is among `CHOICES`."""
        if func not in CHOICES or not is_followed_if_assumed(outputs[-1], LARGEST_CHOSEN_NUMEL):
            return
        with unset_fake_temporarily():
            indices = chosen(func, args, kwargs, self._known.guess)
        if indices is not None:
            self._known.has_choices = True
            self._known.keep(outputs[-1], indices, CHOICE)

    def follow_draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> bool:
        """Take a single number drawn at random for its mean, so that Python code can compare it.

        Layers that are skipped at random are decided so: what is likelier than not happens. Returns whether the
        op drew one such number.
        """
        self._known.forget_written(func, args, kwargs)
        self._assume(func, args, kwargs, outputs)
        if func not in _DRAWS or outputs[0].shape not in ((), (1,)):
            return False
        low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :]) if func is aten.uniform_.default else (0.0, 1.0)
        with unset_fake_temporarily():
            self._known.keep(outputs[0], torch.full(outputs[0].shape, (low + high) / 2), DATA)
        return True

    def _computed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> tuple[Any, int]:
        """The result of an op on real values, and where these are from."""
        are_few = all(map(is_followed, outputs))
        if not outputs or not (
            are_few or (self._known.has_choices and all(map(is_followed_if_assumed, outputs)))
        ):
            raise NotKnownError
        if func in _FILLS:
            return _filled(outputs[0], _FILLS[func](*args, **kwargs)), 0
        if func in _UNDEFINED:
            if outputs[0].dtype not in WHOLE:
                raise NotKnownError
            return _filled(outputs[0], 0), 0
        if func in _ASK_WHETHER_FINITE or (func in _COMPARE and outputs[0].numel() == 1):
            return self._answered(func, args, kwargs), CHOICE if self._known.are_assumed(inputs) else DATA
        source = 0
        for tensor in inputs:  # most ops end here, at their first input
            self._known.of(tensor)
            source |= self._known.source_of(tensor)
        if source == DATA | CHOICE or not (are_few or source & CHOICE):
            raise NotKnownError
        if func in _LOOK_AT_STRIDES and self._known.of(inputs[0]).stride() != inputs[0].stride():
            raise NotKnownError
        for tensor in written_tensors(func, args, kwargs):
            self._known.make_writable(tensor)
        try:
            return self._known.compute(func, args, kwargs), source
        except (RuntimeError, ValueError, IndexError) as error:  # the CPU lacks some kernels that a GPU has
            raise NotKnownError from error

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A condition, where floating-point numbers that are not known are taken for 1."""

        def value(tensor: Tensor) -> Tensor:
            with suppress(NotKnownError):
                return self._known.of(tensor)
            if not tensor.is_floating_point():
                raise NotKnownError
            self._known.has_assumed = True
            return _filled(tensor, 1)

        args, kwargs = tree_map_only(Tensor, value, (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)


def _filled(tensor: Tensor, value: Any) -> Tensor:
    """A real tensor that holds one number once, however many it stands for."""
    with unset_fake_temporarily():
        return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
