"""The result of a run, with predicted beside measured."""

from __future__ import annotations

from brimful.execution.setup import device_name
from brimful.profiling import PeakMemory
from brimful.results import StopReason, TrainingResult, median_step_seconds
from brimful.trainer.monitor.history import RunHistory
from brimful.trainer.setup import RunContext


def result_of(
    run: RunContext, history: RunHistory, *, peak: PeakMemory | None, stopped_because: StopReason
) -> TrainingResult:
    """The result of a run that has ended."""
    config = run.config
    plan = config.plan
    average = run.state.average
    average_bytes = 0 if average is None else average.held_bytes  # beside every step, and in no plan
    return TrainingResult(
        job=config.job.name,
        device=device_name(config.device),
        settings=run.state.settings,
        stopped_because=stopped_because,
        steps=tuple(history.steps),
        validations=tuple(history.validations),
        epochs=tuple(history.epochs),
        budget_bytes=None if plan is None else plan.budget_bytes,
        predicted_peak_allocated_bytes=None
        if plan is None
        else plan.predicted_peak_allocated_bytes + average_bytes,
        measured_peak_allocated_bytes=None if peak is None else peak.allocated_bytes,
        predicted_peak_reserved_bytes=None
        if plan is None
        else plan.predicted_peak_reserved_bytes + average_bytes,
        measured_peak_reserved_bytes=None if peak is None else peak.reserved_bytes,
        predicted_peak_device_bytes=None if plan is None else plan.predicted_peak_device_bytes + average_bytes,
        measured_peak_device_bytes=None if peak is None else peak.device_bytes,
        predicted_step_seconds=None if plan is None else plan.predicted_step_seconds,
        measured_step_seconds=median_step_seconds(history.steps, config.settings.global_batch_size),
        temporaries_at_peak=() if peak is None else peak.temporaries_at_peak,
        certificate=run.certificate,
        recoveries=tuple(history.recoveries),
        run_dir=config.run_dir,
        loss_unit=config.loss_unit,
        predicted_mfu=None if plan is None else plan.predicted_mfu,
        data_loading=run.data_loading,
        notes=tuple(history.notes),
        self_correction=run.state.self_correction,
    )
