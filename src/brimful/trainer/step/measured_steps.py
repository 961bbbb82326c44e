"""Time and peak of the first steps of a run."""

from __future__ import annotations

import statistics

from brimful.profiling.timing import WaitsForCores
from brimful.results import StepRecord
from brimful.trainer.state import TrainState
from brimful.trainer.step.runner import StepRunner

MEASURED_STEPS = 5
"""Steps whose median time is compared, as in `bf.measure`; without the first of a launch, and without the
one in which memory is measured."""


class Measuring:
    """Collects time and peak of steps under the plan."""

    def __init__(self, state: TrainState, runner: StepRunner) -> None:
        self._state = state
        self._runner = runner
        self._seconds: list[float] = []
        self._waits: WaitsForCores | None = None
        self.core_wait_fraction: float | None = None
        """Fraction of the time in which a thread was ready and waited for a core, as in `Measurement`."""
        self._is_warm = False
        """Whether a step has run in this launch."""

    def add(self, record: StepRecord) -> None:
        """Keep the time of a step on a full batch, unless it is the first or its memory is measured."""
        is_full = record.updated and record.samples == self._state.settings.global_batch_size
        is_timed = is_full and self._is_warm and not record.memory_measured
        if is_timed and len(self._seconds) < MEASURED_STEPS:
            self._seconds.append(record.seconds)
            if self._waits is not None:
                self.core_wait_fraction = self._waits.fraction()
        if is_full and not self._is_warm:
            self._is_warm = True
            self._waits = WaitsForCores() if self._state.device.type == "cpu" else None

    @property
    def has_enough(self) -> bool:
        """Whether enough steps are timed, and the peak is measured."""
        return len(self._seconds) >= MEASURED_STEPS and self._runner.peak is not None

    @property
    def count(self) -> int:
        """Number of steps that were timed."""
        return len(self._seconds)

    @property
    def step_seconds(self) -> float:
        """Median time of a step."""
        return statistics.median(self._seconds)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Reserved bytes at the peak, without the average of the weights, which a plan does not count.

        None if the peak was not measured, is not of what was planned, or if blocks hold the average too.
        """
        average = self._state.average
        has_uncounted = average is not None and self._state.device.type == "cuda"
        if self._runner.peak is None or has_uncounted or not self._runner.peak_is_as_planned:
            return None
        return self._runner.peak.reserved_bytes - (0 if average is None else average.held_bytes)
