"""What is predicted of a configuration, on fake tensors."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from brimful.capture import capture_step
from brimful.devices import Device
from brimful.job import Job
from brimful.prediction import estimate_trace
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace, find_units
from gpu.configurations import Configuration


def settings_of(configuration: Configuration, job: Job, device: Device, *, toy: bool) -> Settings:
    """The configuration's settings; where it recomputes, the units are those of a plain capture."""
    settings = Settings(
        micro_batch_size=configuration.samples(toy=toy),
        gradient_accumulation_steps=configuration.gradient_accumulation_steps,
        precision=configuration.precision,
        optimizer=configuration.optimizer,
    )
    if not configuration.recomputes:
        return settings
    units = find_units(capture_step(job, settings, device))
    return replace(settings, units=tuple(UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in units))


def predict(job: Job, settings: Settings, device: Device) -> tuple[Trace, dict[str, Any]]:
    """The capture and what follows from it for `device`."""
    began = time.perf_counter()
    trace = capture_step(job, settings, device)
    estimate = estimate_trace(trace, device)
    seconds = time.perf_counter() - began
    phases = {phase.name: phase.predicted_peak_allocated_bytes for phase in estimate.phases}
    return trace, {
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
        "predicted_first_step_peak_allocated_bytes": phases["first step"],
        "predicted_steady_peak_allocated_bytes": phases["steady step"],
        "predicted_peak_reserved_bytes": estimate.predicted_peak_reserved_bytes,
        "predicted_peak_device_bytes": estimate.predicted_peak_device_bytes,
        "predicted_device_interval_bytes": list(estimate.predicted_device_interval_bytes),
        "predicted_step_seconds": estimate.predicted_step_seconds,
        "predicted_peak_at": [str(estimate.peak_phase), estimate.peak_module, estimate.peak_op],
        "predicted_breakdown": {str(category): held for category, held in estimate.breakdown},
        "corrections": {
            each.name: [each.occurrences, each.changed_bytes]
            for each in estimate.corrections
            if each.occurrences
        },
        "uncertain_ops": list(estimate.uncertain_ops),
        "parameters": estimate.parameter_count,
        "recomputed_units": len(settings.recomputed),
        "prediction_seconds": round(seconds, 2),
    }
