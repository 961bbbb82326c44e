"""What a training run came to: every step, every validation, and predicted beside measured."""

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
from brimful.display import PrintedResult
from brimful.results.equivalence import EquivalenceReport
from brimful.results.measurement import OpTemporary
from brimful.settings import Settings

RESULT_VERSION = 3

LARGEST_SEED = 2**64 - 1
"""Source: torch.manual_seed (torch 2.13)."""

WAITING_FRACTION = 0.05
"""Of the time, from which on waiting for data is worth a word. A choice."""


class StopReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    """Every step that was asked for is done."""
    NOT_IMPROVING = "not improving"
    """The validation loss has not fallen for as many validations as `patience` permits."""
    INTERRUPTED = "interrupted"
    """Ctrl-C or `Trainer.stop`: the step under way was finished and the run saved."""
    TERMINATED = "terminated"
    """SIGTERM, as schedulers send it: the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: PositiveInt
    """From 1: how many steps had been taken when this one was done."""
    epoch: PositiveInt
    """From 1."""
    loss: UnboundedFloat
    """Mean over the global batch, before the update."""
    gradient_norm: UnboundedFloat
    """2-norm of all gradients, before clipping."""
    seconds: NonNegativeFloat
    """From the batch on the host to the updated parameters; loading the batch is not in it."""
    samples: NonNegativeInt
    updated: bool
    """False if the parameters were left as they were: fp16 gradients overflowed, or the loss was not finite."""
    data_seconds: NonNegativeFloat = field(default=0.0, metadata=ALWAYS_WRITTEN)
    """Waited for the batch before the step."""
    memory_measured: bool = False
    """Whether the peak was measured in this step, which slows it down."""
    terms: UnboundedFloat = 0.0
    """What the loss is a mean over: what the job counts in the global batch, else its samples."""
    mfu: UnboundedFloat | None = None
    """Model FLOPs utilisation: FLOPs of forward and backward, nothing recomputed, over what the device could do
    in the step and the waiting before it. None where either is not known, or the batch has another shape than
    was planned for."""
    learning_rate: UnboundedFloat | None = None
    """Of the first group of parameters, in this step; None where there is none, or a GPU has it."""

    @property
    def total_seconds(self) -> float:
        """The step and the waiting before it."""
        return self.seconds + self.data_seconds

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradient norm are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord:
    """One pass over the validation data."""

    step: NonNegativeInt
    """Optimizer steps taken before it."""
    epoch: NonNegativeInt
    """From 1: the epoch that it ends."""
    loss: UnboundedFloat
    """Mean over everything that the job's `count` counts in the validation data."""
    metrics: Mapping[str, UnboundedFloat]
    """Means over the validation samples, by name."""
    samples: NonNegativeInt
    seconds: NonNegativeFloat


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """That memory ran out, and how training went on."""

    step: NonNegativeInt
    """The step, or the one after which validation ran, from 1."""
    during: str
    """"step", "validation", "reading" of a batch, "rehearsal" of the longest, or "allocator" where it had to
    search for memory."""
    message: str
    """What the error said."""
    before: str
    """The settings until then, in a line."""
    after: str
    """Those from then on; the same if only what was cached had to be given back."""
    seconds: NonNegativeFloat
    """What it took: the time that was lost, and that of planning anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLoading:
    """How batches that are read one after the other come to training."""

    workers: NonNegativeInt | None
    """Processes that read ahead; None if it is no DataLoader and does not say."""
    persistent_workers: bool
    """Whether they live on from epoch to epoch."""
    pins_memory: bool
    processors: PositiveInt
    """Those of the machine that this process may use, divided by the ranks on it."""

    def needed_workers(self, steps: Sequence[StepRecord]) -> int | None:
        """So many workers that training would hardly wait for them, each with a processor to itself.

        Without workers a step waits for the whole reading of its batch. n workers that are not fast enough hand
        over n batches in the time that one of them reads for its own: reading takes n · (step + waiting). To
        hand over a batch in the time of a step, reading / step workers are needed, less what is hardly waiting.

        Args:
            steps: In order. The first of each epoch does not count: workers start in it.

        Returns:
            At least 1; None if it is no DataLoader, training hardly waited, or there are too few steps.
        """
        steady = steady_steps(steps)
        if self.workers is None or not steady or waiting_fraction(steady) < WAITING_FRACTION:
            return None
        step = statistics.fmean(record.seconds for record in steady)
        waiting = statistics.fmean(record.data_seconds for record in steady)
        reading = self.workers * (step + waiting) if self.workers else waiting
        return max(math.ceil((1 - WAITING_FRACTION) * reading / step), self.workers + 1)


def steady_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The steps but for the first of each epoch and those that were measured."""
    return [
        later
        for earlier, later in pairwise(steps)
        if later.epoch == earlier.epoch and not later.memory_measured
    ]


def waiting_fraction(steps: Sequence[StepRecord]) -> float:
    """What part of the time of some steps went on waiting for data."""
    total = sum(step.total_seconds for step in steps)
    return sum(step.data_seconds for step in steps) / total if total else 0.0


@json_form(JsonForm(keys={"loss_unit": "counted"}))
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult(PrintedResult):
    """A training run.

    A predicted quantity is None if the run had no plan; a measured one if the run was too short to measure it.
    """

    job: str
    device: str
    """Where it ran: "cpu", or a GPU's name."""
    settings: Settings
    stopped_because: StopReason
    steps: tuple[StepRecord, ...]
    validations: tuple[ValidationRecord, ...]
    """One per epoch; empty without validation data."""
    budget_bytes: NonNegativeInt | None
    """Bytes the plan permits to the process on the device."""
    predicted_peak_allocated_bytes: NonNegativeInt | None
    measured_peak_allocated_bytes: NonNegativeInt | None
    predicted_peak_reserved_bytes: NonNegativeInt | None
    measured_peak_reserved_bytes: NonNegativeInt | None
    predicted_peak_device_bytes: NonNegativeInt | None
    measured_peak_device_bytes: NonNegativeInt | None
    """None on a CPU, which has no driver to ask."""
    predicted_step_seconds: NonNegativeFloat | None
    measured_step_seconds: NonNegativeFloat | None
    """Median over the steps with a full global batch, but for the first and the one that measured memory."""
    temporaries_at_peak: tuple[OpTemporary, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Op-internal temporaries live at the measured peak, largest first; empty where they cannot be seen."""
    certificate: EquivalenceReport | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """Whether the plan was found to be the same training before the first step; None if there was nothing to
    compare, or it was not asked for."""
    recoveries: tuple[Recovery, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Each time that memory ran out."""
    run_dir: Path | None = field(default=None, metadata=ALWAYS_WRITTEN)
    loss_unit: str | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """What the job's `count` counts; None if its loss is a mean over samples."""
    predicted_mfu: NonNegativeFloat | None = field(default=None, metadata=ALWAYS_WRITTEN)
    data_loading: DataLoading | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """None if all samples were in one batch."""
    notes: tuple[str, ...] = ()
    """What was not as it was promised: an epoch with fewer batches than its data said, say."""

    @property
    def measured_mfu(self) -> float | None:
        """Over the steps but for the first and the one that measured memory; None if it is not known."""
        found = [(step.mfu, step.total_seconds) for step in self._timed if step.mfu is not None]
        seconds = sum(each for _, each in found)
        return sum(mfu * each for mfu, each in found) / seconds if seconds else None

    @property
    def samples_per_second(self) -> float | None:
        """Over the same steps, waiting for data included; None if there is none."""
        return self._per_second("samples")

    @property
    def terms_per_second(self) -> float | None:
        """What the job counts, over the same steps."""
        return self._per_second("terms")

    @property
    def needed_workers(self) -> int | None:
        """So many DataLoader workers that training would hardly have waited; None if it did not, or for other
        data. See `DataLoading.needed_workers`."""
        return None if self.data_loading is None else self.data_loading.needed_workers(self.steps)

    @property
    def _timed(self) -> list[StepRecord]:
        return [step for step in self.steps[1:] if not step.memory_measured]

    def _per_second(self, what: str) -> float | None:
        seconds = sum(step.total_seconds for step in self._timed)
        return sum(getattr(step, what) for step in self._timed) / seconds if seconds else None

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of every step."""
        return tuple(step.loss for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names; numbers that JSON lacks are written as "nan" and "inf"."""
        return {"brimful_training": RESULT_VERSION, **to_json_document(self)}

    @classmethod
    def from_json(cls, document: Any, *, where: str = "the training result") -> TrainingResult:
        """The result that `to_json` wrote.

        Args:
            document: As read from JSON.
            where: Names it in errors.

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
