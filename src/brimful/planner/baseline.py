"""Training without a plan, captured: what a plan is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.cost import step_seconds
from brimful.memory import replay_allocations
from brimful.planner.plan import Alternative
from brimful.planner.request import Request
from brimful.prediction.estimator import Capture
from brimful.settings import Settings
from brimful.trace import Trace
from brimful.trace.ddp import per_rank_trace


@dataclass(frozen=True, slots=True)
class Baseline:
    """The whole global batch at once, everything kept."""

    trace: Trace
    alternative: Alternative

    @classmethod
    def of(cls, capture: Capture, request: Request) -> Baseline:
        """Of the job and the device that a request names."""
        settings = request.baseline_settings()
        trace = per_rank_trace(capture(settings))
        return cls(trace, alternative_of("plain training", trace, settings, request))


def alternative_of(label: str, trace: Trace, settings: Settings, request: Request) -> Alternative:
    """The record that a plan lists of a captured step; the label is for a reader."""
    reserved_bytes = replay_allocations(trace).peak_reserved_bytes
    return Alternative(
        label=label,
        settings=settings,
        predicted_peak_reserved_bytes=reserved_bytes,
        predicted_step_seconds=step_seconds(trace, request.device).total_seconds,
        fits=reserved_bytes <= request.reserved_budget_bytes,
    )
