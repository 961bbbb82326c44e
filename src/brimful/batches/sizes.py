"""The sizes of a batch's samples, in every dimension but the batch dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from brimful.batches.find_samples import dim_of
from brimful.batches.layout import BatchLayout
from brimful.batches.tensors import named_tensors, named_where
from brimful.job import Batch
from brimful.results import SampleSize


def sample_sizes(batch: Batch, layout: BatchLayout) -> tuple[SampleSize, ...]:
    """The sizes of the entries of a batch, read from shapes alone.

    There is one for each tensor with dimensions, and one for each name within lists of samples and graphs.
    Raises `BatchError` as `layout.count` does.
    """
    places = layout.places(batch)
    samples = max(layout.count(batch) if places is None else places.samples, 1)
    shapes: dict[str, tuple[int | None, ...]] = {}
    elements: dict[str, int] = {}

    def add(name: str, tensor: Tensor, dim: int | None) -> None:
        if not tensor.ndim:
            return
        of_samples = (None if at == dim else size for at, size in enumerate(tensor.shape))
        shapes[name] = () if name in shapes else tuple(of_samples)
        elements[name] = elements.get(name, 0) + prod(tensor.shape)

    if places is None:
        for name, tensor in named_tensors(batch):
            add(name, tensor, 0 if tensor.ndim and tensor.shape[0] == samples else None)
    else:
        for name, leaf in named_where(batch, places.is_leaf):
            if isinstance(leaf, Tensor):
                add(name, leaf, dim_of(leaf, places.dim))
            else:
                _add_list(name, leaf, elements)
    return tuple(
        SampleSize(name=name, shape=shapes.get(name, ()), elements=count / samples)
        for name, count in elements.items()
    )


def _add_list(name: str, samples: Sequence[object], elements: dict[str, int]) -> None:
    """Add the tensors of a list of samples, or of a batch of graphs, under one name for all samples."""
    entries = (
        [(f"{name}[…]", each) for each in samples] if isinstance(samples, list | tuple) else [(name, samples)]
    )
    for path, entry in entries:
        for inner, tensor in named_tensors(entry, path):
            if tensor.ndim:
                elements[inner] = elements.get(inner, 0) + tensor.numel()
