"""Predicted beside measured in the first steps of a run: kept for later plans, and better settings found.

Start reading at `SelfCorrecting.after_step`. With `replan` a run changes to better settings between two steps,
once; steps under them are measured again, and if these exceed the budget or are slower, it returns
(`settings_change.py`).
"""

from __future__ import annotations

import time
from dataclasses import replace

from brimful.errors import BrimfulError, PartialUpdateError
from brimful.execution.out_of_memory import make_room
from brimful.planner import Plan
from brimful.profiling import device_record
from brimful.results import BetterSettings, EquivalenceReport, SelfCorrection, StepRecord
from brimful.settings import Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.monitor.self_correction import change_lines, correction_lines, factor_line
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.trainer.step.better import find_better, may_be_better
from brimful.trainer.step.kept_factors import keep_factors
from brimful.trainer.step.measured_steps import MeasuredSteps, Measuring, exceeds
from brimful.trainer.step.runner import StepRunner
from brimful.trainer.step.settings_change import Measured, SettingsChange
from brimful.trainer.verify import verified_in_training


class SelfCorrecting:
    """Compares predicted and measured, and changes to better settings if the run may.

    Args:
        config: The configuration of the run.
        state: The state of the run; gets the record.
        runner: Measures the peak of a step, and changes settings.
        logger: Shows and writes what is found.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        runner: StepRunner,
        logger: RunLogger,
    ) -> None:
        self._config = config
        self._state = state
        self._recovery = runner.recovery
        self._logger = logger
        self._measuring = Measuring(state, runner)
        average, plan = state.average, config.plan
        if plan is not None and average is not None:
            plan = replace(plan, budget_bytes=plan.budget_bytes - average.held_bytes)
        self._plan = plan
        """The plan, with the budget that the average of the weights leaves."""
        self._change = None if plan is None else SettingsChange(state, runner.recovery, self._measuring, plan)

    def after_step(self, record: StepRecord) -> None:
        """Compare predicted and measured once enough steps are measured; between two steps of the run.

        Args:
            record: The latest step.

        Raises:
            SaveError: A record could not be written.
            PartialUpdateError: Random numbers could not be restored after a search.
        """
        plan, found = self._plan, self._state.self_correction
        if plan is None or self._change is None or not self._state.ranks.is_first:
            return
        if found is not None and found.settings not in (plan.settings, self._state.settings):
            found = self._state.self_correction = None  # the run was resumed with another plan
        is_done = found is not None and (found.changed_after_step is None or found.change is not None)
        if is_done:
            return
        self._measuring.add(record)
        if found is None:
            self._compare(plan, record.step)
        elif (change := self._change.check(found, record.step)) is not None:
            found = replace(found, change=change)
            self._show(*change_lines(found, plan))
            self._log(found)

    def _compare(self, plan: Plan, step: int) -> None:
        """Compare the plan's predictions with what its steps measured, and search for better settings."""
        if not self._measuring.has_enough or self._state.settings != plan.settings:
            return  # memory ran out, and other settings have replaced those of the plan
        measured = self._measuring.measured()
        context_bytes = plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes
        found = SelfCorrection(
            step=step,
            measured_steps=measured.count,
            settings=plan.settings,
            predicted_step_seconds=plan.predicted_step_seconds,
            measured_step_seconds=measured.step_seconds,
            predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
            measured_peak_reserved_bytes=measured.peak_reserved_bytes,
            exceeds_budget=exceeds(plan.budget_bytes, measured.peak_reserved_bytes, context_bytes),
            core_wait_fraction=measured.core_wait_fraction,
        )
        self._state.self_correction = found
        self._show(factor_line(found, plan))
        refusal = keep_factors(self._config, self._state, plan, found)
        if refusal is not None:
            self._show(refusal)
        if may_be_better(plan, measured):
            found = self._with_better(plan, found, measured)
        self._log(found)

    def _with_better(self, plan: Plan, found: SelfCorrection, measured: MeasuredSteps) -> SelfCorrection:
        """Search for better settings, and change to them if the run may; show what came of it."""
        if self._state.ranks.is_distributed:
            self._show("with several ranks no other settings are searched while training; plan again")
            return found
        start = time.perf_counter()
        random = random_state_now(self._state.device)
        problem: str | None = None
        better: BetterSettings | None = None

        def search(before: Settings) -> Settings:
            nonlocal better
            job, device = self._config.job, device_record(self._state.device)
            better = find_better(job, plan, before, device, measured)
            return before

        try:
            self._recovery.change_settings(search)
        except Exception as error:  # training can continue without it
            problem = _reason(error)
            make_room(self._state.device)
        found = replace(found, better=better, searched_seconds=time.perf_counter() - start)
        if better is not None and self._config.options.replan:
            found, problem = self._changed(plan, found, better, measured)
        restore_random_state(random, self._state.device)  # planning makes batches, which draws random numbers
        self._show(*correction_lines(found, plan, problem))
        return found

    def _changed(
        self, plan: Plan, found: SelfCorrection, better: BetterSettings, measured: MeasuredSteps
    ) -> tuple[SelfCorrection, str | None]:
        """Put better settings in force, if they compute what the baseline computes; why not, if they do not."""
        state = self._state
        certificate: EquivalenceReport | None = None

        def certified(_before: Settings) -> Settings:
            nonlocal certificate
            if self._config.options.verify:
                certificate = verified_in_training(
                    state.model, state.optimizer, self._config, plan, better.settings
                )
            return better.settings

        try:
            self._recovery.change_settings(certified)
        except PartialUpdateError:
            raise
        except Exception as error:  # those before are in force again
            return found, _reason(error)
        assert self._change is not None
        self._change.before = Measured(steps=measured, peak=self._measuring.peak)
        self._measuring.begin()
        return replace(found, changed_after_step=state.step, certificate=certificate), None

    def _show(self, *lines: str) -> None:
        for line in lines:
            self._logger.progress.show_note(line)

    def _log(self, found: SelfCorrection) -> None:
        self._state.self_correction = found
        self._logger.files.append_record("self_correction", found)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, BrimfulError) else f"{type(error).__name__}: {error}"
