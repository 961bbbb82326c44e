"""The plan: the chosen settings, their predicted memory and time, and the alternatives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from brimful.arguments import checks_arguments
from brimful.codec import (
    ALWAYS_WRITTEN,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    fields_of_version,
    from_json_document,
    parse_json,
    read_regular_file,
    to_json_document,
)
from brimful.errors import UsageError
from brimful.options import PlanOptions
from brimful.results import JobCalibration, PredictsRuns, Probability, SampleSize, Suggestion
from brimful.settings import Settings
from brimful.utils.files import write_file

if TYPE_CHECKING:
    from brimful.exports import Export
    from brimful.job import Job
    from brimful.planner.check import PlanCheck
    from brimful.profiling.named_device import DeviceLike

PLAN_VERSION = 1


NOT_SURE = "Not sure about: "
"""How notes of a plan begin that say what is uncertain about its figures."""


class PlanStatus(StrEnum):
    """What is known about a plan. If nothing fits, planning raises `InfeasibleError` instead."""

    FEASIBLE = "feasible"
    """The plan fits the budget when its trace is replayed; a faster plan may exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to train the same global batch."""

    label: str
    """Description for reports."""
    settings: Settings
    predicted_peak_reserved_bytes: NonNegativeInt
    predicted_step_seconds: PositiveFloat
    fits: bool
    """Whether its predicted peak memory is within the budget."""
    predicted_difference_interval_seconds: tuple[float, float] | None = None
    """Interval of its step time − the plan's; it covers the measured difference with 90 % probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """The step time at another budget, as the solver computes it without a new capture."""

    budget_bytes: NonNegativeInt
    predicted_step_seconds: PositiveFloat


_LONGEST_NAME = 4096
"""Characters; the longest path on Linux (PATH_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """The model given on the command line, so that a plan's file names it.

    Reading a plan neither imports nor runs that model.
    """

    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    """Name of a built-in architecture, or location of the user's factory."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict, metadata=ALWAYS_WRITTEN)
    """Options of the model, by name."""


_MOST_FLOPS = 10**40
"""FLOPs per step: more than any step needs, and far below the largest float. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PredictsRuns):
    """The simplest of the fastest settings found to train a job's global batch within a memory budget.

    `check` and `export` capture steps, which stages above this one do: they are imported when called.
    """

    status: PlanStatus
    job: str
    device: str
    device_kind: Literal["cuda", "cpu"]
    """Kind of device that the plan can run on."""
    budget_bytes: PositiveInt
    """Bytes permitted to the process on the device, including the CUDA context."""
    settings: Settings
    predicted_peak_allocated_bytes: PositiveInt
    predicted_peak_reserved_bytes: PositiveInt
    predicted_peak_device_bytes: PositiveInt
    predicted_exceedance_probability: Probability | None = None
    """Probability that the peak exceeds the budget, or without one what the device has; None in a plan of an
    earlier version or written by hand."""
    predicted_pinned_host_bytes: NonNegativeInt = 0
    """Host memory for offloaded units and an offloaded optimizer, which stays pinned until training ends."""
    predicted_host_state_bytes: NonNegativeInt = 0
    """Optimizer state in host memory; with `offload_parameters` also shards of parameters and gradients."""
    predicted_step_seconds: PositiveFloat
    predicted_step_seconds_interval: tuple[PositiveFloat, PositiveFloat] | None = None
    """Covers the measured time with 90 % probability; None in a plan written by hand."""
    model_flops: Annotated[int, Meta(ge=0)] | None = None
    """FLOPs of forward and backward per step and rank, without recomputation; None if not counted."""
    peak_flops_per_second: PositiveFloat | None = None
    """Peak FLOP/s of the device in the plan's precision; None if not known, as for an uncalibrated CPU."""
    plain: Alternative
    """Training without a plan: the whole global batch as one micro-batch, nothing recomputed."""
    alternatives: tuple[Alternative, ...]
    """Other settings that were searched, fastest first."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes of what is computed with which it would certainly be faster, the fastest first, at most 5."""
    peak_at: str = field(default="", metadata=ALWAYS_WRITTEN)
    """Where in the step peak memory occurs: the part of the step, and the module if it is in one."""
    budget_curve: tuple[BudgetPoint, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Other budgets in ascending order, each with the time of its fastest step, which never increases."""
    notes: tuple[str, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Remarks on the search, such as what could not be searched, and why."""
    source: JobSource | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """None if the plan was not made by the command line."""
    asked: PlanOptions = field(default_factory=PlanOptions)
    """The options of the search; planning again after running out of memory keeps to them, but for
    `max_exceedance`, as its budget is a part of what ran out."""
    job_calibration: JobCalibration | None = None
    """What an earlier training run of this job measured on this device; predictions are multiplied by it. None
    if there was none, or it was not used."""
    job_kind: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)] | None = None
    """Kind of job, device and versions whose predictions these are, under which training on this machine keeps
    what it measures; None for a device that is only named."""

    sample_sizes: tuple[SampleSize, ...] = ()
    """The sizes of the batch that is predicted; training warns of the first larger one. Empty if they are not
    known."""
    tokens_per_sample: PositiveFloat | None = None
    """Tokens of each sample of that batch, padding included; None if they are not known."""

    def __post_init__(self) -> None:
        if self.model_flops is not None and self.model_flops > _MOST_FLOPS:
            raise UsageError(f"model_flops has {len(str(self.model_flops))} digits; no step takes as many.")

    @property
    def predicted_samples_per_second(self) -> float:
        """Samples of the global batch per second of step time."""
        return self.settings.global_batch_size / self.predicted_step_seconds

    @property
    def predicted_mfu(self) -> float | None:
        """Model FLOPs utilisation: the fraction of the device's peak that a step uses; None if not known."""
        if self.model_flops is None or self.peak_flops_per_second is None:
            return None
        return self.model_flops / self.predicted_step_seconds / self.peak_flops_per_second

    @property
    def predicted_host_bytes(self) -> int:
        """Host memory for everything that is offloaded from the GPU, pinned or not."""
        return self.predicted_pinned_host_bytes + self.predicted_host_state_bytes

    @property
    def headroom_bytes(self) -> int:
        """Bytes of the budget that the plan leaves free."""
        return self.budget_bytes - self.predicted_peak_device_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names."""
        return {"brimful_plan": PLAN_VERSION, **to_json_document(self)}

    @classmethod
    def from_json(cls, document: Any, *, where: str = "the plan") -> Plan:
        """Read the plan that `to_json` wrote.

        Args:
            document: As read from JSON.
            where: Names the document in errors.

        Returns:
            A plan equal to the one written.

        Raises:
            FileFormatError: The document is not a plan of this version, or a field is unknown, missing, of
                another type or out of range.
        """
        values = fields_of_version(document, "brimful_plan", PLAN_VERSION, what="plan", where=where)
        return from_json_document(values, cls, where=where)

    def save(self, path: Path | str) -> None:
        """Write the plan as JSON.

        Args:
            path: The file; an existing one is overwritten.

        Raises:
            SaveError: The file cannot be written.
        """
        write_file(path, json.dumps(self.to_json(), indent=2) + "\n")

    @checks_arguments
    def check(
        self, job: Job, device: DeviceLike | None = None, *, budget: str | float | None = None
    ) -> PlanCheck:
        """Predict the plan's settings again, to check whether the job has outgrown them.

        Args:
            job: As it is now; the plan may be for an earlier version of it.
            device: Where it is to run. Default: the device that the plan was made for.
            budget: A size ("11GiB"). Default: the plan's.

        Returns:
            What is predicted now beside what was predicted then.

        Raises:
            UsageError: An argument is invalid, or the plan is for another kind of device.
            UnknownNameError: The plan names a unit that the model does not have, or its device is not in the
                table.
            CaptureError: The step cannot be run on fake tensors.
        """
        found: PlanCheck = import_module("brimful.api").check_plan(job, self, device, budget=budget)
        return found

    @checks_arguments
    def export(self, job: Job, tool: str) -> Export:
        """The plan as the file that another training tool reads.

        The file says how a step runs: batch sizes, precision, memory, ranks. Learning rate, schedule, weight
        decay and clipping are yours. What a tool cannot express is in `not_expressed`, and the predicted peak
        is the one without it; what you do by hand is in `remarks` and `environment`.

        Args:
            job: The job that the plan was made for.
            tool: "transformers", "accelerate", "deepspeed", "fsdp" or "lightning".

        Returns:
            The export; `save` writes its file.

        Raises:
            UsageError: The tool would train something else, or cannot divide the model among ranks as the plan
                does; `tool` is unknown.
            CaptureError: The step without what the tool cannot express cannot be run on fake tensors.
        """
        made: Export = import_module("brimful.api").export(job, self, tool)
        return made

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Read the plan that `save` wrote.

        Args:
            path: A JSON file.

        Returns:
            A plan equal to the one saved.

        Raises:
            FileFormatError: The file cannot be read, or is not a plan of this version.
        """
        where = f"the plan {path}"
        return cls.from_json(parse_json(read_regular_file(path, what="plan"), where=where), where=where)


def settings_of(plan: Plan | Settings) -> Settings:
    """The settings of a plan, or the settings themselves."""
    return plan.settings if isinstance(plan, Plan) else plan
