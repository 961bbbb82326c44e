"""A trace and a device → what the step takes, and whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from brimful.cost import StepTime, step_seconds
from brimful.errors import UsageError
from brimful.hardware import Device
from brimful.planning.text import estimate_text
from brimful.settings import Settings
from brimful.timeline import FailedAllocation, HeldStorage, predict_memory
from brimful.trace import Category, Correction, Phase, Trace

MARGIN_FRACTION = 0.05
"""A prediction within this share under the capacity is called tight. Assumed, not yet measured on a GPU: public
runs of other tools' predictions and a plain prototype of this one scatter by 2 to 6 %."""


class Verdict(StrEnum):
    """Whether a step fits a capacity."""

    FITS = "fits"
    TIGHT = "tight"
    """It fits by less than `MARGIN_FRACTION`, or only because the allocator gives back its cache in time."""
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
    cache_flushes: int
    """How often the allocator has to give back its whole cache to fit; each stalls the device."""
    out_of_memory_at: FailedAllocation | None
    """The first request that the capacity cannot meet; None if the step fits."""
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
        if self.out_of_memory_at is not None:
            return Verdict.DOES_NOT_FIT
        if self.cache_flushes or self.predicted_peak_device_bytes * (1 + MARGIN_FRACTION) > self.capacity_bytes:
            return Verdict.TIGHT
        return Verdict.FITS

    @property
    def uncertain(self) -> tuple[str, ...]:
        """What the prediction does not know well, for a reader."""
        dtypes = self.step_time.dtypes_at_fp32_rate
        return (*self.uncertain_ops, *(f"the speed of {dtype}, priced as float32" for dtype in dtypes))

    @property
    def predicted_samples_per_second(self) -> float:
        """Samples of the global batch over the time of a step."""
        return self.settings.global_batch_size / self.predicted_step_seconds


def estimate_trace(trace: Trace, device: Device, *, capacity_bytes: int | None = None) -> Estimate:
    """What the traced step takes on `device`.

    Args:
        trace: A capture that follows the decisions of the device's kind.
        device: Where the step would run.
        capacity_bytes: Bytes permitted, the CUDA context included; None permits all the device has.

    Returns:
        Peaks over all captured steps, time of the last one, and a verdict. Where the steps do not fit, the
        peaks are those they would have on a larger device.

    Raises:
        UsageError: The capture follows another kind of device.
    """
    if trace.device_kind != device.kind:
        raise UsageError(
            f"the trace of {trace.job!r} follows a {trace.device_kind} device and says nothing of "
            f"{device.name}. Capture it for that device."
        )
    capacity = device.capacity_bytes if capacity_bytes is None else capacity_bytes
    memory = predict_memory(trace, capacity_bytes=max(capacity - device.context_bytes, 0))
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
        capacity_bytes=capacity,
        cache_flushes=memory.cache_flushes,
        out_of_memory_at=memory.out_of_memory_at,
        breakdown=memory.breakdown,
        peak_phase=memory.peak_phase,
        peak_module=memory.peak_module,
        peak_op=memory.peak_op,
        largest=memory.largest,
        corrections=trace.corrections,
        uncertain_ops=trace.uncertain_ops,
        parameter_count=trace.parameter_count,
    )
