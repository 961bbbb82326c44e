"""The largest batches of a trainer, made of its longest samples and others, and how they are split.

Private API of transformers 5.23 used here: `_remove_unused_columns`, `_get_collator_with_removed_columns`,
`_signature_columns` through both. Checked with trl 1.16 and sentence-transformers 6.2.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from brimful.batches import BatchLayout, named_tensors
from brimful.errors import BatchError, UsageError
from brimful.execution.longest_batch import read_notes
from brimful.execution.longest_data import (
    ALIKE_SECONDS,
    MOST_READ,
    MOST_SECONDS,
    longest_of_samples,
    spread_indices,
)
from brimful.execution.random_state import RandomState
from brimful.integrations.transformers.kinds import has_pairs, is_of_sentence_transformers
from brimful.job import Batch

_ALIKE_SAMPLES = 64
"""This number of samples of one size in a row, such as images after a transform, stands for all: a choice."""
_MOST_COLLATED = 64
"""Texts with the most characters, of which the one with the most tokens is taken: a choice."""

_Collate = Callable[[list[Any]], Mapping[str, Any]]


def batches_of_longest(trainer: Trainer, longest: Any | None) -> Callable[[int], Batch]:
    """A function that makes batches as large as those of the longest samples, with the trainer's collator.

    The longest come first. The others are distinct samples, spread over the dataset: of a batch of equal
    samples every loss is the mean of those of its parts. Where the collator makes no equally large batch of
    them, as without padding, the longest are repeated.

    Of the `train_dataset` at most `MOST_READ` samples are read, from all its parts; of a stream the first ones.
    `longest` is the sample to take instead. Raises `UsageError` if the trainer has no samples.
    """
    sources, collate = _sources_and_collator(trainer)
    if longest is not None:
        source, chosen = sources[0], [longest]
    else:
        found = [(samples, _longest(samples, collate, collates_all=has_pairs(trainer))) for samples in sources]
        source, chosen = max(found, key=lambda each: _elements(collate, each[1]) if len(found) > 1 else 0)

    def batch(n: int) -> Batch:
        repeated = dict(collate([chosen[index % len(chosen)] for index in range(n)]))
        if n <= len(chosen):
            return repeated
        distinct = dict(collate([*chosen, *_spread(source, n - len(chosen))]))
        return distinct if _sizes(distinct) == _sizes(repeated) else repeated

    return batch


def reading_notes(trainer: Trainer, longest: Any | None) -> tuple[str, ...]:
    """Notes of a plan on the samples among which the longest one was found; none if `longest` is given."""
    if longest is not None:
        return ()
    if isinstance(trainer.train_dataset, Sized):
        sources, collate = _sources_and_collator(trainer)
        layout = layout_of_trainer(trainer)
        with RandomState.kept():
            found = [longest_of_samples(samples, collate, 2, layout) for samples in sources]
        advice = "If others are longer, pass plan(trainer, longest=…)"
        return tuple(note for read in found if read is not None for note in read_notes(read, read.high, advice))
    return (
        f"the train_dataset is a stream: the longest of its first {MOST_READ} samples is planned for. "
        "If later ones are longer, pass plan(trainer, longest=…)",
    )


def few_samples_notes(trainer: Trainer, size: int) -> tuple[str, ...]:
    """A note that no step is as large as planned, if the data have fewer samples than the effective batch."""
    dataset = trainer.train_dataset
    found = len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, dict) else size
    if found >= size:
        return ()
    return (
        f"the train_dataset has {found} samples, fewer than the effective batch of {size}: each epoch is one "
        "smaller step. Set a smaller per_device_train_batch_size or gradient_accumulation_steps in "
        "TrainingArguments",
    )


def layout_of_trainer(trainer: Trainer) -> BatchLayout:
    """How a trainer's batches are counted and divided."""
    return BatchLayout(to_samples=split_pairs, collate=join_pairs) if has_pairs(trainer) else BatchLayout()


def split_pairs(batch: Batch) -> list[dict[str, Any]]:
    """The samples of a batch whose first half of rows is chosen texts, and whose second half rejected ones.

    `input_ids` has two rows for each sample, other tensors have two or one. Each sample has its rows by name,
    one or two in a tuple, and what belongs to the whole batch as it is. Raises `BatchError` if a tensor has
    another number of rows.
    """
    rows = batch["input_ids"].shape[0]
    samples: list[dict[str, Any]] = [{} for _ in range(rows // 2)]
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] not in (rows, len(samples)):
            raise BatchError(
                f"{name} has {value.shape[0]} rows in a batch of {len(samples)} pairs, so it cannot be divided."
            )
        for index, sample in enumerate(samples):
            if not isinstance(value, Tensor) or value.dim() == 0:
                sample[name] = value
            else:
                sample[name] = tuple(value[index :: len(samples)])
    return samples


def join_pairs(samples: list[dict[str, Any]]) -> Batch:
    """The batch of samples that `split_pairs` returned."""
    batch: dict[str, Any] = {}
    for name, value in samples[0].items():
        if isinstance(value, tuple):
            rows = [sample[name][half] for half in range(len(value)) for sample in samples]
            batch[name] = torch.stack(rows)
        else:
            batch[name] = value
    return batch


def _sources_and_collator(trainer: Trainer) -> tuple[list[Any], _Collate]:
    """The datasets of a trainer, of one of which each batch is, and the collator of their samples."""
    dataset, collate = trainer.train_dataset, _checked(trainer.data_collator)
    if dataset is None:
        raise UsageError("the trainer has no train_dataset, from which a plan takes its longest sample.")
    if is_of_sentence_transformers(trainer):  # its loader keeps all columns
        return (list(dataset.values()) if isinstance(dataset, dict) else [dataset]), collate
    if type(dataset).__module__.startswith("datasets.") and isinstance(dataset, Sized):
        return [trainer._remove_unused_columns(dataset, description="training")], collate
    return [dataset], trainer._get_collator_with_removed_columns(collate, description="training")


def _checked(collate: _Collate) -> _Collate:
    """A collator whose errors name the columns of the samples of which it cannot make a batch."""

    def checked(samples: list[Any]) -> Mapping[str, Any]:
        try:
            return collate(samples)
        except Exception as error:
            columns = dict.fromkeys(
                ", ".join(map(str, sample)) for sample in samples if isinstance(sample, Mapping)
            )
            found = f" The samples have the columns {' and '.join(columns)}." if columns else ""
            raise UsageError(
                "the data_collator cannot make a batch of samples of the train_dataset: "
                f"{type(error).__name__}: {error}.{found} Training would fail too: give all samples the "
                "columns that it reads, or pass another data_collator."
            ) from error

    return checked


def _longest(samples: Any, collate: _Collate, *, collates_all: bool) -> list[Any]:
    """The samples that are longest in some field, at least one; that with most elements in all comes first.

    Where the collator makes the tensors' sizes, of texts or of pairs (`collates_all`), they are measured in its
    batches. Raises `UsageError` if the dataset is empty, or samples of different columns make no batch.
    """
    first = next(iter(_some_of(samples)), None)
    if first is None:
        raise UsageError("the train_dataset of the trainer is empty.")
    if collates_all:
        return _longest_by(_some_of(samples), lambda sample: _lengths(collate([sample])), stops=False)
    if isinstance(first, Mapping) and any(isinstance(value, str) for value in first.values()):
        texts = list(_some_of(samples))
        most = [
            each
            for name in first
            for each in heapq.nlargest(_MOST_COLLATED, texts, key=partial(_size_of, name))
        ]
        return _longest_by(most, lambda sample: _lengths(collate([sample])), stops=False)
    of_columns: dict[tuple[str, ...], Any] = {}
    longest = _longest_by(_noting_columns(_some_of(samples), of_columns), _lengths)
    if len(of_columns) > 1:
        collate(list(of_columns.values()))  # says which columns differ, if a batch of both cannot be made
    return longest


def _noting_columns(samples: Iterable[Any], of_columns: dict[tuple[str, ...], Any]) -> Iterator[Any]:
    """Yield the samples; add one for each set of columns to `of_columns`."""
    for sample in samples:
        if isinstance(sample, Mapping):
            of_columns.setdefault(tuple(sorted(sample)), sample)
        yield sample


def _size_of(name: str, sample: Mapping[str, Any]) -> int:
    return _size(sample.get(name))


def _longest_by(
    samples: Iterable[Any], lengths_of: Callable[[Any], dict[str, int]], *, stops: bool = True
) -> list[Any]:
    total, best = (-1, None), {}  # type: tuple[int, Any], dict[str, tuple[int, Any]]
    alike, began = 0, time.perf_counter()
    seen: dict[str, int] | None = None
    for sample in samples:
        lengths = lengths_of(sample)
        if sum(lengths.values()) > total[0]:
            total = sum(lengths.values()), sample
        for name, length in lengths.items():
            if length > best.get(name, (-1, None))[0]:
                best[name] = length, sample
        alike = alike + 1 if lengths == seen else 0
        seen = lengths
        passed = time.perf_counter() - began
        if stops and (passed > MOST_SECONDS or (alike >= _ALIKE_SAMPLES and passed > ALIKE_SECONDS)):
            break
    first, first_lengths = total[1], lengths_of(total[1])
    others = [sample for name, (length, sample) in best.items() if length > first_lengths.get(name, 0)]
    unique = {id(sample): sample for sample in others}
    return [first, *unique.values()]


def _elements(collate: _Collate, samples: list[Any]) -> float:
    """Elements per sample of a batch."""
    return sum(_lengths(collate(samples)).values()) / len(samples)


def _some_of(samples: Any) -> Iterator[Any]:
    if isinstance(samples, Sized) and hasattr(samples, "__getitem__"):
        return (samples[index] for index in spread_indices(len(samples)))
    return islice(iter(samples), MOST_READ)


def _spread(samples: Any, count: int) -> list[Any]:
    """`count` samples spread over a dataset; the first ones of a stream, from its start again if needed."""
    if isinstance(samples, Sized) and hasattr(samples, "__getitem__"):
        return [samples[index * len(samples) // count] for index in range(count)]
    return list(islice(cycle(islice(iter(samples), count)), count))


def _sizes(batch: Batch) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(path, tensor.shape, tensor.dtype) for path, tensor in named_tensors(batch)]


def _lengths(sample: Any) -> dict[str, int]:
    """The number of elements of each field of a sample."""
    fields = sample.items() if isinstance(sample, Mapping) else [("", sample)]
    return {str(name): _size(value) for name, value in fields}


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, str | bytes):
        return len(value)
    if hasattr(value, "size") and not callable(value.size) and not isinstance(value.size, tuple):
        return int(value.size)  # NumPy
    if isinstance(value, Sequence):
        return sum(map(_size, value)) if value and isinstance(value[0], Sequence) else len(value)
    return 1
