"""Model FLOPs utilisation (MFU): the fraction of the device's peak that the steps of a run use."""

from __future__ import annotations

from brimful.batches import layout_of, sample_sizes
from brimful.job import Batch, Job
from brimful.planner import Plan
from brimful.results import StepRecord


class Utilisation:
    """Computes the MFU of steps from the FLOPs that the plan counted for a batch of the job."""

    def __init__(self, plan: Plan | None, job: Job) -> None:
        self._sample_flops = self._peak = None
        if plan is not None and plan.model_flops is not None and plan.peak_flops_per_second is not None:
            self._sample_flops = plan.model_flops / plan.settings.rank_batch_size
            self._peak = plan.peak_flops_per_second * plan.settings.world_size
            self._planned = set(plan.sample_sizes)
            self._layout = layout_of(job, whole=plan.settings.global_batch_size)

    def of(self, record: StepRecord, batch: Batch) -> float | None:
        """The MFU of a step on a global batch, as a fraction, including the time spent waiting for the batch.

        None if the plan does not have it, or was made for samples of other shapes.
        """
        if self._sample_flops is None or self._peak is None:
            return None
        if not self._planned or not self._planned <= set(sample_sizes(batch, self._layout)):
            return None
        return self._sample_flops * record.samples / record.total_seconds / self._peak
