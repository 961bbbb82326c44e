"""What a run comes to: the result, with predicted beside measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from brimful.execution.setup import device_name
from brimful.profiling import PeakMemory
from brimful.results import DataLoading, StepRecord, StopReason, TrainingResult
from brimful.trainer.monitor.logger import RunLogger
from brimful.trainer.setup import RunContext


def result_of(
    run: RunContext,
    logger: RunLogger,
    *,
    peak: PeakMemory | None,
    data_loading: DataLoading | None,
    stopped_because: StopReason,
) -> TrainingResult:
    """The result of a run that has ended.

    Args:
        run: What was asked and predicted, and the final settings.
        logger: The records of the run.
        peak: The measured memory of a step; None if the run was too short to measure it.
        data_loading: How the data were loaded.
        stopped_because: Why it ended.

    Returns:
        All of it, in one record.
    """
    config = run.config
    plan = config.plan
    return TrainingResult(
        job=config.job.name,
        device=device_name(config.device),
        settings=run.state.settings,
        stopped_because=stopped_because,
        steps=tuple(logger.steps),
        validations=tuple(logger.validations),
        budget_bytes=None if plan is None else plan.budget_bytes,
        predicted_peak_allocated_bytes=None if plan is None else plan.predicted_peak_allocated_bytes,
        measured_peak_allocated_bytes=None if peak is None else peak.allocated_bytes,
        predicted_peak_reserved_bytes=None if plan is None else plan.predicted_peak_reserved_bytes,
        measured_peak_reserved_bytes=None if peak is None else peak.reserved_bytes,
        predicted_peak_device_bytes=None if plan is None else plan.predicted_peak_device_bytes,
        measured_peak_device_bytes=None if peak is None else peak.device_bytes,
        predicted_step_seconds=None if plan is None else plan.predicted_step_seconds,
        measured_step_seconds=_steady_seconds(logger.steps, config.settings.global_batch_size),
        temporaries_at_peak=() if peak is None else peak.temporaries_at_peak,
        certificate=run.certificate,
        recoveries=tuple(logger.recoveries),
        run_dir=config.run_dir,
        loss_unit=config.loss_unit,
        predicted_mfu=None if plan is None else plan.predicted_mfu,
        data_loading=data_loading,
        notes=tuple(logger.notes),
    )


def _steady_seconds(records: Sequence[StepRecord], global_batch_size: int) -> float | None:
    """Median over the steps with a full batch, but for the first and the one whose memory was measured."""
    steady = [record for record in records[1:] if record.updated and not record.memory_measured]
    full_samples = global_batch_size
    if all(record.samples != full_samples for record in steady):  # a DataLoader with batches of its own size
        full_samples = max((record.samples for record in steady), default=0)
    seconds = [record.seconds for record in steady if record.samples == full_samples]
    return statistics.median(seconds) if seconds else None
