"""The result of a training run: every step, every validation, and predicted beside measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from brimful.codec import (
    ALWAYS_WRITTEN,
    JsonForm,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    UnboundedFloat,
    fields_of_version,
    from_json_document,
    json_form,
    to_json_document,
)
from brimful.results.equivalence import EquivalenceReport
from brimful.results.measurement import OpTemporary
from brimful.results.self_correction import SelfCorrection
from brimful.settings import Settings
from brimful.utils.display import PrintedResult

RESULT_VERSION = 3

WAITING_FRACTION = 0.05
"""Fraction of the time spent waiting for data from which reports mention it. A choice."""


class StopReason(StrEnum):
    """Why a training run ended."""

    FINISHED = "finished"
    """All requested steps are done."""
    NOT_IMPROVING = "not improving"
    """Early stopping: the validation loss has not improved for `patience` validations."""
    INTERRUPTED = "interrupted"
    """Ctrl-C or `Trainer.stop`: the current step was finished and the run saved."""
    TERMINATED = "terminated"
    """SIGTERM, as schedulers send it; handled like an interrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: PositiveInt
    """Number of this step in the run, from 1."""
    epoch: PositiveInt
    """Number of the epoch, from 1."""
    loss: UnboundedFloat
    """Mean over the global batch, before the update."""
    gradient_norm: UnboundedFloat
    """2-norm of all gradients, before clipping."""
    seconds: NonNegativeFloat
    """Time from the batch on the host to the updated parameters, without loading the batch."""
    samples: NonNegativeInt
    updated: bool
    """False if the update was skipped: fp16 gradients overflowed, or the loss was not finite."""
    data_seconds: NonNegativeFloat = field(default=0.0, metadata=ALWAYS_WRITTEN)
    """Time spent waiting for the batch before the step."""
    memory_measured: bool = False
    """Whether peak memory was measured in this step, which slows it down."""
    terms: UnboundedFloat = 0.0
    """Number of what the loss averages over: what `Job.count` counts in the global batch, else its samples."""
    mfu: UnboundedFloat | None = None
    """Model FLOPs utilisation: FLOPs of forward and backward, without recomputation, over the device's peak
    FLOPs in the time of the step and the waiting before it. None if either is not known, or the batch has
    another shape than the plan's."""
    learning_rate: UnboundedFloat | None = None
    """Learning rate of the first parameter group in this step; None if it has none, or it is on a GPU."""

    @property
    def total_seconds(self) -> float:
        """Time of the step and of waiting for its batch."""
        return self.seconds + self.data_seconds

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """One pass over the validation data."""

    step: NonNegativeInt
    """Number of optimizer steps before this validation."""
    epoch: NonNegativeInt
    """The epoch in which it is, or which it ends, from 1."""
    loss: UnboundedFloat
    """Mean over all validation data, of what `Job.count` counts."""
    metrics: Mapping[str, UnboundedFloat]
    """The job's metrics by name, as means over the validation samples."""
    samples: NonNegativeInt
    seconds: NonNegativeFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch that has ended."""

    epoch: PositiveInt
    """Number of the epoch, from 1."""
    step: PositiveInt
    """Number of optimizer steps of the run at its end."""
    seconds: NonNegativeFloat | None
    """Time of its steps and of waiting for their batches, without validation and saving; None if the records of
    some of its steps are lost."""
    measured_peak_allocated_bytes: NonNegativeInt | None
    """The highest peak in this epoch, of all steps on CUDA and of the measured ones on a CPU. None if none was
    measured, and for an epoch that was resumed in the middle. The next two likewise."""
    measured_peak_reserved_bytes: NonNegativeInt | None
    measured_peak_device_bytes: NonNegativeInt | None
    """None on a CPU, where no driver reports it."""
    average_bytes: NonNegativeInt = 0
    """Memory of the moving average of weights, which is beside every step and in no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A recovery from running out of memory: what happened, and how training continued."""

    step: NonNegativeInt
    """The step, or the last step before the validation, from 1."""
    during: str
    """"step", "validation", "reading" a batch, "rehearsal" of the longest batch, or "allocator" if the
    allocator had to search for memory. On one of several ranks, after which the run is launched again: "step on
    rank N", "rehearsal on rank N" or "update on rank N"."""
    message: str
    """Message of the error."""
    before: str
    """The settings before the recovery, in one line."""
    after: str
    """The settings after the recovery; the same if releasing cached memory was enough."""
    seconds: NonNegativeFloat
    """Time lost, including the time to plan again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoading:
    """How the run loads batches that are read one after another."""

    workers: NonNegativeInt | None
    """Worker processes that read ahead; None if the data are not a DataLoader and do not report them."""
    persistent_workers: bool
    """Whether workers persist across epochs."""
    pins_memory: bool
    processors: PositiveInt
    """Processors that this process may use, divided by the number of ranks on the machine."""

    def needed_workers(self, steps: Sequence[StepRecord]) -> int | None:
        """The number of workers, each with its own processor, with which training would hardly wait for data.

        Without workers, a step waits for the whole reading of its batch. n workers that are too slow deliver n
        batches in the time in which each of them reads one, so reading takes n · (step + waiting). To deliver a
        batch in the time of a step, reading / step workers are needed, less the waiting that is acceptable.

        The number is at least 1; None without a DataLoader, if training hardly waited, or with too few steps.
        The first step of each epoch is ignored, because workers start in it.
        """
        steady = steady_steps(steps)
        if self.workers is None or not steady or waiting_fraction(steady) < WAITING_FRACTION:
            return None
        step = statistics.fmean(record.seconds for record in steady)
        waiting = statistics.fmean(record.data_seconds for record in steady)
        reading = self.workers * (step + waiting) if self.workers else waiting
        return max(math.ceil((1 - WAITING_FRACTION) * reading / step), self.workers + 1)


def steady_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps without the first of each epoch and those in which memory was measured."""
    return [
        later
        for earlier, later in pairwise(steps)
        if later.epoch == earlier.epoch and not later.memory_measured
    ]


def median_step_seconds(steps: Sequence[StepRecord], global_batch_size: int) -> float | None:
    """Median over the steps with a full batch, except the first and the one whose memory was measured."""
    steady = [step for step in steps[1:] if step.updated and not step.memory_measured]
    full_samples = global_batch_size
    if all(step.samples != full_samples for step in steady):  # a DataLoader with batches of its own size
        full_samples = max((step.samples for step in steady), default=0)
    seconds = [step.seconds for step in steady if step.samples == full_samples]
    return statistics.median(seconds) if seconds else None


def waiting_fraction(steps: Sequence[StepRecord]) -> float:
    """Fraction of the time of some steps spent waiting for data."""
    total = sum(step.total_seconds for step in steps)
    return sum(step.data_seconds for step in steps) / total if total else 0.0


@json_form(JsonForm(keys={"loss_unit": "counted"}))
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult(PrintedResult):
    """The result of a training run.

    Predicted quantities are None if the run had no plan; measured ones if the run was too short to measure
    them.
    """

    job: str
    device: str
    """The device of the run: "cpu", or the name of a GPU."""
    settings: Settings
    stopped_because: StopReason
    steps: tuple[StepRecord, ...]
    validations: tuple[ValidationRecord, ...]
    """One record per epoch; empty without validation data."""
    budget_bytes: NonNegativeInt | None
    """Bytes that the plan permits the process on the device."""
    predicted_peak_allocated_bytes: NonNegativeInt | None
    measured_peak_allocated_bytes: NonNegativeInt | None
    predicted_peak_reserved_bytes: NonNegativeInt | None
    measured_peak_reserved_bytes: NonNegativeInt | None
    predicted_peak_device_bytes: NonNegativeInt | None
    measured_peak_device_bytes: NonNegativeInt | None
    """None on a CPU, where no driver reports it."""
    predicted_step_seconds: NonNegativeFloat | None
    measured_step_seconds: NonNegativeFloat | None
    """Median over the steps with a full global batch, without the first and the one that measured memory."""
    temporaries_at_peak: tuple[OpTemporary, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Temporary memory inside ops at the measured peak, largest first; empty where it cannot be measured."""
    certificate: EquivalenceReport | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """The comparison with the baseline before the first step; None if there was nothing to compare, or it was
    not requested."""
    recoveries: tuple[Recovery, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """One record for each time that memory ran out."""
    run_dir: Path | None = field(default=None, metadata=ALWAYS_WRITTEN)
    loss_unit: str | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """Name of what `Job.count` counts; None if the loss is a mean over samples."""
    predicted_mfu: NonNegativeFloat | None = field(default=None, metadata=ALWAYS_WRITTEN)
    data_loading: DataLoading | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """How batches were loaded; None if all samples were in one batch."""
    epochs: tuple[EpochRecord, ...] = ()
    """One record for each epoch that has ended."""
    notes: tuple[str, ...] = ()
    """Deviations from what was expected, such as an epoch with fewer batches than its data reported."""
    self_correction: SelfCorrection | None = None
    """Predicted beside measured in the first steps, and whether other settings are better; None without a plan
    or in a run that was too short. After a change of settings, predictions and measurements of this record are
    of the new ones."""

    @property
    def measured_mfu(self) -> float | None:
        """Model FLOPs utilisation without the first step and the one that measured memory; None if not
        known."""
        found = [(step.mfu, step.total_seconds) for step in self._timed if step.mfu is not None]
        seconds = sum(each for _, each in found)
        return sum(mfu * each for mfu, each in found) / seconds if seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Throughput over the same steps, including waiting for data; None if there are no such steps."""
        return self._per_second("samples")

    @property
    def terms_per_second(self) -> float | None:
        """Throughput over the same steps, of what `Job.count` counts, or of samples."""
        return self._per_second("terms")

    @property
    def seconds(self) -> float | None:
        """Time of all steps and of waiting for their batches; None if the records of some steps are lost."""
        if not self.steps or len(self.steps) != self.steps[-1].step:
            return None
        return sum(step.total_seconds for step in self.steps)

    @property
    def needed_workers(self) -> int | None:
        """The number of DataLoader workers with which training would hardly have waited for data; None if it
        did not wait, or for other data. See `DataLoading.needed_workers`."""
        return None if self.data_loading is None else self.data_loading.needed_workers(self.steps)

    @property
    def _timed(self) -> list[StepRecord]:
        return [step for step in self.steps[1:] if not step.memory_measured]

    def _per_second(self, what: str) -> float | None:
        seconds = sum(step.total_seconds for step in self._timed)
        return sum(getattr(step, what) for step in self._timed) / seconds if seconds else None

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses of all steps."""
        return tuple(step.loss for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names; numbers that JSON lacks are written as "nan" and "inf"."""
        return {"brimful_training": RESULT_VERSION, **to_json_document(self)}

    @classmethod
    def from_json(cls, document: Any, *, where: str = "the training result") -> TrainingResult:
        """Read the result that `to_json` wrote.

        Args:
            document: As read from JSON.
            where: Names the document in errors.

        Returns:
            A result equal to the one written.

        Raises:
            FileFormatError: The document is not a training result of this version, or a field is unknown,
                missing, of another type or out of range.
        """
        values = fields_of_version(
            document, "brimful_training", RESULT_VERSION, what="training result", where=where
        )
        return from_json_document(values, cls, where=where)
