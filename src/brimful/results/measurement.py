"""Measured memory and time of one training step."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.codec import NonNegativeInt
from brimful.utils.display import PrintedResult

BUSY_FRACTION = 0.05
"""Fraction of the time that a thread waits for a processor beyond which the machine is called busy. On two
cores of a virtual machine (2026-11-25, torch 2.13, steps of 0.1 s in two threads) it was 0.3 % to 1.5 % without
other work, and 34 % to 61 % beside one, two or four busy processes."""


def busy_text(fraction: float | None) -> str:
    """What other work did to the times, where it took enough of the cores to matter; else ""."""
    if fraction is None or fraction <= BUSY_FRACTION:
        return ""
    return f"other work on this machine used its cores (a thread waited for one {fraction:.0%} of the time)"


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
    shortest_step_seconds: float
    """Of the timed steps."""
    longest_step_seconds: float
    core_wait_fraction: float | None
    """Fraction of the time of the timed steps in which a thread of this process was ready to run and had to
    wait for a processor, because of other work on the machine or of more threads than cores; of the thread that
    waited longest. None on a GPU, and where the system does not report it (not Linux)."""
    loss: float | None
    """Loss of the first step's global batch; None for a job's own loop."""
    temporaries_at_peak: tuple[OpTemporary, ...] = ()
    """Temporary memory inside ops at the peak, largest first; empty where it cannot be measured."""
    predicted_peak_allocated_bytes: int | None = None
    """The plan's prediction; this and the fields below are None if settings were measured, not a plan."""
    predicted_peak_reserved_bytes: int | None = None
    predicted_peak_device_bytes: int | None = None
    predicted_step_seconds: float | None = None
