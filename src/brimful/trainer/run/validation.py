"""Validates a model: the means of the loss and of the job's metrics over the validation data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from brimful.batches import BatchLayout, InputMover, is_one_batch, layout_of
from brimful.errors import OutOfMemoryError, UsageError
from brimful.execution.buffers import BufferSnapshot
from brimful.execution.coupled_loss import CoupledLoss, gather_embeddings, loss_of
from brimful.execution.out_of_memory import RanOut, with_room
from brimful.execution.precision import autocast
from brimful.execution.retries import Retries
from brimful.job import Batch, Data, Job
from brimful.profiling.splitting import evaluation_mode
from brimful.results import ValidationRecord
from brimful.trainer.data.batches import validation_batches
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.run.metrics import MetricSums, metrics_of
from brimful.trainer.state import TrainState, whole_model

T = TypeVar("T")


class Validator:
    """Validates the model of a run, or its moving average, and logs the result.

    Validation begins with the micro-batch size in force, and halves it when memory runs out twice. Each pass
    restores the modes of the modules. `data` has `validation`, and perhaps a `training_sample`: each one batch
    with all samples, or an iterable of batches.
    """

    def __init__(self, config: RunConfig, state: TrainState, data: Data, logger: RunLogger) -> None:
        self._config = config
        self._state = state
        self._job = config.job
        self._data = data
        self._logger = logger
        self._retries = Retries(
            state.settings.micro_batch_size,
            state.device,
            _at_once,
            during="validation",
            way_out="Train with a smaller budget, which leaves more to the validation.",
            ends=(UsageError,),
            on_recovery=logger.add_recovery,
        )
        self._buffers = BufferSnapshot(state.model)

    def run(self, *, is_stopped: Callable[[], bool]) -> ValidationRecord | None:
        """Validate, and log the result; write the weights if they are the best so far.

        `is_stopped` is called for each batch; True stops the validation on all ranks, which then returns None.
        """
        state, run_dir = self._state, self._config.run_dir
        state.ranks.broadcast_buffers(state.model)
        with nullcontext() if state.average is None else state.average.in_place():
            record = self._validated(self._data.validation, is_stopped)
            if record is not None and self._data.training_sample is not None:
                of_training = self._validated(self._data.training_sample, is_stopped)
                record = None if of_training is None else _with_training_sample(record, of_training)
            if record is None:
                return None
            is_written = run_dir is not None and self._logger.history.is_best(record)
            self._logger.add_validation(record, whole_model(state, run_dir) if is_written else state.model)
        return record

    def _validated(
        self, samples: Batch | Iterable[Batch], is_stopped: Callable[[], bool]
    ) -> ValidationRecord | None:
        """Run a pass; repeat it when memory runs out, and halve the micro-batch from the second time on."""
        state, stream = self._state, self._state.stream.randomness
        random, of_data = random_state_now(state.device), stream.state

        def attempt() -> ValidationRecord | None:
            each = _Pass(
                state=state,
                job=self._job,
                validation=samples,
                micro_batch_size=self._retries.how,
                is_stopped=is_stopped,
                on_samples=self._logger.progress.show_validating,
            )
            return self._keeping_buffers(each.record)

        def undo(_ran_out: RanOut) -> None:
            restore_random_state(random, state.device)
            stream.state = of_data
            if state.parallel.is_sharded:
                raise OutOfMemoryError(f"the other ranks wait for rank {state.ranks.rank}'s part of the model")

        self._retries.step = state.step
        return self._retries.run(attempt, _half, undo)

    def _keeping_buffers(self, run: Callable[[], ValidationRecord | None]) -> ValidationRecord | None:
        """Run a pass; if it is not completed, restore the buffers that its forward passes changed."""
        with_room(self._buffers.take, during="buffers are copied before the validation")
        record = None
        try:
            found = run()
            self._buffers.end_of_forward()
            record = found
        finally:
            if record is None:
                self._buffers.restore()
            else:
                self._buffers.release()
        return record


def _at_once(samples: int) -> str:
    return f"{samples} sample{'' if samples == 1 else 's'} at once"


def _half(samples: int) -> int:
    if samples == 1:
        raise OutOfMemoryError("it takes one sample at a time already")
    return samples // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pass over the validation data, in evaluation mode and without gradients.

    The loss is averaged over what the job counts, the metrics over samples: neither depends on how the data are
    split. A loss that is a sum is scaled to the number of samples in a global batch.
    """

    state: TrainState
    job: Job
    validation: Batch | Iterable[Batch]
    micro_batch_size: int
    is_stopped: Callable[[], bool]
    on_samples: Callable[[int], object]

    def record(self) -> ValidationRecord | None:
        """The means over all data; None if the run is stopped meanwhile."""
        start = time.perf_counter()
        state, job = self.state, self.job
        samples, terms, loss = 0.0, 0.0, 0.0
        sums = MetricSums(job)
        parts = self._parts(sums) if job.embed is None else self._coupled_parts(sums)
        with evaluation_mode(state.model), torch.no_grad():
            for part_samples, part_terms, part_loss in parts:
                samples += part_samples
                terms += part_terms
                loss += part_loss
                self.on_samples(int(samples))
        if state.ranks.any(self.is_stopped()):
            return None
        samples, terms, loss = state.ranks.all_reduce(samples, terms, loss)
        if not terms:
            found = "no samples" if job.embed else f"{samples:.0f} samples and nothing to count in them"
            raise UsageError(f"the validation data of {job.name} have {found}.")
        return ValidationRecord(
            step=state.step,
            epoch=state.stream.position.epoch,
            loss=loss * state.settings.global_batch_size / samples if self._is_sum else loss / terms,
            metrics=sums.metrics(samples, state.ranks),
            samples=int(samples),
            seconds=time.perf_counter() - start,
        )

    @property
    def _is_sum(self) -> bool:
        return self.job.reduction == "sum" and self.job.embed is None

    def _parts(self, sums: MetricSums) -> Iterator[tuple[float, float, float]]:
        """Samples, terms and summed loss of each micro-batch of a loss that is a mean or a sum over samples."""
        state, job = self.state, self.job
        ranks, parallel = state.ranks, state.parallel
        layout = layout_of(job, whole=self.micro_batch_size)
        counting = layout_of(job, whole=state.settings.global_batch_size)  # independent of the micro-batch size
        move = InputMover.copying_to(state.device)
        batches = validation_batches(self.validation, self.micro_batch_size, layout, ranks)
        for host_batch, counts in _fetched(batches, state.stream.randomness.drawn_from):
            if ranks.any(self.is_stopped()) if parallel.is_sharded else self.is_stopped():
                return
            samples = counting.count(host_batch) if counts else 0
            terms = samples if job.count is None or not counts else float(job.count(host_batch))
            batch = state.executor.in_format(move(host_batch))
            with autocast(state.model, state.settings.precision):
                loss, metrics = parallel.computed(state.model, partial(_loss_and_metrics, job, batch))
            sums.add(metrics, samples)
            # a mean over nothing is not a number
            yield samples, terms, float(loss) * (1 if self._is_sum else terms) if terms else 0.0

    def _coupled_parts(self, sums: MetricSums) -> Iterator[tuple[float, float, float]]:
        """Samples, twice, and summed loss of each global batch, whose loss couples its samples."""
        state, job = self.state, self.job
        loss = loss_of(job)
        assert isinstance(loss, CoupledLoss)
        embed, of_embeddings = partial(loss.embed, state.model), loss.of_embeddings
        to_device = InputMover.copying_to(state.device)

        def move(part: Batch) -> Batch:
            return state.executor.in_format(to_device(part))

        batches = _global_batches(self.validation, state.settings.global_batch_size, loss.layout)
        for batch in _fetched(batches, state.stream.randomness.drawn_from):
            if self.is_stopped():
                return
            samples = loss.layout.count(batch)
            parts = loss.layout.split(batch, self.micro_batch_size)
            with autocast(state.model, state.settings.precision):
                gathered = gather_embeddings(embed, parts, move, count=loss.layout.count)
                value = float(of_embeddings(gathered))
                if job.measures_embeddings:
                    sums.add(metrics_of(job, gathered), samples)
            for part in parts if job.metrics is not None and not job.measures_embeddings else ():
                with autocast(state.model, state.settings.precision):
                    metrics = metrics_of(job, state.model, move(part))
                sums.add(metrics, loss.layout.count(part))
            yield samples, samples, value * samples


def _global_batches(
    validation: Batch | Iterable[Batch], global_batch_size: int, layout: BatchLayout
) -> Iterator[Batch]:
    """Split one batch with all samples into global batches; pass on the batches of an iterable."""
    yield from layout.split(validation, global_batch_size) if is_one_batch(validation) else validation


def _fetched(batches: Iterator[T], fetching: Callable[[], AbstractContextManager[None]]) -> Iterator[T]:
    while True:
        with fetching():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _loss_and_metrics(job: Job, batch: Batch, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    return job.loss(model, batch), metrics_of(job, model, batch)


def _with_training_sample(validated: ValidationRecord, of_training: ValidationRecord) -> ValidationRecord:
    """Add the loss and metrics of training samples to those of a validation."""
    added = {"loss": of_training.loss, **of_training.metrics}
    return replace(
        validated,
        metrics={**validated.metrics, **{f"training_{name}": value for name, value in added.items()}},
        seconds=validated.seconds + of_training.seconds,
    )
