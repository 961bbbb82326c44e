"""What part of the device's peak the steps of a run make use of (MFU)."""

from __future__ import annotations

from brimful.batches import make_batch, named_tensors
from brimful.job import Batch, Job
from brimful.planner import Plan
from brimful.results import StepRecord

_Shapes = dict[str, tuple[int, ...]]


class Utilisation:
    """Model FLOPs utilisation of steps, by what the plan counted for a batch of the job's.

    Args:
        plan: Whose FLOPs and peak; None knows neither.
        job: Whose `batch` the plan was made for.
    """

    def __init__(self, plan: Plan | None, job: Job) -> None:
        self._sample_flops = self._peak = None
        if plan is not None and plan.model_flops is not None and plan.peak_flops_per_second is not None:
            self._sample_flops = plan.model_flops / plan.settings.rank_batch_size
            self._peak = plan.peak_flops_per_second * plan.settings.world_size
            self._shapes = _sample_shapes(make_batch(job, plan.settings.micro_batch_size))

    def of(self, record: StepRecord, batch: Batch) -> float | None:
        """The utilisation in a step, and in the waiting before it.

        Args:
            record: The step.
            batch: The global batch it was taken on.

        Returns:
            A fraction; None if the plan does not know it, or was made for samples of other shapes.
        """
        if self._sample_flops is None or self._peak is None:
            return None
        if not self._shapes.items() <= _sample_shapes(batch).items():
            return None
        return self._sample_flops * record.samples / record.total_seconds / self._peak


def _sample_shapes(batch: Batch) -> _Shapes:
    """The shape of one sample, by where it is in the batch."""
    return {path: tuple(tensor.shape[1:]) for path, tensor in named_tensors(batch) if tensor.ndim > 0}
