"""The plan: what was chosen, what it is predicted to take, and what else was close."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

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
from brimful.display import PrintedResult
from brimful.errors import UsageError
from brimful.files import write_file
from brimful.options import PlanOptions
from brimful.settings import Settings

PLAN_VERSION = 1


class PlanStatus(StrEnum):
    """How much is known of a plan. Where nothing fits there is none, but an `InfeasibleError`."""

    FEASIBLE = "feasible"
    """Replayed within the budget; a faster one may exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to train the same global batch."""

    label: str
    """What it is, for a reader."""
    settings: Settings
    predicted_peak_reserved_bytes: NonNegativeInt
    predicted_step_seconds: PositiveFloat
    fits: bool
    """Whether it is predicted to be within the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """What another budget would buy, as the solver tells it, without a capture."""

    budget_bytes: NonNegativeInt
    predicted_step_seconds: PositiveFloat


_LONGEST_NAME = 4096
"""Characters; a path on Linux has no more (PATH_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """The model that the command line was given, so that a plan's file names it.

    Reading a plan neither imports nor runs what it names.
    """

    name: Annotated[str, Meta(min_length=1, max_length=_LONGEST_NAME)]
    """A built-in architecture, or where a factory of the user's is."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict, metadata=ALWAYS_WRITTEN)
    """The model's own, by name."""


_MOST_FLOPS = 10**40
"""Of a step: beyond any, and far below what a float cannot hold. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PrintedResult):
    """The fastest way found to train a job's global batch within a budget."""

    status: PlanStatus
    job: str
    device: str
    device_kind: Literal["cuda", "cpu"]
    """Where the plan can run."""
    budget_bytes: PositiveInt
    """Bytes permitted to the process on the device, the CUDA context included."""
    settings: Settings
    predicted_peak_allocated_bytes: PositiveInt
    predicted_peak_reserved_bytes: PositiveInt
    predicted_peak_device_bytes: PositiveInt
    predicted_pinned_host_bytes: NonNegativeInt = 0
    """What offloaded units and an optimizer on the host take of its memory, which stays pinned to the end of
    training."""
    predicted_host_state_bytes: NonNegativeInt = 0
    """Optimizer state in the host's memory; with `offload_parameters` parts of parameters and gradients too."""
    predicted_step_seconds: PositiveFloat
    model_flops: Annotated[int, Meta(ge=0)] | None = None
    """Operations of forward and backward in a step, on each rank, nothing recomputed; None if not counted."""
    peak_flops_per_second: PositiveFloat | None = None
    """Of the device in the plan's precision; None if it is not known, as for a CPU nobody calibrated."""
    plain: Alternative
    """Training as it would be without a plan: the whole global batch at once, everything kept."""
    alternatives: tuple[Alternative, ...]
    """What else was searched, fastest first."""
    peak_at: str = field(default="", metadata=ALWAYS_WRITTEN)
    """Where in the step most memory is held: the part of the step, and the module if it is in one."""
    budget_curve: tuple[BudgetPoint, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """Other budgets, rising, each with the time of its fastest step; none slower than one before it."""
    notes: tuple[str, ...] = field(default=(), metadata=ALWAYS_WRITTEN)
    """What a reader should know: what could not be searched, and why."""
    source: JobSource | None = field(default=None, metadata=ALWAYS_WRITTEN)
    """None if the plan was not made by the command line."""
    asked: PlanOptions = field(default_factory=PlanOptions)
    """What was pinned and permitted; training that runs out of memory keeps to it."""

    def __post_init__(self) -> None:
        if self.model_flops is not None and self.model_flops > _MOST_FLOPS:
            raise UsageError(f"model_flops has {len(str(self.model_flops))} digits; no step takes as many.")

    @property
    def predicted_samples_per_second(self) -> float:
        """Samples of the global batch over the time of a step."""
        return self.settings.global_batch_size / self.predicted_step_seconds

    @property
    def predicted_mfu(self) -> float | None:
        """Model FLOPs utilisation: what part of the device's peak the step makes use of; None if not known."""
        if self.model_flops is None or self.peak_flops_per_second is None:
            return None
        return self.model_flops / self.predicted_step_seconds / self.peak_flops_per_second

    @property
    def predicted_host_bytes(self) -> int:
        """What training takes of the host's memory for what a GPU does not hold, pinned or not."""
        return self.predicted_pinned_host_bytes + self.predicted_host_state_bytes

    @property
    def headroom_bytes(self) -> int:
        """What the budget leaves over."""
        return self.budget_bytes - self.predicted_peak_device_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names."""
        return {"brimful_plan": PLAN_VERSION, **to_json_document(self)}

    @classmethod
    def from_json(cls, document: Any, *, where: str = "the plan") -> Plan:
        """The plan that `to_json` wrote.

        Args:
            document: As read from JSON.
            where: Names it in errors.

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
            path: Is overwritten.

        Raises:
            SaveError: The file cannot be written.
        """
        write_file(path, json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """The plan that `save` wrote.

        Args:
            path: Of a JSON file.

        Returns:
            A plan equal to the one saved.

        Raises:
            FileFormatError: The file cannot be read, or is not a plan of this version.
        """
        where = f"the plan {path}"
        return cls.from_json(parse_json(read_regular_file(path, what="plan"), where=where), where=where)
