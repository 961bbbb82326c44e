"""Values of tensors, for the Python code that reads them.

A model may ask whether its attention mask is all ones, a loss which labels count, and run other ops for another
answer. Fake tensors have no values. So what is small of the real batch and of buffers is kept beside the fakes,
and what is computed from it alone is computed for real as well (see `follower`).

Private torch APIs used here: `torch._subclasses.fake_tensor`, `torch.utils._pytree`,
`torch.utils._python_dispatch` (checked: torch 2.13).
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from brimful.torch_utils.op_writes import written_tensors
from brimful.trace import Guess

LARGEST_KNOWN_NUMEL = 2**20
"""Tensors of more integers or booleans are not followed. An id for each token of a batch is fewer, a mask for
each pair of tokens is more; so following an op takes a millisecond at most."""
LARGEST_CHOSEN_NUMEL = 2**24
"""Assumed choices of more elements are not followed, such as the experts of each token."""
LARGEST_ASSUMED_NUMEL = 2**26
"""Tensors of more elements that are computed from assumed choices are not followed. The limit is a mask of
65,536 tokens × 8 choices × 128 experts. As int64 it takes 512 MiB while it lives, and about 0.6 s to fill and
add up (one thread of an AMD EPYC)."""
LARGEST_KNOWN_FLOATS = 2**16
"""Tensors of more other numbers, which most ops have to do with, are not followed: a mask that is added for
each token is fewer, most activations are more."""

DATA, CHOICE = 1, 2
"""Where values are from: the batch, buffers and other tensors; or an assumed choice. 0 is a constant."""

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class NotKnownError(Exception):
    """The values asked for are not known."""


class KnownValues:
    """The values that some fake tensors stand for; `guess` is what is assumed of choices.

    Values are kept on the tensor, with how often its storage had been written to by then in unknown ways, and
    where they are from.
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

        `like` is a tensor whose values have the same source; None for the batch, buffers and others.
        """
        source = DATA if like is None else self.source_of(like)
        is_few = is_followed(real) or (source & CHOICE and is_followed_if_assumed(real))
        if isinstance(fake, FakeTensor) and is_few and real.device.type != "meta":
            with _disable_current_modes():  # the recorder's too: the copy is none of the step's
                self.keep(fake, real.detach().to("cpu", copy=True), source)

    def carry_over(self, source: Tensor, copy: Tensor) -> None:
        """Keep for a copy the values of its source, if they are known."""
        with suppress(NotKnownError):
            self.remember(copy, self.of(source), like=source)

    def are_assumed(self, *nests: Any) -> bool:
        """Whether any tensor among arguments has values computed from an assumed choice."""
        return self.has_choices and any(
            self.source_of(tensor) & CHOICE for tensor in tree_leaves(nests) if isinstance(tensor, Tensor)
        )

    def of(self, tensor: Tensor) -> Tensor:
        """The values of a fake tensor, as a real one on the CPU; a real tensor is returned as it is.

        Raises `NotKnownError` if the values are not known.
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
        """The number in a tensor of one element, as `item` returns it; raises `NotKnownError` as `of` does."""
        value = self.of(tensor)
        with torch._C._DisableTorchDispatch():  # no mode need look at it
            return value.item()

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op for the real values of its arguments, fake tensors among them.

        Raises `NotKnownError` if the values of one argument are not known.
        """
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        with unset_fake_temporarily(), torch.no_grad():
            return func(*args, **kwargs)

    def forget_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forget the values of what an op writes to, through any view of it."""
        for tensor in written_tensors(func, args, kwargs):
            self.forget(tensor)

    def to_fake(self, real: Tensor, *, like: Tensor | None = None) -> Tensor:
        """A fake tensor that stands for a real one, of the same shape and type; few values are kept.

        `real` is computed from other tensors, of which `like` is one.
        """
        fake = torch.empty_like(real)  # fake, as the fake mode is in force
        self.remember(fake, real, like=like)
        return fake

    def make_writable(self, tensor: Tensor) -> None:
        """Give a tensor that is filled with one number, which is kept once, numbers of its own."""
        value = self.of(tensor)
        if type(tensor) is FakeTensor and 0 in value.stride():
            source = self.source_of(tensor)
            self.forget(tensor)  # views of it were known by the one number
            with unset_fake_temporarily():
                self.keep(tensor, value.clone(memory_format=torch.contiguous_format), source)

    def forget(self, tensor: Tensor) -> None:
        """Forget the values of a tensor, and of all views of its storage."""
        if type(tensor) is FakeTensor and tensor.layout is torch.strided:
            setattr(tensor.untyped_storage(), self._WRITES, self._unknown_writes(tensor) + 1)

    def _unknown_writes(self, tensor: Tensor) -> int:
        if tensor.layout is not torch.strided:
            return 0
        writes: int = getattr(tensor.untyped_storage(), self._WRITES, 0)
        return writes

    def source_of(self, tensor: Tensor) -> int:
        """Where the values of a tensor are from: `DATA`, `CHOICE` or both; 0 if constant or not known."""
        if type(tensor) is not FakeTensor:
            return DATA
        known = tensor.__dict__.get(self._ATTRIBUTE)
        return 0 if known is None else int(known[2])

    def keep(self, fake: Tensor, value: Tensor, source: int) -> None:
        """Keep values on a fake tensor, and where they are from."""
        if type(fake) is FakeTensor:
            fake.__dict__[self._ATTRIBUTE] = (self._unknown_writes(fake), value, source)


def is_followed(tensor: Tensor) -> bool:
    """Whether a tensor holds few enough numbers for its values to be followed."""
    largest = LARGEST_KNOWN_NUMEL if tensor.dtype in WHOLE else LARGEST_KNOWN_FLOATS
    return tensor.layout is torch.strided and math.prod(tensor.shape) <= largest


def is_followed_if_assumed(tensor: Tensor, largest_numel: int = LARGEST_ASSUMED_NUMEL) -> bool:
    """Whether a tensor that is computed from assumed choices is small enough for its values to be followed."""
    is_whole = tensor.layout is torch.strided and tensor.dtype in WHOLE
    return is_whole and math.prod(tensor.shape) <= largest_numel
