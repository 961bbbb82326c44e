"""Time and peak of the first steps of a run, or of the first after a change of settings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from brimful.cost.uncertainty import STEP_SPREAD
from brimful.execution.out_of_memory import make_room
from brimful.profiling import PeakMemory
from brimful.profiling.timing import WaitsForCores
from brimful.results import StepRecord
from brimful.trainer.state import TrainState
from brimful.trainer.step.runner import StepRunner

MEASURED_STEPS = 5
"""Steps whose median time is compared, as in `bf.measure`; without the first of a launch or after a change, and
without the one in which memory is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """Time and peak of steps under one plan."""

    count: int
    """Number of steps that were timed."""
    step_seconds: float
    """Median."""
    spread: float
    """Standard error of the median, relative to it."""
    peak_reserved_bytes: int | None
    """None if it could not be measured."""
    core_wait_fraction: float | None = None
    """As in `Measurement`."""

    def peak_factor(self, predicted_reserved_bytes: int) -> float:
        """Measured over predicted peak of the plan; 1 if it was not measured."""
        return 1.0 if self.peak_reserved_bytes is None else self.peak_reserved_bytes / predicted_reserved_bytes

    @classmethod
    def of(
        cls,
        seconds: Sequence[float],
        peak_reserved_bytes: int | None,
        core_wait_fraction: float | None = None,
    ) -> MeasuredSteps:
        """What some steps measured.

        Args:
            seconds: Of each step; at least one.
            peak_reserved_bytes: Of one of them.
            core_wait_fraction: Of their time; None if it is not known.

        Returns:
            The median, with its standard error from the median absolute deviation, but no less than that by
            which repeated measurements differ.
        """
        middle = statistics.median(seconds)
        deviation = statistics.median(abs(each - middle) for each in seconds)
        error = _OF_MEAN * _OF_DEVIATION * deviation / len(seconds) ** 0.5
        return cls(
            count=len(seconds),
            step_seconds=middle,
            spread=max(error / middle, STEP_SPREAD) if middle else STEP_SPREAD,
            peak_reserved_bytes=peak_reserved_bytes,
            core_wait_fraction=core_wait_fraction,
        )


_OF_DEVIATION, _OF_MEAN = 1.4826, 1.2533
"""Of a normal distribution: its standard deviation over the median absolute deviation, and the standard error
of a median over that of a mean, √(π/2)."""


def exceeds(budget_bytes: int, peak_reserved_bytes: int | None, context_bytes: int) -> bool:
    """Whether a measured peak, with the CUDA context, is over a budget; False if it was not measured."""
    return peak_reserved_bytes is not None and peak_reserved_bytes + context_bytes > budget_bytes


class Measuring:
    """Collects time and peak of steps under the settings in force.

    Args:
        state: The state of the run.
        runner: Measures the peak of a step.
    """

    def __init__(self, state: TrainState, runner: StepRunner) -> None:
        self._state = state
        self._runner = runner
        self._seconds: list[float] = []
        self._waits: WaitsForCores | None = None
        self._waited: float | None = None
        self._is_warm = False
        """Whether a step under these settings has run in this launch."""
        self.since_step = 0
        """The step after which this launch put settings in force; 0 if it has not."""

    def begin(self, peak: PeakMemory | None = None) -> None:
        """Measure time and, unless it is known, peak of the steps from here on."""
        self._seconds, self._is_warm = [], False
        self._runner.peak = peak
        self.since_step = self._state.step
        make_room(self._state.device)  # segments that only the steps before had a use for

    def add(self, record: StepRecord) -> None:
        """Keep the time of a step that is like those of a prediction."""
        is_full = record.updated and record.samples == self._state.settings.global_batch_size
        is_timed = is_full and self._is_warm and not record.memory_measured
        if is_timed and len(self._seconds) < MEASURED_STEPS:
            self._seconds.append(record.seconds)
            if self._waits is not None:
                self._waited = self._waits.fraction()
        if is_full and not self._is_warm:
            self._is_warm = True
            self._waits = WaitsForCores() if self._state.device.type == "cpu" else None

    @property
    def has_enough(self) -> bool:
        """Whether enough steps are timed, and the peak is measured."""
        return len(self._seconds) >= MEASURED_STEPS and self._runner.peak is not None

    @property
    def peak(self) -> PeakMemory | None:
        """The measured peak; None before that."""
        return self._runner.peak

    @property
    def peak_bytes(self) -> int | None:
        """Reserved bytes at the peak, without the average of the weights, which a plan does not count.

        None if it was not measured, is not of what was planned, or if blocks hold the average too.
        """
        average = self._state.average
        has_uncounted = average is not None and self._state.device.type == "cuda"
        if self._runner.peak is None or has_uncounted or not self._runner.peak_is_as_planned:
            return None
        return self._runner.peak.reserved_bytes - (0 if average is None else average.held_bytes)

    def measured(self) -> MeasuredSteps:
        """What the steps measured."""
        return MeasuredSteps.of(self._seconds, self.peak_bytes, self._waited)
