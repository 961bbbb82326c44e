"""Predicted beside measured in the first steps of a run: kept for later plans, and better settings found.

Start reading at `SelfCorrecting.after_step`. With `replan` a run changes to better settings between two steps,
once; steps under them are measured again, and if these exceed the budget or are slower, it returns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import date

from brimful.cost.uncertainty import DEVIATIONS, STEP_SPREAD
from brimful.errors import BrimfulError, EquivalenceError, OutOfMemoryError
from brimful.execution.out_of_memory import RanOut, make_room, unless_out_of_memory
from brimful.planner import Plan
from brimful.profiling import device_record, verify_model
from brimful.profiling.job_calibrations import JobKind, keep_job_calibration
from brimful.profiling.peak import PeakMemory
from brimful.profiling.residents import resident_storages
from brimful.quantities import format_bytes
from brimful.results import (
    BetterSettings,
    EquivalenceReport,
    JobCalibration,
    MeasuredChange,
    SelfCorrection,
    StepRecord,
)
from brimful.results.self_correction import LARGEST_PEAK_FACTOR, LARGEST_TIME_FACTOR
from brimful.settings import Settings
from brimful.trainer.data.rng import random_state_now, restore_random_state
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.monitor.self_correction import change_lines, correction_lines, factor_line
from brimful.trainer.options import RunConfig
from brimful.trainer.state import TrainState
from brimful.trainer.step.better import MeasuredSteps, exceeds, find_better, may_be_better
from brimful.trainer.step.runner import StepRunner

MEASURED_STEPS = 5
"""Steps whose median time is compared, as in `bf.measure`; without the first of a launch or after a change, and
without the one in which memory is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """Whether a run keeps the settings that it changed to, and by what."""

    step: int
    tried: MeasuredSteps | None
    """None if time did not decide."""
    peak_bytes: int | None
    is_kept: bool
    again: MeasuredSteps | None = None
    """Of the settings before, measured again."""


class SelfCorrecting:
    """Compares predicted and measured, and changes to better settings if the run may.

    Args:
        config: The configuration of the run.
        state: The state of the run; gets the record.
        runner: Measures the peak of a step, and changes settings.
        logger: Shows and writes what is found.
    """

    def __init__(self, config: RunConfig, state: TrainState, runner: StepRunner, logger: RunLogger) -> None:
        self._config = config
        self._state = state
        self._runner = runner
        self._logger = logger
        self._is_warm = False
        """Whether a step under these settings has run in this launch."""
        self._seconds: list[float] = []
        self._measured: MeasuredSteps | None = None
        """Of the steps before a change, in this launch."""
        self._peak: PeakMemory | None = None
        """The peak before a change."""
        self._tried: MeasuredSteps | None = None
        """Of the steps after a change."""
        self._tried_peak: PeakMemory | None = None
        self._since_step = 0
        """The step after which this launch put settings in force; 0 if it has not."""

    def after_step(self, record: StepRecord) -> None:
        """Compare predicted and measured once enough steps are measured; between two steps of the run.

        Args:
            record: The latest step.

        Raises:
            SaveError: A record could not be written.
            PartialUpdateError: Random numbers could not be restored after a search.
        """
        plan, found = self._config.plan, self._state.self_correction
        if plan is None or not self._state.ranks.is_first:
            return
        if found is not None and found.settings not in (plan.settings, self._state.settings):
            found = self._state.self_correction = None  # the run was resumed with another plan
        is_done = found is not None and (found.changed_after_step is None or found.change is not None)
        if is_done:
            return
        self._add(record)
        if found is None:
            self._compare(plan, record.step)
        else:
            self._check_change(plan, found, record.step)

    def _add(self, record: StepRecord) -> None:
        """Keep the time of a step that is like those of the prediction."""
        is_full = record.updated and record.samples == self._state.settings.global_batch_size
        is_timed = is_full and self._is_warm and not record.memory_measured
        if is_timed and len(self._seconds) < MEASURED_STEPS:
            self._seconds.append(record.seconds)
        self._is_warm = self._is_warm or is_full

    @property
    def _has_enough(self) -> bool:
        return len(self._seconds) >= MEASURED_STEPS and self._runner.peak is not None

    def _compare(self, plan: Plan, step: int) -> None:
        """Compare the plan's predictions with what its steps measured, and search for better settings."""
        if not self._has_enough or self._state.settings != plan.settings:
            return  # memory ran out, and other settings have replaced those of the plan
        measured = self._measured = MeasuredSteps.of(self._seconds, self._peak_bytes())
        self._peak = self._runner.peak
        found = SelfCorrection(
            step=step,
            measured_steps=len(self._seconds),
            settings=plan.settings,
            predicted_step_seconds=plan.predicted_step_seconds,
            measured_step_seconds=measured.step_seconds,
            predicted_peak_reserved_bytes=plan.predicted_peak_reserved_bytes,
            measured_peak_reserved_bytes=measured.peak_reserved_bytes,
            exceeds_budget=exceeds(plan.budget_bytes, measured.peak_reserved_bytes, _context_bytes(plan)),
        )
        self._state.self_correction = found
        self._logger.progress.show_note(factor_line(found, plan))
        self._keep(plan, found)
        if may_be_better(plan, measured):
            found = self._with_better(plan, found, measured)
        self._log(found)

    def _with_better(self, plan: Plan, found: SelfCorrection, measured: MeasuredSteps) -> SelfCorrection:
        """Search for better settings, and change to them if the run may; show what came of it."""
        if self._state.ranks.is_distributed:
            self._logger.progress.show_note(
                "with several ranks no other settings are searched while training; plan again, with what was "
                "measured"
            )
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
            self._runner.recovery.change_settings(search)
        except Exception as error:  # training can continue without it
            problem = f"{type(error).__name__}: {error}"
            make_room(self._state.device)
        found = replace(found, better=better, searched_seconds=time.perf_counter() - start)
        if better is not None and self._config.options.replan:
            found, problem = self._changed(found, better)
        restore_random_state(random, self._state.device)  # planning makes batches, which draws random numbers
        for line in correction_lines(found, plan, problem):
            self._logger.progress.show_note(line)
        return found

    def _changed(self, found: SelfCorrection, better: BetterSettings) -> tuple[SelfCorrection, str | None]:
        """Put better settings in force, if they compute what the baseline computes; why not, if they do not."""
        certificate: EquivalenceReport | None = None

        def certified(_before: Settings) -> Settings:
            nonlocal certificate
            if self._config.options.verify:
                certificate = self._certificate(better.settings)
            return better.settings

        try:
            self._runner.recovery.change_settings(certified)
        except Exception as error:  # those before are in force again
            return found, str(error) if isinstance(error, BrimfulError) else f"{type(error).__name__}: {error}"
        self._begin_measuring()
        return replace(found, changed_after_step=self._state.step, certificate=certificate), None

    def _certificate(self, settings: Settings) -> EquivalenceReport:
        """The comparison of settings with the baseline, as before the first step; raises if they differ."""
        config, state = self._config, self._state
        assert config.plan is not None
        held_bytes = sum(resident_storages(state.model, state.optimizer).values())
        copied_bytes = 2 * sum(each.nbytes for each in state.model.parameters())  # a copy and its gradients
        if held_bytes + copied_bytes > config.plan.budget_bytes:
            raise OutOfMemoryError(
                "comparing them with the baseline takes a copy of the model and its gradients, "
                f"{format_bytes(copied_bytes)} beside {format_bytes(held_bytes)}, which exceeds the budget; "
                "verify=False changes without it"
            )
        try:
            report = unless_out_of_memory(
                lambda: verify_model(config.job, settings, state.model, seed=config.options.seed)
            )
        finally:
            make_room(state.device)
        if isinstance(report, RanOut):
            raise OutOfMemoryError(f"memory ran out in comparing them with the baseline: {report.message}")
        if not report.holds:
            raise EquivalenceError(f"they do not compute what the baseline does: {report}")
        return report

    def _begin_measuring(self, peak: PeakMemory | None = None) -> None:
        """Measure time and, unless it is known, peak of the steps from here on."""
        self._seconds, self._is_warm = [], False
        self._runner.peak = peak
        self._since_step = self._state.step
        make_room(self._state.device)  # segments that only the steps before had a use for

    def _check_change(self, plan: Plan, found: SelfCorrection, step: int) -> None:
        """Keep the new settings; return to those before if the peak exceeds the budget or steps are slower."""
        better = found.better
        assert better is not None
        if self._state.settings == found.settings:
            self._check_again(plan, found, step)
            return
        peak_bytes = self._peak_bytes()
        is_over = exceeds(plan.budget_bytes, peak_bytes, _context_bytes(plan))
        before_bytes = found.measured_peak_reserved_bytes
        takes_more = peak_bytes is not None and before_bytes is not None and peak_bytes > before_bytes
        has_others = self._state.settings != better.settings  # memory ran out, and still others replaced them
        if has_others or (is_over and (takes_more or not found.exceeds_budget)):
            if not has_others:
                self._put_in_force(found.settings, self._peak)
            self._end(plan, found, _Decision(step=step, tried=None, peak_bytes=peak_bytes, is_kept=has_others))
        elif self._has_enough:
            tried = self._tried = MeasuredSteps.of(self._seconds, peak_bytes)
            if found.exceeds_budget or not self._is_slower(found, tried):
                self._end(plan, found, _Decision(step=step, tried=tried, peak_bytes=peak_bytes, is_kept=True))
                return
            self._tried_peak = self._runner.peak
            self._put_in_force(found.settings, self._peak)

    def _check_again(self, plan: Plan, found: SelfCorrection, step: int) -> None:
        """Decide by steps under the settings before, measured again: the machine may be slower than it was."""
        assert found.better is not None
        if not self._has_enough:
            return
        tried, again = self._tried, MeasuredSteps.of(self._seconds, None)
        is_kept = tried is not None and tried.step_seconds < again.step_seconds
        if is_kept:
            self._put_in_force(found.better.settings, self._tried_peak)
        peak_bytes = None if tried is None else tried.peak_reserved_bytes
        self._end(
            plan, found, _Decision(step=step, tried=tried, peak_bytes=peak_bytes, is_kept=is_kept, again=again)
        )

    def _is_slower(self, found: SelfCorrection, measured: MeasuredSteps) -> bool:
        """Whether steps take longer than those before the change, by more than both vary."""
        before_spread = STEP_SPREAD if self._measured is None else self._measured.spread
        margin = DEVIATIONS * (before_spread**2 + measured.spread**2) ** 0.5
        return measured.step_seconds > found.measured_step_seconds * (1 + margin)

    def _put_in_force(self, settings: Settings, peak: PeakMemory | None) -> None:
        self._runner.recovery.change_settings(lambda _settings: settings)
        self._begin_measuring(peak)

    def _end(self, plan: Plan, found: SelfCorrection, decided: _Decision) -> None:
        change = MeasuredChange(
            step=decided.step,
            measured_step_seconds=None if decided.tried is None else decided.tried.step_seconds,
            measured_peak_reserved_bytes=decided.peak_bytes,
            measured_again_step_seconds=None if decided.again is None else decided.again.step_seconds,
            is_kept=decided.is_kept,
            in_force_after_step=self._since_step or found.changed_after_step or decided.step,
        )
        found = replace(found, change=change)
        for line in change_lines(found, plan):
            self._logger.progress.show_note(line)
        self._log(found)

    def _log(self, found: SelfCorrection) -> None:
        self._state.self_correction = found
        self._logger.files.append_record("self_correction", found)

    def _peak_bytes(self) -> int | None:
        """The measured peak; None if it was not, or has what a plan does not count."""
        has_uncounted = self._state.average is not None and self._state.device.type == "cuda"
        peak = self._runner.peak
        return None if peak is None or has_uncounted else peak.reserved_bytes

    def _keep(self, plan: Plan, found: SelfCorrection) -> None:
        """Keep the factors for later plans, where the predictions are of this device and these versions."""
        if plan.job_kind is None:
            return
        config, state = self._config, self._state
        kind = JobKind.of(
            config.job,
            device_record(state.device),
            found.settings,
            parameter_count=sum(each.numel() for each in state.model.parameters()),
        )
        if kind.key != plan.job_kind:
            return
        before = plan.job_calibration
        times = found.measured_step_seconds / found.predicted_step_seconds
        peaks = _ratio(found.measured_peak_reserved_bytes, found.predicted_peak_reserved_bytes)
        if before is not None:  # the plan's predictions were multiplied by these
            times *= before.time_factor
            peaks = None if peaks is None else peaks * before.factor_of_peak
        if not _is_plausible(times, LARGEST_TIME_FACTOR) or not _is_plausible(peaks, LARGEST_PEAK_FACTOR):
            self._logger.progress.show_note(
                "the factors are not kept for later plans: more than "
                f"{LARGEST_TIME_FACTOR:g} × in time or {LARGEST_PEAK_FACTOR:g} × in peak memory is not an "
                "error of predictions for this job"
            )
            return
        keep_job_calibration(
            kind,
            JobCalibration(
                device=kind.device.name,
                job=kind.job,
                parameter_count=kind.parameter_count,
                precision=kind.precision,
                optimizer=kind.optimizer,
                time_factor=times,
                peak_factor=peaks,
                measured_steps=found.measured_steps,
                measured_on=date.today().isoformat(),
            ),
        )


def _context_bytes(plan: Plan) -> int:
    return plan.predicted_peak_device_bytes - plan.predicted_peak_reserved_bytes


def _ratio(measured: int | None, predicted: int) -> float | None:
    return None if measured is None else measured / predicted


def _is_plausible(factor: float | None, largest: float) -> bool:
    return factor is None or 1 / largest <= factor <= largest
