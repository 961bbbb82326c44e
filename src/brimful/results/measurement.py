"""What one real training step took."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.codec import NonNegativeInt
from brimful.display import PrintedResult


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTemporary:
    """Bytes an op allocated inside itself and freed before it returned, live at the measured peak."""

    op: str
    """Name of the op, such as "aten::mkldnn_convolution"."""
    size_bytes: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(PrintedResult):
    """The measured twin of an `Estimate`: one steady optimizer step on a real device."""

    device: str
    measured_peak_allocated_bytes: int
    """Peak of bytes in tensors, parameters and optimizer state included."""
    measured_peak_reserved_bytes: int
    """Peak of bytes held by the caching allocator; on a CPU, which caches nothing, the same as allocated."""
    measured_peak_device_bytes: int | None
    """What the driver shows for the process; None on a CPU."""
    measured_step_seconds: float
    """Median of the timed steps, measured apart from the memory."""
    measured_steps: int
    """How many steps were timed."""
    loss: float | None
    """Loss of the first step's global batch; None of a job's own loop."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Op-internal temporaries live at the peak, largest first; empty where they cannot be seen."""
    predicted_peak_allocated_bytes: int | None = None
    """What the plan predicted; None if no plan was measured. So are the others."""
    predicted_peak_reserved_bytes: int | None = None
    predicted_peak_device_bytes: int | None = None
    predicted_step_seconds: float | None = None
