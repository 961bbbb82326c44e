"""Measured memory and time of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.codec import NonNegativeInt
from brimful.display import PrintedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTemporary:
    """Temporary memory of one op, allocated and freed inside it, that is live at the measured peak."""

    op: str
    """Name of the op, such as "aten::mkldnn_convolution"."""
    size_bytes: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(PrintedResult):
    """Measured memory and time of one steady optimizer step on a real device: the counterpart of `Estimate`."""

    device: str
    measured_peak_allocated_bytes: int
    """Peak bytes of allocated tensors, including parameters and optimizer state."""
    measured_peak_reserved_bytes: int
    """Peak bytes reserved by the caching allocator; equal to allocated on a CPU, which caches nothing."""
    measured_peak_device_bytes: int | None
    """Peak bytes of the process as the driver reports them; None on a CPU."""
    measured_step_seconds: float
    """Median of the timed steps, which are not those that measure memory."""
    measured_steps: int
    """Number of timed steps."""
    loss: float | None
    """Loss of the first step's global batch; None for a job's own loop."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Temporary memory inside ops at the peak, largest first; empty where it cannot be measured."""
    predicted_peak_allocated_bytes: int | None = None
    """The plan's prediction; this and the fields below are None if settings were measured, not a plan."""
    predicted_peak_reserved_bytes: int | None = None
    predicted_peak_device_bytes: int | None = None
    predicted_step_seconds: float | None = None
