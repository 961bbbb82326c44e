"""What one real training step took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTemporary:
    """Bytes an op allocated inside itself and freed before it returned, live at the measured peak."""

    op: str
    """Name of the op, such as "aten::mkldnn_convolution"."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
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
    loss: float
    """Loss of the first step: the mean over the global batch."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Op-internal temporaries live at the peak, largest first; empty where they cannot be seen."""
