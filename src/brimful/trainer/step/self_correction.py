"""Predicted beside measured in the first steps of a run: shown, and kept for later plans."""

from __future__ import annotations

from dataclasses import replace

from brimful.cost.uncertainty import STEP_SPREAD
from brimful.planner import Plan
from brimful.planner.simplest import Complexity, complexity_of
from brimful.report.measurements import comparison_line, plan_again_line
from brimful.results import SelfCorrection, StepRecord
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.trainer.step.kept_factors import keep_factors
from brimful.trainer.step.measured_steps import Measuring
from brimful.trainer.step.runner import StepRunner


class SelfCorrecting:
    """Compares predicted and measured, once; keeps the record in the state of the run, and logs it."""

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        runner: StepRunner,
        logger: RunLogger,
    ) -> None:
        self._config, self._state, self._logger = config, state, logger
        self._measuring = Measuring(state, runner)
        average, plan = state.average, config.plan
        if plan is not None and average is not None:
            plan = replace(plan, budget_bytes=plan.budget_bytes - average.held_bytes)
        self._plan = plan
        """The plan, with the budget that the average of the weights leaves."""

    def after_step(self, record: StepRecord) -> None:
        """Compare predicted and measured once enough steps are measured; called between two steps."""
        plan, state = self._plan, self._state
        if plan is None or not state.ranks.is_first or state.settings != plan.settings:
            return  # nothing was predicted of these settings
        found = state.self_correction
        if found is not None and found.settings == plan.settings:
            return
        state.self_correction = None  # of another plan
        self._measuring.add(record)
        if self._measuring.has_enough:
            self._compare(plan, record.step)

    def _compare(self, plan: Plan, step: int) -> None:
        measured = self._measuring
        peak_bytes = measured.peak_reserved_bytes
        found = SelfCorrection(
            step=step,
            measured_steps=measured.count,
            settings=plan.settings,
            predicted_step_seconds=plan.predicted_step_seconds,
            measured_step_seconds=measured.step_seconds,
            predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
            measured_peak_reserved_bytes=peak_bytes,
            exceeds_budget=peak_bytes is not None and peak_bytes + _context_bytes(plan) > plan.budget_bytes,
            core_wait_fraction=measured.core_wait_fraction,
        )
        self._state.self_correction = found
        self._show(comparison_line(found, plan))
        refusal = keep_factors(self._config, self._state, plan, found)
        if refusal:
            self._show(refusal)
        if refusal is None and (found.exceeds_budget or may_be_faster(plan, peak_bytes)):
            self._show(plan_again_line(found))
        self._logger.append("self_correction", found)

    def _show(self, line: str) -> None:
        self._logger.progress.show_note(line)


def may_be_faster(plan: Plan, peak_reserved_bytes: int | None) -> bool:
    """Whether another plan may be faster by more than measurements vary, as the peak leaves memory.

    The curve of the plan over budgets shows that. `peak_reserved_bytes` is the measured peak; None if it was
    not measured.
    """
    predicted_bytes = plan.predicted_peak_reserved_bytes
    if peak_reserved_bytes is None or peak_reserved_bytes >= predicted_bytes:
        return False
    if complexity_of(plan.settings) is Complexity.NOTHING:
        return False
    context_bytes = _context_bytes(plan)
    permitted_bytes = (
        context_bytes + (plan.budget_bytes - context_bytes) * predicted_bytes // peak_reserved_bytes
    )
    beyond = [point for point in plan.budget_curve if point.budget_bytes >= permitted_bytes]
    if not plan.budget_curve:  # a plan written by hand
        return True
    least_seconds = (beyond[:1] or plan.budget_curve[-1:])[0].predicted_step_seconds
    return least_seconds < plan.predicted_step_seconds * (1 - STEP_SPREAD)


def _context_bytes(plan: Plan) -> int:
    return plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
