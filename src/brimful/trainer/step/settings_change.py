"""After a change of settings: measured again, and kept, or those before are put in force again.

Start reading at `SettingsChange.check`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from brimful.cost.uncertainty import DEVIATIONS, STEP_SPREAD
from brimful.planner import Plan
from brimful.profiling import PeakMemory
from brimful.results import MeasuredChange, SelfCorrection
from brimful.settings import Settings
from brimful.trainer.state import TrainState
from brimful.trainer.step.measured_steps import MeasuredSteps, Measuring, exceeds
from brimful.trainer.step.recovery import OomRecovery


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps under some settings, with all that was measured of one of them."""

    steps: MeasuredSteps
    peak: PeakMemory | None


class SettingsChange:
    """Decides by measurements whether a run keeps the settings that it has changed to.

    Args:
        state: The state of the run.
        recovery: Puts settings in force.
        measuring: Measures steps.
        plan: Has the budget.
    """

    def __init__(self, state: TrainState, recovery: OomRecovery, measuring: Measuring, plan: Plan) -> None:
        self._state = state
        self._recovery = recovery
        self._measuring = measuring
        self._budget_bytes = plan.budget_bytes
        self._context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
        self.before: Measured | None = None
        """Of the steps before the change; None if that was in an earlier launch."""
        self._tried: Measured | None = None
        """Of the steps after the change."""

    def check(self, found: SelfCorrection, step: int) -> MeasuredChange | None:
        """Keep the new settings; return to those before if the peak exceeds the budget or steps are slower.

        Args:
            found: Has the settings before and after the change.
            step: The latest step.

        Returns:
            What was decided; None as long as more steps are to be measured.
        """
        better = found.better
        assert better is not None
        if self._state.settings == found.settings:
            return self._check_again(found, better.settings, step)
        peak_bytes = self._measuring.peak_bytes
        if self._state.settings != better.settings:  # memory ran out, and still others replaced them
            return self._decided(found, step, peak_bytes=peak_bytes, is_kept=True)
        before_bytes = found.measured_peak_reserved_bytes
        takes_more = peak_bytes is not None and before_bytes is not None and peak_bytes > before_bytes
        is_over = exceeds(self._budget_bytes, peak_bytes, self._context_bytes)
        if is_over and (takes_more or not found.exceeds_budget):
            self._put_in_force(found.settings, self.before)
            return self._decided(found, step, peak_bytes=peak_bytes, is_kept=False)
        if not self._measuring.has_enough:
            return None
        tried = Measured(steps=self._measuring.measured(), peak=self._measuring.peak)
        if found.exceeds_budget or not self._is_slower(found, tried.steps):
            return self._decided(found, step, peak_bytes=peak_bytes, is_kept=True, tried=tried)
        self._tried = tried
        self._put_in_force(found.settings, self.before)
        return None

    def _check_again(self, found: SelfCorrection, better: Settings, step: int) -> MeasuredChange | None:
        """Decide by steps under the settings before, measured again: the machine may be slower than it was."""
        if not self._measuring.has_enough:
            return None
        tried, again = self._tried, self._measuring.measured().step_seconds
        is_kept = tried is not None and tried.steps.step_seconds < again
        if is_kept:
            self._put_in_force(better, tried)
        peak_bytes = None if tried is None else tried.steps.peak_reserved_bytes
        decided = self._decided(found, step, peak_bytes=peak_bytes, is_kept=is_kept, tried=tried)
        return replace(decided, measured_again_step_seconds=again)

    def _is_slower(self, found: SelfCorrection, measured: MeasuredSteps) -> bool:
        """Whether steps take longer than those before the change, by more than both vary."""
        before_spread = STEP_SPREAD if self.before is None else self.before.steps.spread
        margin = DEVIATIONS * (before_spread**2 + measured.spread**2) ** 0.5
        return measured.step_seconds > found.measured_step_seconds * (1 + margin)

    def _put_in_force(self, settings: Settings, measured: Measured | None) -> None:
        self._recovery.change_settings(lambda _settings: settings)
        self._measuring.begin(None if measured is None else measured.peak)

    def _decided(
        self,
        found: SelfCorrection,
        step: int,
        *,
        peak_bytes: int | None,
        is_kept: bool,
        tried: Measured | None = None,
    ) -> MeasuredChange:
        return MeasuredChange(
            step=step,
            measured_step_seconds=None if tried is None else tried.steps.step_seconds,
            measured_peak_reserved_bytes=peak_bytes,
            is_kept=is_kept,
            in_force_after_step=self._measuring.since_step or found.changed_after_step or step,
        )
