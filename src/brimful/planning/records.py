"""The plan: what was chosen, what it is predicted to take, and what else was close."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from brimful.errors import UsageError
from brimful.files import write_file
from brimful.planning.text import plan_text
from brimful.settings import Settings, settings_from_json, settings_to_json

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
    predicted_peak_reserved_bytes: int
    predicted_step_seconds: float
    fits: bool
    """Whether it is predicted to be within the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """What another budget would buy, as the solver tells it, without a capture."""

    budget_bytes: int
    predicted_step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSource:
    """What the command line named to be trained, so that a plan's file tells it."""

    name: str
    """A built-in architecture, or where a factory of the user's is."""
    options: tuple[tuple[str, int | float | bool | str], ...] = ()
    """The model's own, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fastest way found to train a job's global batch within a budget."""

    status: PlanStatus
    job: str
    device: str
    device_kind: str
    """"cuda" or "cpu": where the plan can run."""
    budget_bytes: int
    """Bytes permitted to the process on the device, the CUDA context included."""
    settings: Settings
    predicted_peak_allocated_bytes: int
    predicted_peak_reserved_bytes: int
    predicted_peak_device_bytes: int
    predicted_step_seconds: float
    plain: Alternative
    """Training as it would be without a plan: the whole global batch at once, everything kept."""
    alternatives: tuple[Alternative, ...]
    """What else was searched, fastest first."""
    peak_at: str = ""
    """Where in the step most memory is held: the part of the step, and the module if it is in one."""
    budget_curve: tuple[BudgetPoint, ...] = ()
    """Other budgets, rising, each with the time of its fastest step; none slower than one before it."""
    predicted_pinned_host_bytes: int = 0
    """What offloaded units and an optimizer on the host take of its memory, which stays pinned to the end of
    training."""
    predicted_host_state_bytes: int = 0
    """Optimizer state in the host's memory; with `cpu_offload` parts of parameters and gradients too."""
    model_flops: int | None = None
    """Operations of forward and backward in a step, on each rank, nothing recomputed; None if not counted."""
    peak_flops_per_second: float | None = None
    """Of the device in the plan's precision; None if it is not known, as for a CPU nobody calibrated."""
    notes: tuple[str, ...] = ()
    """What a reader should know: what could not be searched, and why."""
    source: JobSource | None = None
    """None if the plan was not made by the command line."""

    def __str__(self) -> str:
        return plan_text(self)

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
        return {
            "brimful_plan": PLAN_VERSION,
            "status": str(self.status),
            "job": self.job,
            "device": self.device,
            "device_kind": self.device_kind,
            "budget_bytes": self.budget_bytes,
            "settings": settings_to_json(self.settings),
            "predicted_peak_allocated_bytes": self.predicted_peak_allocated_bytes,
            "predicted_peak_reserved_bytes": self.predicted_peak_reserved_bytes,
            "predicted_peak_device_bytes": self.predicted_peak_device_bytes,
            "predicted_pinned_host_bytes": self.predicted_pinned_host_bytes,
            "predicted_host_state_bytes": self.predicted_host_state_bytes,
            "predicted_step_seconds": self.predicted_step_seconds,
            "model_flops": self.model_flops,
            "peak_flops_per_second": self.peak_flops_per_second,
            "plain": _alternative_to_json(self.plain),
            "alternatives": [_alternative_to_json(other) for other in self.alternatives],
            "peak_at": self.peak_at,
            "budget_curve": [
                {"budget_bytes": point.budget_bytes, "predicted_step_seconds": point.predicted_step_seconds}
                for point in self.budget_curve
            ],
            "notes": list(self.notes),
            "source": None
            if self.source is None
            else {"name": self.source.name, "options": dict(self.source.options)},
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote.

        Args:
            document: As read from JSON.

        Returns:
            A plan equal to the one written.

        Raises:
            UsageError: The document is no plan of this version.
        """
        version = document.get("brimful_plan") if isinstance(document, dict) else None
        if version != PLAN_VERSION:
            found = "no brimful plan" if version is None else f"a plan of version {version}"
            raise UsageError(f"this is {found}; this brimful reads plans of version {PLAN_VERSION}.")
        try:
            return cls(
                status=PlanStatus(document["status"]),
                settings=settings_from_json(document["settings"]),
                plain=_alternative_from_json(document["plain"]),
                alternatives=tuple(map(_alternative_from_json, document["alternatives"])),
                budget_curve=tuple(BudgetPoint(**point) for point in document["budget_curve"]),
                predicted_pinned_host_bytes=document.get("predicted_pinned_host_bytes", 0),
                predicted_host_state_bytes=document.get("predicted_host_state_bytes", 0),
                model_flops=document.get("model_flops"),
                peak_flops_per_second=document.get("peak_flops_per_second"),
                notes=tuple(document["notes"]),
                source=_source_from_json(document["source"]),
                **{name: document[name] for name in _SCALARS},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the plan is damaged: {error!r}") from error

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
            UsageError: The file cannot be read, or is no plan of this version.
        """
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"the plan {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UsageError(f"{path} is no plan: {error}") from error
        return cls.from_json(document)


_SCALARS = (
    "job",
    "device",
    "device_kind",
    "budget_bytes",
    "peak_at",
    "predicted_peak_allocated_bytes",
    "predicted_peak_reserved_bytes",
    "predicted_peak_device_bytes",
    "predicted_step_seconds",
)


def _alternative_to_json(alternative: Alternative) -> dict[str, Any]:
    return {
        "label": alternative.label,
        "settings": settings_to_json(alternative.settings),
        "predicted_peak_reserved_bytes": alternative.predicted_peak_reserved_bytes,
        "predicted_step_seconds": alternative.predicted_step_seconds,
        "fits": alternative.fits,
    }


def _source_from_json(document: dict[str, Any] | None) -> JobSource | None:
    if document is None:
        return None
    return JobSource(name=document["name"], options=tuple(document["options"].items()))


def _alternative_from_json(document: dict[str, Any]) -> Alternative:
    return Alternative(
        label=document["label"],
        settings=settings_from_json(document["settings"]),
        predicted_peak_reserved_bytes=document["predicted_peak_reserved_bytes"],
        predicted_step_seconds=document["predicted_step_seconds"],
        fits=document["fits"],
    )
