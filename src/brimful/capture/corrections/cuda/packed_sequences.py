"""Packing sequences of several lengths and unpacking them, which read the lengths as they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from brimful.capture.corrections.rule import Rule
from brimful.capture.values.known import NotKnownError

# B sequences, T the longest length, S the sum of lengths; "..." is what each step has


class PackedSequences(Rule):
    """Pack and pad with the lengths of the real batch, which fake tensors do not have.

    Packing copies (B, T, ...) to (S, ...) and gives zeros back in backward. Padding fills (T, B, ...) and
    copies into it step by step; backward copies the whole gradient once more, one copy at a time.
    """

    name = "packed_sequences"
    source = "torch aten/src/ATen/native/PackedSequence.cpp (about 2.0)"

    def functions(self) -> Mapping[Callable[..., Any], Callable[..., Any]]:
        """Replacements of what `torch.nn.utils.rnn` calls."""
        return {torch._pack_padded_sequence: self._pack, torch._pad_packed_sequence: self._pad}

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context that changes nothing."""
        yield

    def _pack(self, inputs: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        samples, steps = inputs.shape[:2] if batch_first else inputs.shape[1::-1]
        known_lengths = self._lengths(lengths, samples, steps)
        sizes = [sum(length > step for length in known_lengths) for step in range(max(known_lengths))]
        data = _Pack.apply(inputs if batch_first else inputs.transpose(0, 1), sum(sizes))
        self.count(0)
        return data, self._with_values(sizes)

    def _pad(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, longest: int
    ) -> tuple[Tensor, Tensor]:
        sizes = self.recorder.values.sizes_from(batch_sizes).tolist()
        lengths = [sum(size > sample for size in sizes) for sample in range(sizes[0])]
        padded = _Pad.apply(data, max(longest, len(sizes)), sizes[0], value)
        self.count(0)
        return padded.transpose(0, 1) if batch_first else padded, self._with_values(lengths)

    def _lengths(self, lengths: Tensor, samples: int, steps: int) -> list[int]:
        try:
            known: list[int] = self.recorder.values.sizes_from(lengths).tolist()
        except NotKnownError:
            self.recorder.facts.note("lengths of packed sequences, taken for the longest")
            return [steps] * samples
        return known

    def _with_values(self, numbers: list[int]) -> Tensor:
        """A fake tensor of integers whose values are known."""
        fake = torch.empty(len(numbers), dtype=torch.int64)
        with unset_fake_temporarily():
            real = torch.tensor(numbers)
        self.recorder.values.known.remember(fake, real)
        return fake


class _Pack(torch.autograd.Function):
    """Packs (B, T, ...) to (S, ...)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, steps: int) -> Tensor:
        ctx.shape = inputs.shape
        some = inputs.as_strided((steps, *inputs.shape[2:]), (0, *inputs.stride()[2:]))
        return some.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_zeros(ctx.shape), None


class _Pad(torch.autograd.Function):
    """Pads (S, ...) to (T, B, ...)."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, longest: int, samples: int, value: float) -> Tensor:
        ctx.steps = data.size(0)
        padded = data.new_full((longest, samples, *data.shape[1:]), value)
        padded.flatten(0, 1)[: ctx.steps].copy_(data)
        return padded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        copied = grad.clone(memory_format=torch.contiguous_format)
        return copied.flatten(0, 1)[: ctx.steps].clone(), None, None, None
