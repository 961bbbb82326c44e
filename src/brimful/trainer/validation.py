"""One pass over the validation data: means of the loss and of the job's metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from brimful.batches import BatchLayout, InputMover, layout_of
from brimful.distributed.ranks import SINGLE, Ranks
from brimful.distributed.strategies import DataParallel
from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.coupled_loss import CoupledLoss, gather_embeddings, loss_of
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory, with_room
from brimful.execution.precision import autocast
from brimful.job import Batch, Job
from brimful.profiling.splitting import evaluation_mode
from brimful.results import Recovery, ValidationRecord
from brimful.settings import Precision
from brimful.trainer.data.batches import is_one_batch, validation_batches
from brimful.trainer.data.rng import RandomStream, random_state_now, restore_random_state

T = TypeVar("T")


class Validator:
    """Validates one model, again and again, whatever memory there is.

    Args:
        model: Its modules' modes are as before after each pass.
        job: Its loss, count and metrics.
        validation: One batch with all samples, or an iterable of batches.
        micro_batch_size: Samples that are computed at once, until memory runs out.
        global_batch_size: Samples of which a coupled loss is one, where None takes each batch as it is given;
            and those for which a sum is given, where None means one.
        device: Where they are copied to.
        on_recovery: Told of each time that memory ran out.
        ranks: Each computes its share of every batch.
        parallel: How they share the model; None where each has all of it.
        stream: The random numbers that the data draw from; None means the generators as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        job: Job,
        validation: Batch | Iterable[Batch],
        *,
        micro_batch_size: int,
        global_batch_size: int | None = None,
        device: torch.device,
        on_recovery: Callable[[Recovery], None],
        ranks: Ranks = SINGLE,
        parallel: DataParallel | None = None,
        stream: RandomStream | None = None,
    ) -> None:
        self._ranks = ranks
        self._parallel = parallel
        self._stream = stream
        self._model = model
        self._job = job
        self._validation = validation
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._device = device
        self._on_recovery = on_recovery
        self._buffers = BufferSnapshot(model)

    def run(
        self,
        precision: Precision,
        *,
        step: int,
        epoch: int,
        is_stopped: Callable[[], bool],
        on_samples: Callable[[int], object] = lambda _samples: None,
    ) -> ValidationRecord | None:
        """One pass, made again where memory runs out: as before, then with ever fewer samples at once.

        Args:
            precision: Of the forward pass.
            step: Optimizer steps taken.
            epoch: The epoch that ends.
            is_stopped: Asked before each micro-batch.
            on_samples: Called after each micro-batch with the number of samples so far.

        Returns:
            The means; None if `is_stopped` said so before the end.

        Raises:
            UsageError: The validation data have no samples, or nothing that the job counts.
            OutOfMemoryError: Memory ran out with one sample at a time.
        """
        random = random_state_now(self._device)
        of_data = None if self._stream is None else self._stream.state
        is_again = False
        while True:
            start = time.perf_counter()
            found = self._keeping_buffers(
                lambda: validate(
                    self._model,
                    self._job,
                    precision,
                    self._validation,
                    micro_batch_size=self._micro_batch_size,
                    global_batch_size=self._global_batch_size,
                    move=InputMover.copying_to(self._device),
                    step=step,
                    epoch=epoch,
                    is_stopped=is_stopped,
                    on_samples=on_samples,
                    ranks=self._ranks,
                    parallel=self._parallel,
                    fetching=nullcontext if self._stream is None else self._stream.drawn_from,
                )
            )
            if not isinstance(found, RanOut):
                return found
            restore_random_state(random, self._device)
            if self._stream is not None and of_data is not None:
                self._stream.state = of_data
            make_room(self._device)
            if self._parallel is not None and self._parallel.is_sharded:
                raise OutOfMemoryError(
                    f"memory ran out on rank {self._ranks.rank} in the validation after step {step}: "
                    f"{found.message}. The other ranks wait for its part of the model. Train with a smaller "
                    "micro-batch, or validate apart from training."
                )
            before = self._micro_batch_size
            if is_again:
                self._take_less(found, step)
            is_again = True
            self._on_recovery(
                Recovery(
                    step=step,
                    during="validation",
                    message=found.message,
                    before=f"{before} samples at once",
                    after=f"{self._micro_batch_size} samples at once",
                    seconds=time.perf_counter() - start,
                )
            )

    def _keeping_buffers(self, run: Callable[[], ValidationRecord | None]) -> ValidationRecord | RanOut | None:
        """What a pass came to; unless it is complete, buffers that its forward passes changed are restored."""
        with_room(self._buffers.take, during="buffers are copied before the validation")
        found: ValidationRecord | RanOut | None = None
        try:
            found = unless_out_of_memory(run)
        finally:
            if isinstance(found, ValidationRecord):
                self._buffers.release()
            else:
                self._buffers.restore()
        return found

    def _take_less(self, ran_out: RanOut, step: int) -> None:
        if self._micro_batch_size == 1:
            raise OutOfMemoryError(
                f"memory ran out in the validation after step {step}, with one sample at a time: "
                f"{ran_out.message}. Train with a smaller budget, which leaves more to the validation."
            )
        self._micro_batch_size //= 2


def validate(
    model: nn.Module,
    job: Job,
    precision: Precision,
    validation: Batch | Iterable[Batch],
    *,
    micro_batch_size: int,
    global_batch_size: int | None = None,
    move: Callable[[Batch], Batch],
    step: int,
    epoch: int,
    is_stopped: Callable[[], bool] = lambda: False,
    on_samples: Callable[[int], object] = lambda _samples: None,
    ranks: Ranks = SINGLE,
    parallel: DataParallel | None = None,
    fetching: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ValidationRecord | None:
    """The validation loss and metrics of a model, in evaluation mode and without gradients.

    The loss is averaged by what the job counts, the metrics by samples, so that neither depends on how the data
    are cut. A loss that is a sum is given for as many samples as a global batch has.

    Args:
        model: Its modules' modes are as before when this returns.
        job: Its loss, count and metrics.
        precision: Of the forward pass.
        validation: One batch with all samples, or an iterable of batches.
        micro_batch_size: Samples that are computed at once.
        global_batch_size: Samples of which a coupled loss is one, where None takes each batch as it is given;
            and those for which a sum is given, where None means one.
        move: Brings a micro-batch to the device.
        step: Optimizer steps taken.
        epoch: The epoch that ends.
        is_stopped: Asked before each micro-batch.
        on_samples: Called after each micro-batch with the number of samples so far, of this rank.
        ranks: Each computes its share of every batch.
        parallel: How they share the model; None where each has all of it.
        fetching: Around the reading of each micro-batch, not around what is computed with it.

    Returns:
        The means; None if `is_stopped` said so before the end on any rank.

    Raises:
        UsageError: The validation data have no samples, or nothing that the job counts.
    """
    if job.embed is not None:
        return _validate_coupled(
            model,
            job,
            precision,
            validation,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            move=move,
            step=step,
            epoch=epoch,
            is_stopped=is_stopped,
            on_samples=on_samples,
            fetching=fetching,
        )
    start = time.perf_counter()
    parallel = parallel or DataParallel(job)
    layout = layout_of(job, whole=micro_batch_size)
    counting = layout_of(job, whole=global_batch_size or micro_batch_size)  # whatever memory runs out
    samples, terms, loss = 0.0, 0.0, 0.0
    is_sum = job.reduction == "sum"
    sums: defaultdict[str, float] = defaultdict(float)
    with evaluation_mode(model), torch.no_grad():
        for host_batch, counts in _fetched(
            validation_batches(validation, micro_batch_size, layout, ranks), fetching
        ):
            if ranks.any(is_stopped()) if parallel.is_sharded else is_stopped():
                break
            batch_samples = counting.count(host_batch) if counts else 0
            batch_terms = batch_samples if job.count is None or not counts else float(job.count(host_batch))
            batch = move(host_batch)
            with autocast(model, precision):
                batch_loss, metrics = parallel.computed(model, partial(_loss_and_metrics, job, batch))
            samples += batch_samples
            terms += batch_terms
            if batch_terms:  # a mean over nothing is not a number
                loss += float(batch_loss) * (1 if is_sum else batch_terms)
            for name, value in metrics.items():
                sums[name] += value * batch_samples if batch_samples else 0.0
            on_samples(int(samples))
    if ranks.any(is_stopped()):
        return None
    names = sorted(sums)
    samples, terms, loss, *totals = ranks.all_reduce(samples, terms, loss, *(sums[name] for name in names))
    if not terms:
        raise UsageError(
            f"the validation data of {job.name} have {samples:.0f} samples and nothing to count in them."
        )
    return ValidationRecord(
        step=step,
        epoch=epoch,
        loss=loss * (global_batch_size or 1) / samples if is_sum else loss / terms,
        metrics={name: total / samples for name, total in zip(names, totals, strict=True)},
        samples=int(samples),
        seconds=time.perf_counter() - start,
    )


def _validate_coupled(
    model: nn.Module,
    job: Job,
    precision: Precision,
    validation: Batch | Iterable[Batch],
    *,
    global_batch_size: int | None,
    micro_batch_size: int,
    move: Callable[[Batch], Batch],
    step: int,
    epoch: int,
    is_stopped: Callable[[], bool],
    on_samples: Callable[[int], object],
    fetching: Callable[[], AbstractContextManager[None]],
) -> ValidationRecord | None:
    """The same of a loss that couples the samples: the mean over batches as large as those trained on."""
    start = time.perf_counter()
    loss = loss_of(job)
    assert isinstance(loss, CoupledLoss)
    embed, of_embeddings = partial(loss.embed, model), loss.of_embeddings
    samples, total = 0, 0.0
    sums: defaultdict[str, float] = defaultdict(float)
    with evaluation_mode(model), torch.no_grad():
        for batch in _fetched(_global_batches(validation, global_batch_size, loss.layout), fetching):
            if is_stopped():
                return None
            parts = loss.layout.split(batch, micro_batch_size)
            with autocast(model, precision):
                value = float(of_embeddings(gather_embeddings(embed, parts, move, count=loss.layout.count)))
            samples += loss.layout.count(batch)
            total += value * loss.layout.count(batch)
            for part in parts if job.metrics is not None else ():
                with autocast(model, precision):
                    metrics = _metrics(job, move(part), model)
                for name, metric in metrics.items():
                    sums[name] += metric * loss.layout.count(part)
            on_samples(samples)
    if is_stopped():
        return None
    if not samples:
        raise UsageError(f"the validation data of {job.name} have no samples.")
    return ValidationRecord(
        step=step,
        epoch=epoch,
        loss=total / samples,
        metrics={name: sums[name] / samples for name in sorted(sums)},
        samples=samples,
        seconds=time.perf_counter() - start,
    )


def _global_batches(
    validation: Batch | Iterable[Batch], global_batch_size: int | None, layout: BatchLayout
) -> Iterator[Batch]:
    """One batch with all samples in parts, or the batches that are given."""
    if global_batch_size is not None and is_one_batch(validation):
        yield from layout.split(validation, global_batch_size)
    else:
        yield from [validation] if is_one_batch(validation) else validation


def _fetched(batches: Iterator[T], fetching: Callable[[], AbstractContextManager[None]]) -> Iterator[T]:
    while True:
        with fetching():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _loss_and_metrics(job: Job, batch: Batch, model: nn.Module) -> tuple[Tensor, Mapping[str, float]]:
    return job.loss(model, batch), _metrics(job, batch, model)


def _metrics(job: Job, batch: Batch, model: nn.Module) -> dict[str, float]:
    if job.metrics is None:
        return {}
    found: Any = job.metrics(model, batch)
    if not isinstance(found, Mapping):
        raise UsageError(
            f"Job(metrics=…) returned {type(found).__name__}; it must return names and numbers, such as "
            '{"accuracy": 0.9}.'
        )
    return {_name(name): _number(name, value) for name, value in found.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise UsageError(f"Job(metrics=…) returned the name {name!r}; names of metrics must be text.")
    return name


def _number(name: str, value: Any) -> float:
    found = type(value).__name__
    try:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return float(value)
        found = f"a tensor of shape {tuple(value.shape)}"
    except (TypeError, ValueError):
        pass
    raise UsageError(f"Job(metrics=…) returned {found} for {name!r}; it must return a number for each name.")
