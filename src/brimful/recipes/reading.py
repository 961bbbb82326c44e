"""Samples that worker processes read from files on demand."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from brimful.distributed.ranks import processors_here
from brimful.errors import UsageError
from brimful.job import Batch
from brimful.trainer.data.rng import generator_of

# Samples that a worker reads at once. A whole global batch each would delay the first one and hold one batch
# per worker in memory; single samples cost a message each.
_SAMPLES_AT_ONCE = 16

_MOST_WORKERS = 8
"""Default limit of worker processes. A choice: they share the processors with training, and each holds its
samples twice."""

_Key = tuple[int, int, int]
"""Identifies one sample in one epoch: seed, epoch, index."""


class Reader(Protocol):
    """Reads single samples; it is sent to worker processes."""

    def __len__(self) -> int:
        """The number of samples."""

    def read(self, index: int, random: torch.Generator | None) -> dict[str, Tensor]:
        """Read a sample: tensors by name, with the same shapes for every sample.

        `random` is the generator for augmentation; None reads the sample without augmentation.
        """


class ReadSamples:
    """`Samples` that are read from files; iterating yields validation batches in the files' own order.

    Random augmentation of a sample depends only on seed, epoch and sample, not on the number of workers or
    where an epoch is resumed.

    Args:
        reader: Reads single samples.
        workers: Number of processes that read; 0 reads in this process, None uses one per processor, at most 8.
        prefetch_factor: Groups of 16 samples that each worker reads ahead; None takes torch's default, 2.
        validation_batch_size: Samples per batch in a pass in order.

    Raises:
        UsageError: `workers` is negative, or `prefetch_factor` is below 1 or given without workers.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        workers: int | None = None,
        prefetch_factor: int | None = None,
        validation_batch_size: int = 64,
    ) -> None:
        if workers is not None and workers < 0:
            raise UsageError(f"workers is {workers}; it must be at least 0.")
        if prefetch_factor is not None and (prefetch_factor < 1 or workers == 0):
            raise UsageError(
                f"prefetch_factor is {prefetch_factor} with workers={workers}; it must be at least 1, with at "
                "least one worker, which reads ahead. Leave it out, or give workers=1 or more."
            )
        self._reader = reader
        self._workers = min(processors_here(), _MOST_WORKERS) if workers is None else workers
        self._prefetch_factor = prefetch_factor
        self._validation_batch_size = validation_batch_size
        self._chunks = _Chunks()
        self._loader: DataLoader[Any] | None = None

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def workers(self) -> int:
        """Number of processes that read."""
        return self._workers

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """The batches of an epoch; see `Samples`."""
        order = torch.randperm(len(self), generator=generator_of(seed, epoch)).tolist()
        return self._read([(seed, epoch, index) for index in order[skip * size :]], size)

    def __iter__(self) -> Iterator[Batch]:
        return self._read([(-1, -1, index) for index in range(len(self))], self._validation_batch_size)

    def _read(self, keys: list[_Key], size: int) -> Iterator[Batch]:
        sizes = [min(size, len(keys) - start) for start in range(0, len(keys), size)]
        self._chunks.set(keys, sizes)
        if self._loader is None:
            self._loader = self._make_loader()
        chunks = iter(self._loader)
        for batch_size in sizes:
            parts = list(islice(chunks, -(-batch_size // _SAMPLES_AT_ONCE)))
            yield {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            _Keyed(self._reader),
            batch_sampler=self._chunks,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            prefetch_factor=self._prefetch_factor,
            generator=torch.Generator(),  # draws the workers' seeds, instead of the run's generator
        )


class _Keyed(Dataset[dict[str, Tensor]]):
    """A dataset that reads samples by key."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __getitem__(self, key: _Key) -> dict[str, Tensor]:
        seed, epoch, index = key
        return self._reader.read(index, None if seed < 0 else generator_of(seed, epoch, index))


class _Chunks(Sampler[list[_Key]]):
    """The keys of one pass in chunks that do not cross the end of a batch."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._sizes: list[int] = []

    def set(self, keys: list[_Key], sizes: list[int]) -> None:
        """Set the keys and batch sizes of the next pass."""
        self._keys, self._sizes = keys, sizes

    def __iter__(self) -> Iterator[list[_Key]]:
        keys = iter(self._keys)
        for size in self._sizes:
            batch = islice(keys, size)
            while chunk := list(islice(batch, _SAMPLES_AT_ONCE)):
                yield chunk
