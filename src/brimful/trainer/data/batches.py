"""The global batches of an epoch, and the validation batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, Dataset

from brimful.batches import BatchLayout, are_samples, is_one_batch, make_batch, map_tensors, named_tensors
from brimful.distributed.ranks import SINGLE, Ranks, processors_here
from brimful.errors import BatchError, DataError, UsageError
from brimful.execution.out_of_memory import with_room
from brimful.job import Batch, Data, Job, Samples
from brimful.results import DataLoading
from brimful.trainer.data.rng import generator_of
from brimful.trainer.data.undivided import undivided

T = TypeVar("T")

FEW_SAMPLES_FRACTION = 0.25
"""Warn if BatchNorm normalises over a last batch of less than this fraction of a global batch. A choice:
running statistics move a tenth of the way to a batch's, and a variance over a quarter has twice the spread."""

BATCHES_LOOKED_AT = 8
"""Read this many batches of an iterable before warning that none is a whole global batch: length buckets may
begin with smaller ones."""


def find_data(job: Job, data: Data | None) -> Data:
    """The data given to the trainer, else the job's own; a `DistributedSampler` divides none of them."""
    if data is None:
        if job.data is None:
            raise UsageError(
                f"{job.name} has no data to train on. Pass data=Data(train=…), or give "
                "the job data=lambda: Data(train=…); `train` is a batch with all samples, or a DataLoader."
            )
        data = job.data() if callable(job.data) else job.data
    if not isinstance(data, Data):
        raise UsageError(
            f"the data of {job.name} are a {type(data).__name__}; wrap them: Data(train=…, validation=…)."
        )
    divided = ("train", "validation", "training_sample")
    return replace(data, **{name: undivided(getattr(data, name)) for name in divided})


class Batches:
    """The global batches of each epoch.

    A batch with all samples is shuffled for each epoch and cut into global batches; the last one may be
    smaller. `Samples` make their batches themselves. Each batch of an iterable is a global batch, whatever its
    size; if the iterable, its samplers or its dataset have `set_epoch`, it is called with the epoch.

    In `train` a tensor, mapping, tuple or dataclass is one batch; a list is one if a tensor is directly in it,
    else a list of batches. Batches for a GPU, if cut from one batch, are read ahead: the host has time for
    that; on a CPU reading would slow the step down. Only a rank that `warns` warns of batches of another size.
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
        """Refuse single samples from an iterable by comparing them with a batch; None refuses nothing."""
        self._example = example

    def warn_small_batches(self, model: nn.Module) -> None:
        """Warn if no batch can be a whole global batch, or if BatchNorm will normalise over a few samples."""
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
    def last_samples(self) -> int | None:
        """Samples of the last global batch of an epoch; None if their number is not known."""
        if self._samples is None:
            return None
        return self._samples % self._global_batch_size or self._global_batch_size

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch; None if the data do not report their number."""
        if self._samples is not None:
            return math.ceil(self._samples / self._global_batch_size)
        return _length(self._train)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[Batch]:
        """The global batches of one epoch, on the host; the same `epoch` gives the same order.

        The first `skip` batches are skipped. An iterable is read to skip them, so it draws their random numbers
        before this returns.
        """
        if are_samples(self._train):
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
        _set_epoch(train, epoch)
        batches = iter(train)
        for read in range(skip):
            if next(batches, None) is None:
                raise DataError(
                    f"the training data ({type(self._train).__name__}) gave {read} batches in epoch {epoch}, "
                    f"of which {skip} were trained on before: they are not those that the run was begun with."
                )
        return self._sized(batches if skip else self._at_least_one(batches, epoch))

    def _sized(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on; warn once if one is larger than a global batch, or if all are smaller."""
        largest = count = 0
        for batch in batches:
            largest, count = max(largest, self._layout.count(batch)), count + 1
            if largest > self._global_batch_size or count == BATCHES_LOOKED_AT:
                self._warn_other_size(largest)
            yield batch
        if count > 1:
            self._warn_other_size(largest)

    def _warn_other_size(self, largest: int) -> None:
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


def read_ahead(places: Iterable[T], read: Callable[[T], Batch], device: torch.device) -> Iterator[Batch]:
    """Read batches in a thread, in the order of `places`, each while the one before it is used.

    `read` returns a batch on the host. It must not draw random numbers: they would come between those of a
    step. If the device is a GPU the batch is pinned, which makes its copy asynchronous. An error in `read` is
    raised here.
    """
    is_gpu = device.type == "cuda"
    # otherwise pinning would create a context on the first GPU (torch's own pinning thread does the same)
    on_device = partial(torch.cuda.set_device, device) if is_gpu else None
    with ThreadPoolExecutor(1, "brimful-data", initializer=on_device) as thread:
        coming: Future[Batch] | None = None
        for place in places:
            after = thread.submit(_pinned, read, place) if is_gpu else thread.submit(read, place)
            if coming is not None:
                yield coming.result()
            coming = after
        if coming is not None:
            yield coming.result()


def _pinned(read: Callable[[T], Batch], place: T) -> Batch:
    return map_tensors(read(place), Tensor.pin_memory)


def validation_batches(
    validation: Batch | Iterable[Batch], micro_batch_size: int, layout: BatchLayout, ranks: Ranks = SINGLE
) -> Iterator[tuple[Batch, bool]]:
    """Split the validation data into this rank's micro-batches, on the host, each with whether it counts.

    A rank with too few samples repeats samples that do not count; see `Ranks.micro_batches`.
    """
    for batch in [validation] if is_one_batch(validation) else validation:
        yield from ranks.micro_batches(batch, micro_batch_size, layout)


def check_validation(
    validation: Batch | Iterable[Batch], layout: BatchLayout, *, name: str = "validation"
) -> None:
    """Check `Data.validation`, or the field of `Data` that `name` names."""
    _check_data(name, validation)
    if is_one_batch(validation):
        _check_some(validation, layout)


def refuse_single_samples(job: Job, data: Data, batches: Batches, samples: int) -> None:
    """Check that lists and other iterables give batches: a validation list now, training data when it is read.

    They are compared with a batch of `samples` samples that the job makes, which may draw random numbers. If
    that raises BatchError, nothing is checked.
    """
    given = [each for each in (data.train, data.validation) if each is not None]
    if all(is_one_batch(each) or are_samples(each) or _makes_batches(each) for each in given):
        return
    with suppress(BatchError):
        example = make_batch(job, samples)
        batches.expect(example)
        if isinstance(data.validation, list) and data.validation and not is_one_batch(data.validation):
            _check_no_sample("validation", data.validation[0], example)


def _makes_batches(data: object) -> bool:
    """Whether data are a DataLoader that makes batches."""
    return isinstance(data, DataLoader) and data.batch_sampler is not None


def _check_no_sample(name: str, batch: Batch, example: Batch | None) -> None:
    """Raise UsageError for a single sample: each of its tensors has one dimension less than in a batch."""
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
    """Describe how `Data.train` is loaded; None if it is one batch, or samples in memory."""
    if is_one_batch(train) or (are_samples(train) and not hasattr(train, "workers")):
        return None
    loader = train if isinstance(train, DataLoader) else None
    return DataLoading(
        workers=getattr(train, "workers", None) if loader is None else loader.num_workers,
        persistent_workers=loader is None or loader.persistent_workers,
        pins_memory=loader is None or loader.pin_memory,  # other data have no such option
        processors=processors_here(),
    )


def _count_if_known(train: Batch | Iterable[Batch] | Samples, layout: BatchLayout) -> int | None:
    """Number of samples in an epoch; None for an iterable of batches."""
    if not are_samples(train):
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
    """Number of samples or batches; None if the data do not report it.

    A class may have `__len__` although `len` of an object raises TypeError: a DataLoader of an IterableDataset.
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
    if name == "train" and are_samples(data):
        return
    for sampler in _samplers(data):
        parts = getattr(sampler, "num_replicas", None) or getattr(sampler, "num_processes", None)
        if isinstance(parts, int) and parts > 1:
            raise UsageError(
                f"Data({name}=…) has a {type(sampler).__name__}, which gives this rank one of {parts} parts of "
                "the samples. Every rank reads the whole global batch and brimful divides it. Write "
                "DataLoader(dataset, batch_size=…, shuffle=True), with the global batch size and no sampler."
            )
    if not is_one_batch(data) and not isinstance(data, Iterable):
        raise UsageError(
            f"Data({name}=…) is a {type(data).__name__}. Give one batch with all samples (nested dicts, lists "
            "and tuples of tensors), or an iterable of batches such as a DataLoader."
        )


def _leaves_few(samples: int, global_batch_size: int) -> bool:
    """Whether the last batch of an epoch is a small fraction of a global batch."""
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


def _set_epoch(data: Iterable[Batch], epoch: int) -> None:
    """Call `set_epoch` of data whose order depends on the epoch, so that a resumed run gets the same order."""
    parts: list[Any] = [data]
    if isinstance(data, DataLoader) and not hasattr(data, "set_epoch"):  # Accelerate's loaders pass it on
        parts = [*_samplers(data), data.dataset]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _samplers(data: object) -> list[Any]:
    """The samplers of a loader, and those inside them, each once."""
    found: list[Any] = []
    owners = [data]
    while owners:
        owner = owners.pop()
        for sampler in (getattr(owner, "batch_sampler", None), getattr(owner, "sampler", None)):
            if sampler is not None and not any(sampler is other for other in found):
                found.append(sampler)
                owners.append(sampler)
    return found
