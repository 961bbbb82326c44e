"""Records of what training measured beside what was predicted.

`JobCalibration` is kept for later plans of the same job on the same device. `SelfCorrection` is of one run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from brimful.codec import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from brimful.settings import Precision, Settings

LARGEST_TIME_FACTOR = 20.0
"""Measured time of a step over the predicted one, or the reverse, beyond which the two are not of the same
step. A choice: far beyond the spread of times on any device (`cost.uncertainty`)."""
LARGEST_PEAK_FACTOR = 2.0
"""Like `LARGEST_TIME_FACTOR`, for peak memory. A choice: 54 public GPU runs measured 0.91 to 1.21 of what was
predicted (benchmarks/results/gpu_truth.json)."""

TimeFactor = Annotated[float, Meta(ge=1 / LARGEST_TIME_FACTOR, le=LARGEST_TIME_FACTOR)]
PeakFactor = Annotated[float, Meta(ge=1 / LARGEST_PEAK_FACTOR, le=LARGEST_PEAK_FACTOR)]
_Name = Annotated[str, Meta(min_length=1, max_length=4096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCalibration:
    """Factors for predictions for one kind of job on one device, as a training run measured them."""

    device: _Name
    """Name of the device, of this machine."""
    job: _Name
    parameter_count: NonNegativeInt
    """Number of parameters of the model, as several jobs may have one name."""
    precision: Precision
    optimizer: _Name
    """Name of the optimizer, or "own" for one that the job makes."""
    time_factor: TimeFactor
    """Measured over predicted time of a step."""
    peak_factor: PeakFactor | None
    """Measured over predicted peak of reserved bytes, without the CUDA context; None if it was not measured."""
    measured_steps: PositiveInt
    measured_on: Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    """The date, as 2026-11-24."""

    @property
    def factor_of_peak(self) -> float:
        """The factor of peaks; 1 if no peak was measured."""
        return 1.0 if self.peak_factor is None else self.peak_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCorrection:
    """Predicted beside measured in the first steps of a run."""

    step: PositiveInt
    """The step after which predicted and measured were compared."""
    measured_steps: PositiveInt
    settings: Settings
    """The settings of these steps."""
    predicted_step_seconds: PositiveFloat
    measured_step_seconds: PositiveFloat
    """Median of these steps."""
    predicted_peak_reserved_bytes: PositiveInt
    measured_peak_reserved_bytes: NonNegativeInt | None
    """None if it could not be measured."""
    exceeds_budget: bool
    """Whether the measured peak exceeds the budget."""
    core_wait_fraction: NonNegativeFloat | None = None
    """As in `Measurement`, of the steps that were measured and what came between them."""
