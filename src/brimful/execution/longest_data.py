"""The largest batch in training data, read within bounds, without effect on random numbers or iterators."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from brimful.batches import BatchLayout, are_samples, is_one_batch, named_tensors, sample_sizes
from brimful.execution.random_state import RandomState
from brimful.job import Batch
from brimful.results import SampleSize

MOST_READ = 10_000
"""Samples, or batches, that are read at most: a choice."""
MOST_SECONDS = 2.0
"""Time after which reading ends: a choice, about that of planning a small model."""
_ALIKE, ALIKE_SECONDS = 64, 0.1
"""After this number of samples of one size, such as images after a transform, and this time, reading ends: it
would seldom find another. A choice."""
_MOST_KEPT = 64
"""Samples of which a batch is made; a larger one repeats them. A choice: it bounds what is held in memory."""

_Collate = Callable[[list[Any]], Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestRead:
    """The largest batch of data that were read, and how small others are."""

    batch: Batch
    high: tuple[SampleSize, ...]
    """Sizes of `batch`."""
    low: tuple[SampleSize, ...]
    """Sizes of the smallest batch."""
    read: int
    total: int | None
    """Samples or batches of the data; None if the data do not report it."""
    what: str = "samples"

    @property
    def is_whole(self) -> bool:
        """Whether no part of the data is left unread."""
        return self.read == self.total

    @property
    def extent(self) -> str:
        """How much was read: "all 96 samples", "10,000 of 52,000 samples"."""
        if self.is_whole:
            return f"all {self.read:,} {self.what}"
        return (
            f"{self.read:,} {self.what}"
            if self.total is None
            else f"{self.read:,} of {self.total:,} {self.what}"
        )


def longest_of_data(train: Any, samples: int, layout: BatchLayout) -> LongestRead | None:
    """The batch of the longest samples of training data; `train` is as in `Data.train`, or a DataLoader.

    None if the data cannot be read without using them up, or make their batches themselves, as `Samples` do,
    perhaps in other processes.
    """
    if are_samples(train):
        return None
    if isinstance(train, DataLoader):
        with RandomState.kept(), _generators_kept(train):
            return _of_loader(train, samples, layout)
    with RandomState.kept():
        if is_one_batch(train):
            return _of_one_batch(train, samples, layout)
        return _of_batches(train, layout, _length(train))


def _of_loader(loader: DataLoader[Any], samples: int, layout: BatchLayout) -> LongestRead | None:
    dataset, collate, total = loader.dataset, loader.collate_fn, _length(loader.dataset)
    if loader.drop_last and total is not None and total < (loader.batch_size or 1):
        return None  # it gives no batch
    if type(loader.batch_sampler) is BatchSampler or (
        isinstance(dataset, IterableDataset) and loader.batch_size is not None
    ):
        return longest_of_samples(dataset, collate, samples, layout)
    if loader.batch_sampler is None:  # the dataset makes batches, or single samples
        return _of_batches(_mapped(collate, _some_of(dataset)), layout, _length(dataset), is_own=True)
    indices = loader.batch_sampler
    if _is_one_shot(indices):
        return None
    batches = (collate([dataset[index] for index in each]) for each in indices)
    return _of_batches(batches, layout, _length(indices), is_own=True)


def longest_of_samples(
    dataset: Any, collate: _Collate, samples: int, layout: BatchLayout
) -> LongestRead | None:
    """The batch of the longest samples of a dataset; None if it has none, or reading uses them up.

    `dataset` has single samples, with indices or to iterate over; `collate` makes a batch of them. The samples
    of the batch are different ones, the longest first, or some samples if all are alike.
    """
    some = _some_of(dataset)
    if some is None:
        return None
    reading, order = _Bounded(some), count()
    longest: list[tuple[int, int, Any]] = []
    of_entry: dict[str, tuple[int, Any]] = {}
    shortest: tuple[int, Any] | None = None
    for sample in reading:
        entries = _entry_sizes(sample)
        size = sum(entries.values())
        for name, elements in entries.items():
            known, _ = of_entry.get(name, (elements, None))
            reading.varies |= elements != known
            if name not in of_entry or elements > known:
                of_entry[name] = elements, sample
        if shortest is None or size < shortest[0]:
            shortest = size, sample
        heapq.heappush(longest, (size, -next(order), sample))
        if len(longest) > min(samples, _MOST_KEPT):
            heapq.heappop(longest)
    if shortest is None:
        return None
    first = [sample for _, sample in of_entry.values()] if reading.varies else []
    by_size = [sample for _, _, sample in sorted(longest, key=lambda each: each[:2], reverse=True)]
    unique = list({id(sample): sample for sample in chain(by_size[:1], first, by_size)}.values())
    if any(isinstance(value, str) for value in _leaves(unique[0])):  # the collator makes the tokens
        unique.sort(key=lambda sample: _elements([collate([sample])]), reverse=True)
    size = samples if reading.varies else min(samples, _MOST_KEPT)
    chosen = [unique[index % len(unique)] for index in range(size)]
    batch = collate(chosen)
    few = collate([shortest[1]] * samples) if reading.varies else batch
    return LongestRead(
        batch=batch,
        high=sample_sizes(batch, layout),
        low=sample_sizes(few, layout),
        read=reading.read,
        total=_length(dataset),
    )


def _of_one_batch(train: Batch, samples: int, layout: BatchLayout) -> LongestRead | None:
    """The longest samples of a single batch that has all samples."""
    total = layout.count(train)
    if layout.why_whole(train) is not None or not total:
        return None
    if not layout.samples_vary_in_size(train):
        batch = layout.resize(train, samples)
        sizes = sample_sizes(batch, layout)
        return LongestRead(batch=batch, high=sizes, low=sizes, read=total, total=total)
    sizes_of = [_elements([layout.part(train, index, index + 1)]) for index in range(min(total, MOST_READ))]
    order = torch.tensor(sizes_of).argsort(descending=True, stable=True)
    indices = torch.arange(samples) % len(order)
    batch, few = layout.take(train, order[indices]), layout.take(train, order.flip(0)[indices])
    return LongestRead(
        batch=batch,
        high=sample_sizes(batch, layout),
        low=sample_sizes(few, layout),
        read=len(order),
        total=total,
    )


def _of_batches(
    batches: Iterable[Batch] | None, layout: BatchLayout, total: int | None, *, is_own: bool = False
) -> LongestRead | None:
    """The batch of an iterable that has the most elements for each sample."""
    if batches is None or (not is_own and _is_one_shot(batches)):
        return None
    reading = _Bounded(batches)
    largest: tuple[float, tuple[SampleSize, ...], Batch] | None = None
    smallest: tuple[float, tuple[SampleSize, ...]] | None = None
    for batch in reading:
        sizes = sample_sizes(batch, layout)
        size = sum(each.elements for each in sizes)
        if largest is None or size > largest[0]:
            largest = size, sizes, batch
        if smallest is None or size < smallest[0]:
            smallest = size, sizes
        reading.varies = largest[0] != smallest[0]
    if largest is None or smallest is None:
        return None
    return LongestRead(
        batch=largest[2], high=largest[1], low=smallest[1], read=reading.read, total=total, what="batches"
    )


class _Bounded:
    """Iterates over samples or batches until they are too many, take too much time, or many are alike."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = values
        self.read = 0
        self.varies = False
        """Whether two of them differ in size; set by who reads them."""

    def __iter__(self) -> Iterator[Any]:
        began = time.perf_counter()
        for value in self._values:
            self.read += 1
            yield value
            passed = time.perf_counter() - began
            is_alike = self.read >= _ALIKE and passed > ALIKE_SECONDS and not self.varies
            if self.read >= MOST_READ or passed > MOST_SECONDS or is_alike:
                return


def _some_of(dataset: Any) -> Iterator[Any] | None:
    """Samples in an order that visits all parts of a dataset early; the first ones of a stream."""
    size = _length(dataset)
    if size is None or not hasattr(dataset, "__getitem__") or isinstance(dataset, Mapping):
        return None if _is_one_shot(dataset) else iter(dataset)
    return (dataset[index] for index in spread_indices(size))


def spread_indices(size: int) -> list[int]:
    """At most `MOST_READ` indices of a dataset, shuffled so that the first few are from all its parts."""
    return random.Random(0).sample(range(size), min(size, MOST_READ))


def _is_one_shot(values: Any) -> bool:
    """Whether iterating over values uses them up, or moves a position that their owner relies on.

    An object that holds an iterator, such as a generator or an open file, may pass it on.
    """
    held = getattr(values, "__dict__", {}).values()
    if isinstance(values, Iterator) or any(isinstance(value, Iterator) for value in held):
        return True
    if not isinstance(values, Iterable):
        return not hasattr(values, "__getitem__")
    found = iter(values)
    return found is values or found is iter(values)


def _mapped(collate: _Collate, samples: Iterator[Any] | None) -> Iterator[Batch] | None:
    return None if samples is None else map(collate, samples)


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the states of a loader's and its samplers' generators at the end of the context."""
    parts = (loader, loader.sampler, loader.batch_sampler, loader.dataset)
    held = [value for part in parts for value in getattr(part, "__dict__", {}).values()]
    states = [(each, each.get_state()) for each in held if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _length(data: object) -> int | None:
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _elements(batches: Sequence[Batch]) -> int:
    return sum(tensor.numel() for batch in batches for _, tensor in named_tensors(batch))


def _entry_sizes(sample: Any) -> dict[str, int]:
    """Number of elements of each entry of a sample, by name; entries need not be tensors yet."""
    if isinstance(sample, Mapping):
        return {str(name): _size(value) for name, value in sample.items()}
    if isinstance(sample, tuple):
        return {str(index): _size(value) for index, value in enumerate(sample)}
    return {"": _size(sample)}


def _size(value: Any) -> int:
    """Elements of a tensor, an array, an image, a text, a list of numbers, or of all in a nest of these."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        is_flat = not value or isinstance(value[0], int | float | bool)
        return len(value) if is_flat else sum(map(_size, value))
    size = getattr(value, "size", None)
    if isinstance(size, int):  # NumPy
        return size
    if isinstance(size, tuple):  # PIL: width and height
        return int(torch.Size(size).numel())
    return sum(tensor.numel() for _, tensor in named_tensors(value)) or 1


def _leaves(sample: Any) -> Iterator[Any]:
    if isinstance(sample, Mapping):
        sample = tuple(sample.values())
    if isinstance(sample, tuple | list):
        for value in sample:
            yield from _leaves(value) if isinstance(value, Mapping | tuple) else (value,)
    else:
        yield sample
