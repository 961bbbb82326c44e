"""Where a step's samples come from: the global batches of an epoch, and the validation batches."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from brimful.batches import BatchLayout, is_applicable, is_record, make_batch, named_tensors
from brimful.distributed.ranks import SINGLE, Ranks, processors_here
from brimful.errors import BatchError, DataError, UsageError
from brimful.execution.out_of_memory import with_room
from brimful.job import Batch, Data, Job, Samples
from brimful.results import DataLoading
from brimful.trainer.data.prefetch import read_ahead
from brimful.trainer.data.rng import generator_of

FEW_SAMPLES_FRACTION = 0.25
"""Of a global batch, below which a last batch is told of where BatchNorm normalises over it. A choice: running
statistics move a tenth of the way to a batch's, and a variance over a quarter has twice the spread."""

BATCHES_LOOKED_AT = 8
"""Of an iterable, before it is said that none is a whole global batch: buckets of lengths leave some over."""


def find_data(job: Job, data: Data | None) -> Data:
    """What to train on.

    Args:
        job: Whose own data are used if none are given.
        data: What was given, or None.

    Returns:
        The data given, else the job's own.

    Raises:
        UsageError: There is none, or it is no `Data`.
    """
    if data is None:
        if job.data is None:
            raise UsageError(
                f"{job.name} has no data to train on. Give it as Trainer(job, plan, data=Data(train=…)) "
                "or as Job(data=lambda: Data(train=…)); `train` is a batch with all samples, or a DataLoader."
            )
        data = job.data() if callable(job.data) else job.data
    if not isinstance(data, Data):
        raise UsageError(
            f"the data of {job.name} are a {type(data).__name__}; wrap them: Data(train=…, validation=…)."
        )
    return data


class Batches:
    """The global batches of each epoch.

    A batch that holds every sample is shuffled anew for each epoch and cut into global batches; what is left
    over at the end makes a smaller one. `Samples` make their batches themselves. Of an iterable, every batch is
    a global batch, whatever its size; a `set_epoch` that it, its samplers or its dataset have is told the
    epoch.

    Args:
        train: One batch with all samples, `Samples`, or an iterable of batches. A tensor, mapping, tuple or
            dataclass is one batch; a list is one if a tensor is directly in it, else a list of batches.
        global_batch_size: Samples per global batch.
        seed: Decides the order of the samples, with the epoch.
        layout: How the samples of a batch are found.
        device: Where batches go. For a GPU, those cut from one batch are read ahead: the host's processors have
            time for that, and on a CPU the step would lack what reading takes.
        warns: Of batches that are no global batch; of several ranks one does.

    Raises:
        UsageError: `train` is no data.
        BatchError: It is a batch without samples, or whose entries disagree on how many.
    """

    def __init__(
        self,
        train: Batch | Iterable[Batch] | Samples,
        *,
        global_batch_size: int,
        seed: int,
        layout: BatchLayout = BatchLayout(),  # noqa: B008 - immutable
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        warns: bool = True,
    ) -> None:
        _check_data("train", train)
        self._train = train
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._layout = layout
        self._samples = _count_if_known(train, layout)
        is_on_host = is_one_batch(train) and all(tensor.is_cpu for _, tensor in named_tensors(train))
        self._device = device
        self._reads_ahead = device.type == "cuda" and is_on_host
        self._warns = warns
        self._example: Batch | None = None

    def expect(self, example: Batch | None) -> None:
        """Be told what a batch of the job's is, to refuse single samples that an iterable gives.

        Args:
            example: None if nothing is to be refused.
        """
        self._example = example

    def warn_small_batches(self, model: nn.Module) -> None:
        """Warn if no batch can be a whole global batch, or if BatchNorm will normalise over a few samples.

        Args:
            model: What is trained.
        """
        if self._samples is None:
            return
        if self._samples < self._global_batch_size:
            warnings.warn(
                f"there are {self._samples} samples to train on, fewer than a global batch of "
                f"{self._global_batch_size}: each epoch is one smaller step. Take a smaller global batch.",
                stacklevel=5,
            )
            return
        left_over = self._samples % self._global_batch_size
        normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
        if normalises and _leaves_few(self._samples, self._global_batch_size):
            nearest = sorted(
                range(self._global_batch_size // 2 + 1, 2 * self._global_batch_size),
                key=lambda size: abs(size - self._global_batch_size),
            )
            better = next((size for size in nearest if not _leaves_few(self._samples, size)), None)
            way_out = "" if better is None else f" A global batch of {better} leaves none over, or enough."
            warnings.warn(
                f"the last batch of each epoch has {left_over} of {self._global_batch_size} samples, and "
                f"BatchNorm normalises over those alone: that step may undo much.{way_out}",
                stacklevel=5,
            )

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch; None if the data do not say."""
        if self._samples is not None:
            return math.ceil(self._samples / self._global_batch_size)
        return _length(self._train)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        """The global batches of one epoch, on the host.

        Args:
            epoch: At least 0; the same number gives the same order.
            skip: Batches to leave out at the start. Those of an iterable are read for that: what they draw from
                random generators is drawn before this returns.

        Returns:
            Global batches.

        Raises:
            UsageError: The data give no batch.
            DataError: They give fewer than are to be skipped.
        """
        if _are_samples(self._train):
            return iter(self._train.batches(self._global_batch_size, seed=self._seed, epoch=epoch, skip=skip))
        if self._samples is None:
            return self._of_iterable(cast("Iterable[Batch]", self._train), epoch, skip)
        order = torch.randperm(self._samples, generator=generator_of(self._seed, epoch))
        parts = order.split(self._global_batch_size)[skip:]
        if self._reads_ahead:
            return read_ahead(parts, self._cut, self._device)
        return map(self._cut, parts)

    def _cut(self, indices: Tensor) -> Batch:
        return with_room(
            partial(self._layout.take, self._train, indices), during="a batch is cut from the training data"
        )

    def _of_iterable(self, train: Iterable[Batch], epoch: int, skip: int) -> Iterator[Batch]:
        _tell_epoch(train, epoch)
        batches = iter(train)
        for read in range(skip):
            if next(batches, None) is None:
                raise DataError(
                    f"the training data ({type(self._train).__name__}) gave {read} batches in epoch {epoch}, "
                    f"of which {skip} were trained on before: they are not those that the run was begun with."
                )
        return self._sized(batches if skip else self._at_least_one(batches, epoch))

    def _sized(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same; warns once if one is more than a global batch, or if none is a whole one."""
        largest = count = 0
        for batch in batches:
            largest, count = max(largest, self._layout.count(batch)), count + 1
            if largest > self._global_batch_size or count == BATCHES_LOOKED_AT:
                self._tell_size(largest)
            yield batch
        if count > 1:
            self._tell_size(largest)

    def _tell_size(self, largest: int) -> None:
        if largest == self._global_batch_size or not self._warns:
            return
        self._warns = False  # once is enough
        warnings.warn(
            f"the training data give batches of {largest} samples, and the global batch is "
            f"{self._global_batch_size}: each batch is one step, whatever its size. What was planned, "
            "its time above all, is of another step. Make the two alike.",
            stacklevel=2,
        )

    def _at_least_one(self, batches: Iterator[Batch], epoch: int) -> Iterator[Batch]:
        empty = True
        for batch in batches:
            if empty:
                _check_no_sample("train", batch, self._example)
            empty = False
            yield batch
        if empty:
            raise UsageError(
                f"the training data ({type(self._train).__name__}) gave no batch in epoch {epoch}. They must "
                "give all batches each time they are iterated: use a DataLoader or a list, not a generator."
            )


def validation_batches(
    validation: Batch | Iterable[Batch], micro_batch_size: int, layout: BatchLayout, ranks: Ranks = SINGLE
) -> Iterator[tuple[Batch, bool]]:
    """The validation samples of this rank in micro-batches, in their own order.

    Args:
        validation: One batch with all samples, or an iterable of batches.
        micro_batch_size: Most samples of each.
        layout: How the samples of a batch are found.
        ranks: Among which each batch is divided.

    Yields:
        Micro-batches on the host, and whether they count.
    """
    for batch in [validation] if is_one_batch(validation) else validation:
        yield from ranks.micro_batches(batch, micro_batch_size, layout)


def check_validation(validation: Batch | Iterable[Batch], layout: BatchLayout) -> None:
    """Check that data can be validated with.

    Args:
        validation: What `Data` was given.
        layout: How the samples of a batch are found.

    Raises:
        UsageError: They are no data.
        BatchError: They are a batch without samples, or whose entries disagree on how many.
    """
    _check_data("validation", validation)
    if is_one_batch(validation):
        _check_some(validation, layout)


def refuse_single_samples(job: Job, data: Data, batches: Batches, samples: int) -> None:
    """Check that lists and other iterables give batches: a list for validation now, those to train on later.

    Args:
        job: Its `batch` says what a batch is; it may draw random numbers for that. One that makes none of so
            many samples checks nothing.
        data: What was given.
        batches: Of the training data.
        samples: Of a batch that the job can make.

    Raises:
        UsageError: The validation data are a list of single samples.
    """
    given = [each for each in (data.train, data.validation) if each is not None]
    if all(is_one_batch(each) or _are_samples(each) or _makes_batches(each) for each in given):
        return
    with suppress(BatchError):
        example = make_batch(job, samples)
        batches.expect(example)
        if isinstance(data.validation, list) and data.validation and not is_one_batch(data.validation):
            _check_no_sample("validation", data.validation[0], example)


def _makes_batches(data: object) -> bool:
    """Whether data are a loader that was not told to leave samples single."""
    return isinstance(data, DataLoader) and data.batch_sampler is not None


def _check_no_sample(name: str, batch: Batch, example: Batch | None) -> None:
    """A single sample has, in each of its tensors, one dimension less than a batch."""
    if example is None:
        return
    expected = {path: tensor for path, tensor in named_tensors(example) if tensor.dim()}
    found = {path: tensor for path, tensor in named_tensors(batch) if path in expected}
    if found and all(tensor.dim() == expected[path].dim() - 1 for path, tensor in found.items()):
        path, tensor = next(iter(found.items()))
        raise UsageError(
            f"Data({name}=…) gives single samples: {path} is of shape {tuple(tensor.shape)}, and "
            f"job.batch gives {tuple(expected[path].shape)}. Wrap it: DataLoader(samples, batch_size=…, "
            "shuffle=…) gives batches."
        )


def data_loading(train: Batch | Iterable[Batch]) -> DataLoading | None:
    """How the batches of training data come to it.

    Args:
        train: What `Data` was given.

    Returns:
        None if they are one batch, or samples that are in memory.
    """
    if is_one_batch(train) or (_are_samples(train) and not hasattr(train, "workers")):
        return None
    loader = train if isinstance(train, DataLoader) else None
    return DataLoading(
        workers=getattr(train, "workers", None) if loader is None else loader.num_workers,
        persistent_workers=loader is None or loader.persistent_workers,
        pins_memory=loader is None or loader.pin_memory,  # nothing else can be asked to
        processors=processors_here(),
    )


def is_one_batch(data: Batch | Iterable[Batch]) -> bool:
    """Whether `data` is one batch with all samples, rather than an iterable of batches."""
    if _are_samples(data):
        return False
    if isinstance(data, list):
        return any(isinstance(entry, Tensor) for entry in data)
    if isinstance(data, Tensor | tuple | Mapping) or is_applicable(data) or dataclasses.is_dataclass(data):
        return True
    return is_record(data) and not hasattr(type(data), "__iter__")  # a loader may have a method `to`


def _are_samples(data: object) -> TypeGuard[Samples]:
    """Whether data make their batches themselves; a loader may have a list that is called `batches`."""
    return isinstance(data, Samples) and callable(data.batches)


def _count_if_known(train: Batch | Iterable[Batch] | Samples, layout: BatchLayout) -> int | None:
    """Samples in an epoch; None of an iterable, whose batches are as they come."""
    if not _are_samples(train):
        return _check_some(train, layout) if is_one_batch(train) else None
    samples = _length(train)
    if not samples:
        found = (
            "do not say how many samples an epoch has: len() of them raises"
            if samples is None
            else "have no samples"
        )
        raise UsageError(f"the training data ({type(train).__name__}) {found}.")
    return samples


def _length(data: object) -> int | None:
    """How many samples or batches data have; None if they do not tell.

    A class may have a length and its objects none, as a DataLoader of an IterableDataset: `len` is a TypeError.
    """
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _check_data(name: str, data: Any) -> None:
    if isinstance(data, Dataset):
        raise UsageError(
            f"Data({name}=…) is a {type(data).__name__}, which gives single samples. "
            "Wrap it: DataLoader(dataset, batch_size=…, shuffle=…) gives batches."
        )
    if name == "train" and _are_samples(data):
        return
    sampler = getattr(data, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise UsageError(
            f"Data({name}=…) has a DistributedSampler, which gives this rank a part of the samples. Every rank "
            "reads the whole global batch and brimful divides it: leave the sampler out (shuffle=True)."
        )
    if not is_one_batch(data) and not isinstance(data, Iterable):
        raise UsageError(
            f"Data({name}=…) is a {type(data).__name__}. Give one batch with all samples (nested dicts, lists "
            "and tuples of tensors), or an iterable of batches such as a DataLoader."
        )


def _leaves_few(samples: int, global_batch_size: int) -> bool:
    """Whether the last batch of an epoch is a small part of one."""
    return 0 < samples % global_batch_size < global_batch_size * FEW_SAMPLES_FRACTION


def _check_some(batch: Batch, layout: BatchLayout) -> int:
    reason = layout.why_whole(batch)
    if reason is not None:
        raise BatchError(
            f"the data are one batch, which cannot be split into global batches: {reason} "
            "A DataLoader works too."
        )
    samples = layout.count(batch)
    if samples == 0:
        raise UsageError("the data have no samples: the first dimension of their tensors is 0.")
    return samples


def _tell_epoch(data: Iterable[Batch], epoch: int) -> None:
    """Tell data which epoch it is, where that decides their order: a resumed run gets the same again."""
    parts: list[Any] = [data]
    if isinstance(data, DataLoader) and not hasattr(data, "set_epoch"):  # Accelerate's hand it on themselves
        parts = [data.batch_sampler, data.sampler, data.dataset]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
