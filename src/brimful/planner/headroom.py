"""A request and a probability of exceeding its budget → how much of the budget a plan may take as predicted."""

from __future__ import annotations

from dataclasses import replace

from brimful.planner.request import Request
from brimful.prediction.estimate import DevicePeak, Estimate
from brimful.prediction.exceedance import bytes_at_probability, exceedance_probability


def with_headroom(request: Request, baseline: Estimate) -> Request:
    """The request with a budget that leaves the headroom, relative to the peak, that the baseline needs.

    The baseline is that without a plan, wherever it fits. The limit of the request stays.
    """
    needed_bytes = bytes_at_probability(baseline.device_peak, request.device.kind, request.asked.max_exceedance)
    headroom = needed_bytes / max(baseline.predicted_peak_device_bytes, 1)
    budget_bytes = min(int(limit_of(request) / headroom), request.budget_bytes)
    return replace(request, budget_bytes=budget_bytes, limit_bytes=limit_of(request))


def lowered_limit(peak: DevicePeak, request: Request, probability: float) -> int | None:
    """Reserved bytes below which a choice may exceed the request's limit with at most a probability.

    They are lower than those of the peak by the headroom that the peak lacks, relative to it; None if it lacks
    none.
    """
    needed_bytes = bytes_at_probability(peak, request.device.kind, probability)
    if needed_bytes <= limit_of(request):
        return None
    return int(peak.likely_bytes * limit_of(request) / needed_bytes) - request.device.context_bytes


def exceedance_of(estimate: Estimate, request: Request) -> float:
    """The probability that a choice exceeds the limit of a request."""
    return exceedance_probability(estimate.device_peak, request.device.kind, limit_of(request))


def limit_of(request: Request) -> int:
    """What must not be exceeded: the budget, or without one what the device has."""
    return request.budget_bytes if request.limit_bytes is None else request.limit_bytes
