"""Check whether a plan still fits, because the model may have changed."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from brimful.codec import JsonForm, json_form
from brimful.devices import Device
from brimful.planner.plan import Plan
from brimful.prediction.estimate import estimate_unlimited
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace
from brimful.utils.display import PrintedResult


@json_form(JsonForm(derived={"fits": attrgetter("fits")}, order=("fits",), omitted=("settings",)))
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck(PrintedResult):
    """A plan's settings, predicted for the current model."""

    job: str
    device: str
    settings: Settings
    budget_bytes: int
    """Bytes permitted to the process on the device, including the CUDA context."""
    predicted_peak_device_bytes: int
    planned_peak_device_bytes: int
    """The prediction when the plan was made."""
    predicted_step_seconds: float
    planned_step_seconds: float

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the budget."""
        return self.predicted_peak_device_bytes <= self.budget_bytes


def check_trace(trace: Trace, plan: Plan, device: Device, budget_bytes: int) -> PlanCheck:
    """Compare a capture of the current job under a plan's settings with a budget, and with the plan.

    `budget_bytes` are permitted to the process on the device, including the CUDA context. A capture that
    follows another kind of device raises UsageError.
    """
    # As in planning: without the allocator releasing its cache, which would stall every step.
    estimate = estimate_unlimited(per_rank_trace(trace), device)
    factors = plan.job_calibration
    peak_factor, time_factor = (1.0, 1.0) if factors is None else (factors.factor_of_peak, factors.time_factor)
    context_bytes = device.context_bytes
    reserved_bytes = estimate.predicted_peak_device_bytes - context_bytes
    return PlanCheck(
        job=trace.job,
        device=device.name,
        settings=plan.settings,
        budget_bytes=budget_bytes,
        predicted_peak_device_bytes=context_bytes + round(reserved_bytes * peak_factor),
        planned_peak_device_bytes=plan.predicted_peak_device_bytes,
        predicted_step_seconds=estimate.predicted_step_seconds * time_factor,
        planned_step_seconds=plan.predicted_step_seconds,
    )
