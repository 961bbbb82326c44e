"""Values of tensors, for the Python code that reads them.

A model may ask whether its attention mask is all ones, a loss which labels count, and run other ops for another
answer. Fake tensors have no values. So what is small of the real batch and of buffers is kept beside the fakes,
and what is computed from it alone is computed for real as well.

What a model chooses is assumed (see `brimful.capture.choices`), and what is computed from that and from
constants follows. Where it meets values of the batch or of buffers, nothing is known: whether a class that was
chosen is the true one, say.

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._pytree`,
`torch.utils._python_dispatch` (checked: torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from brimful.capture.choices import CHOICES, chosen
from brimful.trace import Guess

aten = torch.ops.aten

LARGEST_KNOWN_NUMEL = 2**20
"""Tensors of more integers or booleans are not followed. An id for each token of a batch is fewer, a mask for
each pair of tokens is more; so following an op takes a millisecond at most."""
LARGEST_ASSUMED_NUMEL = 2**24
"""The same for what is computed from assumed choices: of each token for each of many experts."""
LARGEST_KNOWN_FLOATS = 2**16
"""The same for other numbers, which most ops have to do with: a mask that is added for each token is fewer,
most activations are more."""

_DATA, _CHOICE = 1, 2
"""Where values are from: the batch, buffers and other tensors; or an assumed choice. 0 is a constant."""

_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

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
"""What fills the result of ops that look at no more than the shape of their argument."""

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

_WRITE_UNSAID: dict[Any, tuple[int, ...]] = {aten.native_batch_norm.default: (3, 4)}
"""Positions of arguments that an op writes to, its running statistics, though its schema does not say so."""


class NotKnownError(Exception):
    """The values asked for are not known."""


class KnownValues:
    """The values that some fake tensors stand for.

    They are kept on the tensor, with how often its storage had been written to by then in unknown ways, and
    where they are from.

    Args:
        guess: What is assumed of choices.
    """

    has_assumed = False
    """Whether a condition was answered as if numbers that are not known were 1."""
    has_choices = False
    """Whether any choice was assumed."""

    _ATTRIBUTE = "_brimful_known"
    _WRITES = "_brimful_unknown_writes"

    def __init__(self, guess: Guess = Guess.EXPECTED) -> None:
        self.guess = guess

    def remember(self, fake: Tensor, real: Tensor, *, like: Tensor | None = None) -> None:
        """Keep the values of `real`, which `fake` stands for, if they are few.

        Args:
            fake: Stands for `real`.
            real: Of the batch, or computed.
            like: A tensor with values from where these are from; None for the batch, buffers and others.
        """
        source = _DATA if like is None else self._source(like)
        is_few = is_followed(real) or (source & _CHOICE and is_followed_if_assumed(real))
        if isinstance(fake, FakeTensor) and is_few and real.device.type != "meta":
            with _disable_current_modes():  # the recorder's too: the copy is none of the step's
                self._keep(fake, real.detach().to("cpu", copy=True), source)

    def carry_over(self, source: Tensor, copy: Tensor) -> None:
        """Keep for a copy the values of its source, if they are known."""
        with suppress(NotKnownError):
            self.remember(copy, self.of(source), like=source)

    def are_assumed(self, *nests: Any) -> bool:
        """Whether any tensor among arguments has values computed from an assumed choice."""
        return self.has_choices and any(
            self._source(tensor) & _CHOICE for tensor in tree_leaves(nests) if isinstance(tensor, Tensor)
        )

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
        known = tensor.__dict__.get(self._ATTRIBUTE)
        if known is None or known[0] != self._unknown_writes(tensor):
            raise NotKnownError
        value = known[1]
        assert isinstance(value, Tensor)
        return value

    def number_of(self, tensor: Tensor) -> float | bool:
        """The one number of a tensor.

        Args:
            tensor: A fake or a real one, of one element.

        Returns:
            What `item` would.

        Raises:
            NotKnownError: It is not known.
        """
        value = self.of(tensor)
        with torch._C._DisableTorchDispatch():  # no mode need look at it
            return value.item()

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
        """Keep the values of an op's outputs where those of its inputs are known, or it chooses.

        Args:
            func: The op; it draws no random numbers.
            args: Its arguments.
            kwargs: Its keyword arguments.
            inputs: The tensors among them.
            outputs: The tensors it returned.
        """
        try:
            computed, source = self._computed(func, args, kwargs, inputs, outputs)
        except NotKnownError:
            self.forget_written(func, args, kwargs)
            self._assume(func, args, kwargs, outputs)
            return
        values = computed if isinstance(computed, (tuple, list)) else (computed,)
        for out, value in zip(outputs, values, strict=True):
            self._keep(out, value, source)

    def _assume(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> None:
        """Suppose what an op chooses, if that is what it does."""
        if func not in CHOICES or not is_followed_if_assumed(outputs[-1]):
            return
        with unset_fake_temporarily():
            indices = chosen(func, args, kwargs, self.guess)
        if indices is not None:
            self.has_choices = True
            self._keep(outputs[-1], indices, _CHOICE)

    def follow_draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]
    ) -> bool:
        """Take a single number drawn at random for its mean, so that Python code can compare it.

        Layers that are skipped at random are decided so: what is likelier than not happens.

        Args:
            func: An op that draws.
            args: Its arguments.
            kwargs: Its keyword arguments.
            outputs: The tensors it returned.

        Returns:
            Whether it drew one such number.
        """
        self.forget_written(func, args, kwargs)
        self._assume(func, args, kwargs, outputs)
        if func not in _DRAWS or outputs[0].shape not in ((), (1,)):
            return False
        low, high = (*args[1:], *(0.0, 1.0)[len(args) - 1 :]) if func is aten.uniform_.default else (0.0, 1.0)
        with unset_fake_temporarily():
            self._keep(outputs[0], torch.full(outputs[0].shape, (low + high) / 2), _DATA)
        return True

    def forget_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold nothing for known of what an op writes to, through any view of it."""
        for tensor in _written(func, args, kwargs):
            self._forget(tensor)

    def to_fake(self, real: Tensor, *, like: Tensor | None = None) -> Tensor:
        """A fake tensor that stands for a real one; what is small of that is known.

        Args:
            real: Computed from others.
            like: One of those.

        Returns:
            A tensor of the same shape and type.
        """
        fake = torch.empty_like(real)  # fake, as the fake mode is in force
        self.remember(fake, real, like=like)
        return fake

    def _computed(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> tuple[Any, int]:
        """What an op returns, and where the values of that are from."""
        are_few = all(map(is_followed, outputs))
        if not outputs or not (are_few or (self.has_choices and all(map(is_followed_if_assumed, outputs)))):
            raise NotKnownError
        if func in _FILLS:
            return _filled(outputs[0], _FILLS[func](*args, **kwargs)), 0
        if func in _UNDEFINED:
            if outputs[0].dtype not in _WHOLE:
                raise NotKnownError
            return _filled(outputs[0], 0), 0
        if func in _ASK_WHETHER_FINITE or (func in _COMPARE and outputs[0].numel() == 1):
            return self._answered(func, args, kwargs), _CHOICE if self.are_assumed(inputs) else _DATA
        source = 0
        for tensor in inputs:  # most ops end here, at their first input
            self.of(tensor)
            source |= self._source(tensor)
        if source == _DATA | _CHOICE or not (are_few or source & _CHOICE):
            raise NotKnownError
        if func in _LOOK_AT_STRIDES and self.of(inputs[0]).stride() != inputs[0].stride():
            raise NotKnownError
        for tensor in _written(func, args, kwargs):
            self._make_writable(tensor)
        try:
            return self.compute(func, args, kwargs), source
        except (RuntimeError, ValueError, IndexError) as error:  # the CPU lacks some kernels that a GPU has
            raise NotKnownError from error

    def _answered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A condition, where floating-point numbers that are not known are taken for 1."""

        def value(tensor: Tensor) -> Tensor:
            with suppress(NotKnownError):
                return self.of(tensor)
            if not tensor.is_floating_point():
                raise NotKnownError
            self.has_assumed = True
            return _filled(tensor, 1)

        args, kwargs = tree_map_only(Tensor, value, (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def _make_writable(self, tensor: Tensor) -> None:
        """Give a tensor that is filled with one number, which is kept once, numbers of its own."""
        value = self.of(tensor)
        if type(tensor) is FakeTensor and 0 in value.stride():
            source = self._source(tensor)
            self._forget(tensor)  # views of it were known by the one number
            with unset_fake_temporarily():
                self._keep(tensor, value.clone(memory_format=torch.contiguous_format), source)

    def _forget(self, tensor: Tensor) -> None:
        if type(tensor) is FakeTensor and tensor.layout is torch.strided:
            setattr(tensor.untyped_storage(), self._WRITES, self._unknown_writes(tensor) + 1)

    def _unknown_writes(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0
        writes: int = getattr(tensor.untyped_storage(), self._WRITES, 0)
        return writes

    def _source(self, tensor: Tensor) -> int:
        """Where the values of a tensor are from; of one whose values are not known, nowhere."""
        if type(tensor) is not FakeTensor:
            return _DATA
        known = tensor.__dict__.get(self._ATTRIBUTE)
        return 0 if known is None else int(known[2])

    def _keep(self, fake: Tensor, value: Tensor, source: int) -> None:
        if type(fake) is FakeTensor:
            fake.__dict__[self._ATTRIBUTE] = (self._unknown_writes(fake), value, source)


def _filled(tensor: Tensor, value: Any) -> Tensor:
    """A real tensor that holds one number once, however many it stands for."""
    with unset_fake_temporarily():
        return torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes to."""
    positions, names = _writes(func)
    for written in (*(args[i] for i in positions if i < len(args)), *map(kwargs.get, names)):
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(tensor, Tensor):
                yield tensor


def is_followed(tensor: Tensor) -> bool:
    """Whether a tensor holds few enough numbers for its values to be followed."""
    largest = LARGEST_KNOWN_NUMEL if tensor.dtype in _WHOLE else LARGEST_KNOWN_FLOATS
    return tensor.layout is torch.strided and math.prod(tensor.shape) <= largest


def is_followed_if_assumed(tensor: Tensor) -> bool:
    """The same for what is computed from assumed choices."""
    is_whole = tensor.layout is torch.strided and tensor.dtype in _WHOLE
    return is_whole and math.prod(tensor.shape) <= LARGEST_ASSUMED_NUMEL


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
