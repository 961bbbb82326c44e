"""Warns when a batch of training is larger than planned, in another dimension than the batch dimension."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from brimful.batches import BatchLayout, named_tensors, sample_sizes
from brimful.errors import BatchError
from brimful.job import Batch
from brimful.results import SampleSize, describe_growth

PLAN_LONGEST = (
    "Plan for the longest batch: Job(data=lambda: Data(train=…, longest=lambda n: …)), or batch(n) of it"
)
"""Advice about a larger batch, for a user of a `Job`."""


class LengthWatch:
    """Compares batches with those that were planned; once one is larger, it compares no more.

    `planned` is `Plan.sample_sizes`; empty compares nothing. `advice` says what to do about a larger batch.
    """

    def __init__(
        self, planned: Sequence[SampleSize], layout: BatchLayout, *, advice: str = PLAN_LONGEST
    ) -> None:
        self._planned = tuple(planned)
        self._layout = layout
        self._advice = advice
        self._shapes: list[tuple[int, ...]] = []
        """Shapes of the latest batch: most batches have the same, and then nothing else is compared."""

    def larger(self, batch: Batch) -> str | None:
        """How a global batch, or a part of one, is larger than planned, as sentences with both numbers.

        None if it is not larger, or if an earlier batch was larger.
        """
        if not self._planned:
            return None
        shapes = [tuple(tensor.shape) for _name, tensor in named_tensors(batch)]
        if shapes == self._shapes:
            return None
        self._shapes = shapes
        with suppress(BatchError):  # the step itself refuses such a batch
            differs = describe_growth(self._planned, sample_sizes(batch, self._layout))
            if differs is not None:
                self._planned = ()
                return _described(differs, self._advice)
        return None


class InputWatch:
    """Compares a model's inputs in training with the planned batch, for loops that pass no batch here.

    An input is compared with the entry of its name, else with the largest of as many dimensions. `planned` is
    as for `LengthWatch`.
    """

    def __init__(self, planned: Sequence[SampleSize]) -> None:
        self._by_name = {size.name: size for size in planned if None in size.shape}
        self._by_dims: dict[int, SampleSize] = {}
        for size in planned:
            others = self._by_dims.get(len(size.shape))
            if None in size.shape and (others is None or size.elements > others.elements):
                self._by_dims[len(size.shape)] = size

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Warn of the first larger input; a hook before `forward`."""
        if not module.training or not self._by_dims or torch.compiler.is_compiling():
            return  # in compiled code the comparison would be a guard on shapes, and the warning a graph break
        for name, tensor in (*enumerate(inputs), *named.items()):
            if not isinstance(tensor, Tensor):
                continue
            planned = self._by_name.get(f'batch["{name}"]')
            if planned is None or len(planned.shape) != tensor.ndim:
                planned = self._by_dims.get(tensor.ndim)
            if planned is None or planned.elements >= _per_sample(tensor, planned):
                continue
            shape = tuple(
                None if size is None else found
                for size, found in zip(planned.shape, tensor.shape, strict=False)
            )
            found = SampleSize(name=planned.name, shape=shape, elements=_per_sample(tensor, planned))
            differs = describe_growth((planned,), (found,))
            if differs is not None:
                self._by_dims = {}
                warnings.warn(_described(differs, "Plan again with the longest batch"), stacklevel=2)
                return


def _per_sample(tensor: Tensor, planned: SampleSize) -> float:
    """Elements for each sample of a tensor, whose batch dimension is that of `planned`."""
    samples = [found for size, found in zip(planned.shape, tensor.shape, strict=False) if size is None]
    return tensor.numel() / max(samples[0] if samples else 1, 1)


def _described(differs: tuple[str, str, str], advice: str) -> str:
    place, planned, found = differs
    return (
        f"a batch is larger than planned: {place} is {found}, planned {planned}. Its step may take more memory "
        f"than is predicted. {advice}."
    )
