"""Batches of samples of similar length, padded to the longest.

In a DataLoader:

    buckets = LengthBuckets([len(text) for text in texts], batch_size=64, seed=0)
    collate = functools.partial(pad_batch, pad_values={"input_ids": 0, "labels": -100})
    loader = DataLoader(dataset, batch_sampler=buckets, collate_fn=collate)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Sampler

from brimful.errors import BatchError, UsageError
from brimful.trainer.data.rng import generator_of

ATTENTION_MASK = "attention_mask"


class LengthBuckets(Sampler[list[int]]):
    """A batch sampler that groups samples of similar length, for `DataLoader(batch_sampler=…)`.

    In each epoch it shuffles all samples, cuts them into windows, sorts each window by length, cuts it into
    batches and shuffles the batches. Each sample comes once; the last batch of the last window may be smaller.
    A wider window needs less padding and mixes the samples less.

    The order depends on the seed and the epoch alone. A `Trainer` calls `set_epoch`, so a run resumed within an
    epoch continues with the same batches. Without `set_epoch` each pass is the next epoch.

    Args:
        lengths: The length of every sample of the dataset, by index.
        batch_size: Samples in each batch; under a plan, its global batch size.
        seed: At least 0.
        window: Batches in a window.

    Raises:
        UsageError: There are no lengths, or a number is too small.
    """

    def __init__(
        self, lengths: Sequence[int] | Tensor, batch_size: int, *, seed: int = 0, window: int = 50
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("window", window, 1)):
            if value < least:
                raise UsageError(f"{name} is {value}; it must be at least {least}.")
        self._lengths = torch.as_tensor(lengths)
        if self._lengths.ndim != 1 or not len(self._lengths):
            raise UsageError(
                f"the lengths have shape {tuple(self._lengths.shape)}; give one number for each sample."
            )
        self._batch_size = batch_size
        self._seed = seed
        self._window = window
        self._epoch = 1

    @property
    def longest(self) -> list[int]:
        """Indices of one batch of the longest samples, which no batch exceeds in memory.

        Collate them and pass them as `Data(longest=…)`.
        """
        return self._lengths.topk(min(self._batch_size, len(self._lengths))).indices.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass.

        Args:
            epoch: The same number gives the same order.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-len(self._lengths) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # a generator, so that an unused iterator does not count: a DataLoader with workers makes two
        generator = generator_of(self._seed, self._epoch)
        self._epoch += 1
        order = torch.randperm(len(self._lengths), generator=generator)
        batches = [
            batch
            for window in order.split(self._window * self._batch_size)
            for batch in window[self._lengths[window].argsort(stable=True)].split(self._batch_size)
        ]
        for position in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[position].tolist()


def pad_batch(
    samples: Sequence[Mapping[str, Any]], pad_values: Mapping[str, float], multiple_of: int = 8
) -> dict[str, Tensor]:
    """Collate samples of different lengths into one batch.

    Entries named in `pad_values` are padded at their end to the longest in the batch, rounded up; all others
    are stacked. Samples without an "attention_mask" get one: 1 where the first entry of `pad_values` has
    content, 0 where it is padded.

    Args:
        samples: Dicts of tensors or numbers or lists of them, all with the same names.
        pad_values: What to pad with, by name, such as {"input_ids": 0, "labels": -100}.
        multiple_of: Padded lengths are multiples of this: tensor cores compute in tiles.

    Returns:
        Tensors by name, samples first.

    Raises:
        BatchError: The samples do not fit together: other names, types or shapes.
        UsageError: `pad_values` are empty, or a number that the entry cannot hold.
    """
    if multiple_of < 1:
        raise UsageError(f"multiple_of is {multiple_of}; it must be at least 1.")
    if not samples or not pad_values:
        raise UsageError(
            f"there are {len(samples)} samples and {len(pad_values)} pad values; at least one each is needed."
        )
    names = list(samples[0])
    for sample in samples:
        if set(sample) != set(names) or not set(pad_values) <= set(names):
            raise BatchError(
                f"a sample has the entries {sorted(sample)}; the first has {sorted(names)}, and to be padded "
                f"are {sorted(pad_values)}. All samples must have the same entries, these among them."
            )
    columns = {name: [torch.as_tensor(sample[name]) for sample in samples] for name in names}
    if ATTENTION_MASK not in names:
        columns[ATTENTION_MASK] = [
            torch.ones(entry.shape[:1], dtype=torch.int64) for entry in columns[next(iter(pad_values))]
        ]
    values = {ATTENTION_MASK: 0} | dict(pad_values)
    return {
        name: _padded(name, column, values[name], multiple_of) if name in values else _stacked(name, column)
        for name, column in columns.items()
    }


def _padded(name: str, column: list[Tensor], value: float, multiple_of: int) -> Tensor:
    _check_alike(name, column, [(entry.dtype, entry.shape[1:], entry.ndim) for entry in column])
    if column[0].ndim == 0:
        raise BatchError(f"the entry {name!r} of a sample is one number, which cannot be padded.")
    if not _holds(column[0].dtype, value):
        raise UsageError(f"{name!r} has {column[0].dtype}, which cannot be padded with {value}.")
    padded = pad_sequence(column, batch_first=True, padding_value=value)
    missing = -padded.shape[1] % multiple_of
    return F.pad(padded, (0, 0) * (padded.ndim - 2) + (0, missing), value=value)


def _stacked(name: str, column: list[Tensor]) -> Tensor:
    _check_alike(name, column, [(entry.dtype, entry.shape) for entry in column])
    return torch.stack(column)


def _check_alike(name: str, column: list[Tensor], kinds: list[tuple[Any, ...]]) -> None:
    if any(kind != kinds[0] for kind in kinds):
        found = ", ".join(sorted({f"{entry.dtype} {tuple(entry.shape)}" for entry in column})[:4])
        raise BatchError(
            f"the entries {name!r} of the samples do not make one tensor: {found}. Entries of different "
            "lengths need a value in pad_values, and all must have one type."
        )


def _holds(dtype: torch.dtype, value: float) -> bool:
    if dtype is torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point:
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max and value == int(value)
