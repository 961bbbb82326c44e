"""Results as JSON documents with stable keys: the names are those of the Python records."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from brimful.codec import JsonForm, json_form, omit_defaults, to_json_document
from brimful.errors import InfeasibleError
from brimful.memory import AllocatorSettings
from brimful.planner import GpuFit, GpuSurvey, UsualFit
from brimful.prediction import Estimate
from brimful.results import WholeRun

json_form(
    JsonForm(
        derived={
            "verdict": attrgetter("verdict"),
            "predicted_samples_per_second": attrgetter("predicted_samples_per_second"),
            "predicted_time_shares": lambda estimate: dict(estimate.predicted_time_shares),
            "breakdown": lambda estimate: dict(estimate.breakdown),
            "peak": lambda estimate: {
                "phase": estimate.peak_phase,
                "module": estimate.peak_module,
                "op": estimate.peak_op,
            },
            "uncertain_ops": attrgetter("uncertain"),
        },
        order=(
            *("job", "device", "settings", "is_own_loop", "verdict", "capacity_bytes"),
            *("predicted_peak_allocated_bytes", "predicted_peak_reserved_bytes", "predicted_peak_device_bytes"),
            *(
                "predicted_device_interval_bytes",
                "smallest_surviving_capacity_bytes",
                "predicted_paged_state_bytes",
            ),
            *("predicted_step_seconds", "predicted_step_seconds_interval", "predicted_samples_per_second"),
            *("predicted_time_shares", "breakdown", "peak", "largest"),
            *("modules", "phases", "allocators", "context_source", "torch_version"),
            *("cache_flushes", "out_of_memory_at"),
        ),
        omitted=(
            *("peak_phase", "peak_module", "peak_op", "step_time", "own_checkpoints", "at_sizes"),
            *("predicted_pinned_host_bytes", "predicted_host_state_bytes"),
        ),
    )
)(Estimate)
json_form(JsonForm(write=str))(AllocatorSettings)
_SPEED_AND_COST = (
    *("predicted_samples_per_second", "predicted_samples_per_second_interval"),
    *("predicted_cost_per_step", "predicted_cost_per_million_samples"),
)
_OF_A_FIT = {name: attrgetter(name) for name in _SPEED_AND_COST}
_FIRST_OF_A_FIT = (
    *("settings", "predicted_peak_device_bytes", "predicted_step_seconds"),
    *(
        "predicted_step_seconds_interval",
        "predicted_samples_per_second",
        "predicted_samples_per_second_interval",
    ),
)
_run_if_asked = omit_defaults("run")
json_form(
    JsonForm(
        derived=_OF_A_FIT,
        order=("precision", *_FIRST_OF_A_FIT),
        omitted=lambda fit: {"price_per_hour", *_run_if_asked(fit)},
    ),
)(UsualFit)
json_form(
    JsonForm(
        derived=_OF_A_FIT,
        order=(
            *("device", "capacity_bytes", "plain_fits", "predicted_plain_peak_device_bytes"),
            *_FIRST_OF_A_FIT,
            "predicted_smallest_peak_device_bytes",
        ),
        omitted=_run_if_asked,
    )
)(GpuFit)
_OF_A_RUN = ("predicted_cost", "predicted_cost_interval")
json_form(JsonForm(derived={name: attrgetter(name) for name in _OF_A_RUN}))(WholeRun)


def whole_run_document(run: WholeRun | None) -> dict[str, Any]:
    """What a length adds to the document of an estimate or a plan; None is of an estimate that does not fit."""
    return {"run": None if run is None else to_json_document(run)}


def gpus_document(fits: GpuSurvey) -> dict[str, Any]:
    """The document of `brimful gpus --json`."""
    return {
        "job": fits.job,
        "global_batch_size": fits.global_batch_size,
        "gpus": [to_json_document(fit) for fit in fits],
    }


def error_document(error: BaseException) -> dict[str, Any]:
    """The document that a command with `--json` prints if it fails."""
    document: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
    if isinstance(error, InfeasibleError):
        document["status"] = "infeasible"
        document["budget_bytes"] = error.budget_bytes
        document["smallest_peak_bytes"] = error.smallest_peak_bytes
        document["shortfall_bytes"] = error.shortfall_bytes
        document["suggestions"] = [to_json_document(each) for each in error.suggestions]
    return document
