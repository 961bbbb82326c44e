"""Results as JSON documents with stable keys: the names are those of the Python records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from brimful.errors import BrimfulError, InfeasibleError
from brimful.planning import Estimate
from brimful.settings import settings_to_json


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """What `brimful estimate --json` prints."""
    return {
        "job": estimate.job,
        "device": estimate.device,
        "settings": settings_to_json(estimate.settings),
        "verdict": str(estimate.verdict),
        "capacity_bytes": estimate.capacity_bytes,
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
        "predicted_peak_reserved_bytes": estimate.predicted_peak_reserved_bytes,
        "predicted_peak_device_bytes": estimate.predicted_peak_device_bytes,
        "predicted_step_seconds": estimate.predicted_step_seconds,
        "predicted_samples_per_second": estimate.predicted_samples_per_second,
        "breakdown": {str(category): size_bytes for category, size_bytes in estimate.breakdown},
        "peak": {
            "phase": str(estimate.peak_phase),
            "module": estimate.peak_module,
            "op": estimate.peak_op,
        },
        "largest": [asdict(block) for block in estimate.largest],
        "cache_flushes": estimate.cache_flushes,
        "out_of_memory_at": None if estimate.out_of_memory_at is None else asdict(estimate.out_of_memory_at),
        "corrections": [asdict(rule) for rule in estimate.corrections],
        "uncertain_ops": list(estimate.uncertain),
        "parameter_count": estimate.parameter_count,
    }


def error_document(error: BrimfulError) -> dict[str, Any]:
    """What a command with `--json` prints instead of its result when it fails."""
    document: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
    if isinstance(error, InfeasibleError):
        document["status"] = "infeasible"
        document["budget_bytes"] = error.budget_bytes
        document["smallest_peak_bytes"] = error.smallest_peak_bytes
        document["shortfall_bytes"] = error.shortfall_bytes
    return document
