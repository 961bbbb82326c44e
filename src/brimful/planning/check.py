"""Whether a plan still fits: the model may have changed since it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from brimful.display import NotebookText
from brimful.hardware import Device
from brimful.planning.estimate import estimate_unlimited
from brimful.planning.ranks import of_one_rank
from brimful.planning.records import Plan
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck(NotebookText):
    """A plan's settings, predicted anew."""

    job: str
    device: str
    settings: Settings
    budget_bytes: int
    """Bytes permitted to the process on the device, the CUDA context included."""
    predicted_peak_device_bytes: int
    planned_peak_device_bytes: int
    """What was predicted when the plan was made."""
    predicted_step_seconds: float
    planned_step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget."""
        return self.predicted_peak_device_bytes <= self.budget_bytes

    @property
    def _why(self) -> str:
        if self.planned_peak_device_bytes > self.budget_bytes:
            return f"it was planned for more, {format_bytes(self.planned_peak_device_bytes)}"
        return "the job takes more than when it was planned"

    def __str__(self) -> str:
        over_bytes = self.predicted_peak_device_bytes - self.budget_bytes
        verdict = (
            f"fits, {format_bytes(-over_bytes)} to spare"
            if self.fits
            else f"does not fit, {format_bytes(over_bytes)} too much: {self._why}; plan it again"
        )
        return (
            f"{self.job} on {self.device}: the plan {verdict}\n"
            f"  settings        {self.settings.describe()}\n"
            f"  predicted peak  {format_bytes(self.predicted_peak_device_bytes)} of "
            f"{format_bytes(self.budget_bytes)}; when planned {format_bytes(self.planned_peak_device_bytes)}\n"
            f"  predicted step  {format_seconds(self.predicted_step_seconds)}; "
            f"when planned {format_seconds(self.planned_step_seconds)}"
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the record's own names."""
        return {
            "fits": self.fits,
            "job": self.job,
            "device": self.device,
            "budget_bytes": self.budget_bytes,
            "predicted_peak_device_bytes": self.predicted_peak_device_bytes,
            "planned_peak_device_bytes": self.planned_peak_device_bytes,
            "predicted_step_seconds": self.predicted_step_seconds,
            "planned_step_seconds": self.planned_step_seconds,
        }


def check_trace(trace: Trace, plan: Plan, device: Device, budget_bytes: int) -> PlanCheck:
    """Compare a capture of a plan's settings with a budget.

    Args:
        trace: The job as it is now, under the plan's settings.
        plan: As it was made.
        device: Where it is to run.
        budget_bytes: Bytes permitted to the process, the CUDA context included.

    Returns:
        What is predicted now beside what was predicted then.

    Raises:
        UsageError: The capture follows another kind of device.
    """
    # As a plan is made: without the allocator giving back its cache, which would stall every step.
    estimate = estimate_unlimited(of_one_rank(trace), device)
    return PlanCheck(
        job=trace.job,
        device=device.name,
        settings=plan.settings,
        budget_bytes=budget_bytes,
        predicted_peak_device_bytes=estimate.predicted_peak_device_bytes,
        planned_peak_device_bytes=plan.predicted_peak_device_bytes,
        predicted_step_seconds=estimate.predicted_step_seconds,
        planned_step_seconds=plan.predicted_step_seconds,
    )
