"""Results as JSON documents with stable keys: the names are those of the Python records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from brimful.errors import InfeasibleError
from brimful.planner import GpuFit
from brimful.prediction import Estimate
from brimful.settings import settings_to_json


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """What `brimful estimate --json` prints."""
    return {
        "job": estimate.job,
        "device": estimate.device,
        "settings": settings_to_json(estimate.settings),
        "is_own_loop": estimate.is_own_loop,
        "verdict": str(estimate.verdict),
        "capacity_bytes": estimate.capacity_bytes,
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
        "predicted_peak_reserved_bytes": estimate.predicted_peak_reserved_bytes,
        "predicted_peak_device_bytes": estimate.predicted_peak_device_bytes,
        "predicted_device_interval_bytes": list(estimate.predicted_device_interval_bytes),
        "smallest_surviving_capacity_bytes": estimate.smallest_surviving_capacity_bytes,
        "predicted_step_seconds": estimate.predicted_step_seconds,
        "predicted_samples_per_second": estimate.predicted_samples_per_second,
        "breakdown": {str(category): size_bytes for category, size_bytes in estimate.breakdown},
        "peak": {
            "phase": str(estimate.peak_phase),
            "module": estimate.peak_module,
            "op": estimate.peak_op,
        },
        "largest": [asdict(block) for block in estimate.largest],
        "modules": [asdict(share) for share in estimate.modules],
        "phases": [asdict(phase) for phase in estimate.phases],
        "allocators": [
            asdict(what_if) | {"settings": str(what_if.settings)} for what_if in estimate.allocators
        ],
        "context_source": estimate.context_source,
        "cache_flushes": estimate.cache_flushes,
        "out_of_memory_at": None if estimate.out_of_memory_at is None else asdict(estimate.out_of_memory_at),
        "corrections": [asdict(rule) for rule in estimate.corrections],
        "uncertain_ops": list(estimate.uncertain),
        "parameter_count": estimate.parameter_count,
    }


def gpus_document(job: str, global_batch_size: int, fits: Sequence[GpuFit]) -> dict[str, Any]:
    """What `brimful gpus --json` prints."""
    return {
        "job": job,
        "global_batch_size": global_batch_size,
        "gpus": [
            {
                "device": fit.device,
                "capacity_bytes": fit.capacity_bytes,
                "plain_fits": fit.plain_fits,
                "predicted_plain_peak_device_bytes": fit.predicted_plain_peak_device_bytes,
                "settings": None if fit.settings is None else settings_to_json(fit.settings),
                "predicted_peak_device_bytes": fit.predicted_peak_device_bytes,
                "predicted_step_seconds": fit.predicted_step_seconds,
                "predicted_samples_per_second": fit.predicted_samples_per_second,
                "predicted_smallest_peak_device_bytes": fit.predicted_smallest_peak_device_bytes,
                "change": fit.change,
            }
            for fit in fits
        ],
    }


def error_document(error: BaseException) -> dict[str, Any]:
    """What a command with `--json` prints instead of its result when it fails."""
    document: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
    if isinstance(error, InfeasibleError):
        document["status"] = "infeasible"
        document["budget_bytes"] = error.budget_bytes
        document["smallest_peak_bytes"] = error.smallest_peak_bytes
        document["shortfall_bytes"] = error.shortfall_bytes
    return document
