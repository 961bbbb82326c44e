"""Tokenized samples of different lengths, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray

from brimful.job import Batch
from brimful.trainer.data.length_buckets import LengthBuckets, pad_batch

# B texts, T tokens

MULTIPLE = 8
"""Padded lengths are multiples of this."""
_VALIDATION_TEXTS = 64
"""Samples per validation batch, which is computed in micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedTexts:
    """Tokenized samples as `Samples`; iterating over them yields validation batches in order."""

    entries: Sequence[Mapping[str, NDArray[Any] | int]]
    """For each sample, by name: arrays, which are padded, and labels."""
    padding: Mapping[str, int]
    """Padding value of entries, by name; the attention mask follows from the first."""

    def __len__(self) -> int:
        return len(self.entries)

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[Batch]:
        """Batches of samples of similar length; see `Samples`."""
        buckets = self._buckets(size, seed)
        buckets.set_epoch(epoch)
        return (self.batch(indices) for indices in list(buckets)[skip:])

    def __iter__(self) -> Iterator[Batch]:
        indices = range(len(self))
        return (
            self.batch(indices[start : start + _VALIDATION_TEXTS])
            for start in range(0, len(self), _VALIDATION_TEXTS)
        )

    def longest(self, size: int) -> Batch:
        """The batch that takes the most memory."""
        return self.batch(self._buckets(size, 0).longest)

    def batch(self, indices: Sequence[int]) -> Batch:
        """A batch of some of the samples, padded to the longest of them."""
        samples = [
            {name: self._tensor(name, part) for name, part in self.entries[index].items()} for index in indices
        ]
        return pad_batch(samples, self.padding, multiple_of=MULTIPLE)

    def some(self, indices: Sequence[int]) -> TokenizedTexts:
        """A subset of the samples."""
        return replace(self, entries=[self.entries[index] for index in indices])

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        return [len(entry["input_ids"]) for entry in self.entries]  # type: ignore[arg-type]

    def _tensor(self, name: str, part: NDArray[Any] | int) -> Any:
        return torch.as_tensor(part).long() if name in self.padding else part

    def _buckets(self, size: int, seed: int) -> LengthBuckets:
        return LengthBuckets(self.lengths, size, seed=seed)


def rounded_up(tokens: int) -> int:
    """The length to which a batch is padded whose longest sample has `tokens`: a multiple of `MULTIPLE`."""
    return -(-tokens // MULTIPLE) * MULTIPLE
