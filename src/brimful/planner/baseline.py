"""Training without a plan, captured: what a plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from brimful.cost import StepTime, difference_interval
from brimful.devices import Device
from brimful.memory import replay_allocations
from brimful.planner.plan import Alternative
from brimful.planner.request import Request
from brimful.prediction.estimate import Estimate, estimate_unlimited
from brimful.prediction.estimator import Capture
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace


@dataclass(frozen=True, slots=True)
class Baseline:
    """The whole global batch at once, everything kept."""

    trace: Trace
    estimate: Estimate
    alternative: Alternative

    @classmethod
    def of(cls, capture: Capture, request: Request) -> Baseline:
        """Capture the baseline of the job and the device that a request names."""
        settings = request.baseline_settings()
        trace = per_rank_trace(capture(settings))
        estimate = estimate_unlimited(trace, request.device)
        return cls(trace, estimate, alternative_of("baseline", trace, estimate.step_time, settings, request))

    def compared_with(self, plan: StepTime, device: Device) -> Alternative:
        """The record of a plan, with the interval of the difference from the plan's step."""
        interval = difference_interval(self.estimate.step_time, plan, device)
        return replace(self.alternative, predicted_difference_interval_seconds=interval)


def alternative_of(
    label: str, trace: Trace, time: StepTime, settings: Settings, request: Request
) -> Alternative:
    """The record that a plan lists of a captured step; the label is for a reader."""
    reserved_bytes = replay_allocations(trace).peak_reserved_bytes
    return Alternative(
        label=label,
        settings=settings,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=time.total_seconds,
        fits=reserved_bytes <= request.reserved_budget_bytes,
    )
