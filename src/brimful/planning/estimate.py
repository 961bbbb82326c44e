"""A trace and a device → what the step takes, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from brimful.cost import StepTime, step_seconds
from brimful.hardware import Device
from brimful.planning.text import estimate_text
from brimful.settings import Settings
from brimful.timeline import HeldStorage, predict_memory
from brimful.trace import Category, Correction, Phase, Trace

MARGIN_FRACTION = 0.05
"""A prediction within this share under the capacity is called tight. Assumed, not yet measured on a GPU: public
runs of other tools' predictions and a plain prototype of this one scatter by 2 to 6 %."""


class Verdict(StrEnum):
    """Whether a step fits a capacity."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits by less than `MARGIN_FRACTION`."""
    DOES_NOT_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one optimizer step takes on a device, predicted."""

    job: str
    device: str
    settings: Settings
    predicted_peak_allocated_bytes: int
    """As `torch.cuda.max_memory_allocated` counts."""
    predicted_peak_reserved_bytes: int
    """As `torch.cuda.max_memory_reserved` counts; on a CPU, which caches nothing, the same as allocated."""
    predicted_peak_device_bytes: int
    """Reserved plus the CUDA context, as nvidia-smi shows for the process; on a CPU the same as reserved."""
    predicted_step_seconds: float
    step_time: StepTime
    capacity_bytes: int
    """What the device has, or the budget."""
    breakdown: tuple[tuple[Category, int], ...]
    """Allocated bytes at the peak by category."""
    peak_phase: Phase
    peak_module: str | None
    peak_op: str | None
    largest: tuple[HeldStorage, ...]
    """The largest blocks at the peak."""
    corrections: tuple[Correction, ...]
    uncertain_ops: tuple[str, ...]
    parameter_count: int

    def __str__(self) -> str:
        return estimate_text(self)

    @property
    def verdict(self) -> Verdict:
        """Whether the step fits."""
        if self.predicted_peak_device_bytes > self.capacity_bytes:
            return Verdict.DOES_NOT_FIT
        if self.predicted_peak_device_bytes * (1 + MARGIN_FRACTION) > self.capacity_bytes:
            return Verdict.TIGHT
        return Verdict.FITS

    @property
    def predicted_samples_per_second(self) -> float:
        """Samples of the global batch over the time of a step."""
        return self.settings.global_batch_size / self.predicted_step_seconds


def estimate_trace(trace: Trace, device: Device, *, capacity_bytes: int | None = None) -> Estimate:
    """What the traced step takes on `device`.

    Args:
        trace: A capture that follows the decisions of the device's kind.
        device: Where the step would run.
        capacity_bytes: Bytes permitted; None permits all the device has.

    Returns:
        Peaks, time and verdict of the trace's last step.
    """
    memory = predict_memory(trace)
    time = step_seconds(trace, device)
    return Estimate(
        job=trace.job,
        device=device.name,
        settings=trace.settings,
        predicted_peak_allocated_bytes=memory.peak_allocated_bytes,
        predicted_peak_reserved_bytes=memory.peak_reserved_bytes,
        predicted_peak_device_bytes=memory.peak_reserved_bytes + device.context_bytes,
        predicted_step_seconds=time.total_seconds,
        step_time=time,
        capacity_bytes=device.capacity_bytes if capacity_bytes is None else capacity_bytes,
        breakdown=memory.breakdown,
        peak_phase=memory.peak_phase,
        peak_module=memory.peak_module,
        peak_op=memory.peak_op,
        largest=memory.largest,
        corrections=trace.corrections,
        uncertain_ops=trace.uncertain_ops,
        parameter_count=trace.parameter_count,
    )
