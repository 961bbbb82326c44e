"""What one real training step took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from brimful.codec import NonNegativeInt
from brimful.display import NotebookText
from brimful.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTemporary:
    """Bytes an op allocated inside itself and freed before it returned, live at the measured peak."""

    op: str
    """Name of the op, such as "aten::mkldnn_convolution"."""
    size_bytes: NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(NotebookText):
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

    def __str__(self) -> str:
        return "\n".join(
            [f"measured on {self.device}, {self.measured_steps} steps", *predicted_beside_measured(self)]
        )


class _Compared(Protocol):
    """What has been predicted and measured, in bytes and seconds; None where it was not."""

    @property
    def predicted_peak_allocated_bytes(self) -> int | None: ...
    @property
    def predicted_peak_reserved_bytes(self) -> int | None: ...
    @property
    def predicted_peak_device_bytes(self) -> int | None: ...
    @property
    def predicted_step_seconds(self) -> float | None: ...
    @property
    def measured_peak_allocated_bytes(self) -> int | None: ...
    @property
    def measured_peak_reserved_bytes(self) -> int | None: ...
    @property
    def measured_peak_device_bytes(self) -> int | None: ...
    @property
    def measured_step_seconds(self) -> float | None: ...


def predicted_beside_measured(compared: _Compared) -> Iterator[str]:
    """A table for a reader: peaks and step time, predicted, measured, and how far apart.

    Args:
        compared: Of a CPU, where the three peaks are one, or of a GPU.

    Yields:
        Its lines.
    """
    yield f"  {'':<20}{'predicted':>12}{'measured':>12}{'error':>9}"
    peaks = [
        ("peak allocated", compared.predicted_peak_allocated_bytes, compared.measured_peak_allocated_bytes),
        ("peak reserved", compared.predicted_peak_reserved_bytes, compared.measured_peak_reserved_bytes),
        ("peak on the device", compared.predicted_peak_device_bytes, compared.measured_peak_device_bytes),
    ]
    for name, predicted, measured in peaks if compared.measured_peak_device_bytes is not None else peaks[:1]:
        said = "-" if predicted is None else format_bytes(predicted)
        was = "-" if measured is None else format_bytes(measured)
        yield f"  {name:<20}{said:>12}{was:>12}{_error(predicted, measured):>9}"
    predicted_step, measured_step = compared.predicted_step_seconds, compared.measured_step_seconds
    said = "-" if predicted_step is None else format_seconds(predicted_step)
    was = "-" if measured_step is None else format_seconds(measured_step)
    yield f"  {'median step':<20}{said:>12}{was:>12}{_error(predicted_step, measured_step):>9}"


def _error(predicted: float | None, measured: float | None) -> str:
    return f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "-"
