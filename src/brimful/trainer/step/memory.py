"""Which step of a run has its memory measured, and the peak memory as text."""

from __future__ import annotations

import torch

from brimful.batches import layout_of
from brimful.job import Batch
from brimful.trainer.data.batches import Batches
from brimful.trainer.monitor.progress import memory_text
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start
from brimful.trainer.state import TrainState
from brimful.trainer.step.runner import StepRunner

MEASURED_UPDATE = 3
"""The update whose memory is measured: the first makes the optimizer's state, the second may still warm up."""


class MemoryMeter:
    """Chooses the step whose memory is measured: one steady step on a full batch.

    Args:
        config: The configuration of the run.
        state: The state of the run.
        start: The start of this launch. Steps are counted from it: in its first updates a run, resumed or not,
            has copies on the host that later steps do not have.
        runner: Measures the memory of the step.
        batches: Of the training data; the last one of an epoch may be too small to show the peak.
        total_steps: The length of the run; None if it is not known.
    """

    def __init__(
        self,
        config: RunConfig,
        state: TrainState,
        start: Start,
        runner: StepRunner,
        *,
        batches: Batches,
        total_steps: int | None,
    ) -> None:
        self._config = config
        self._state = state
        self._runner = runner
        saved = None if start.saved is None else start.saved.checkpoint.state
        self._first_update = 0 if saved is None else saved.updates
        self._measured_update = MEASURED_UPDATE
        if total_steps is not None:
            left = total_steps - (0 if saved is None else saved.step)
            if _ends_with_part(batches, total_steps, self._full_samples):
                left -= 1
            self._measured_update = min(MEASURED_UPDATE, left)

    def measures(self, batch: Batch) -> bool:
        """Whether to measure the memory of the next step.

        Args:
            batch: The batch of the step.

        Returns:
            True for one step of a run.
        """
        is_steady = self._updates >= max(self._measured_update - 1, 1)
        layout = layout_of(self._config.job, whole=self._config.settings.global_batch_size)
        return self._runner.peak is None and is_steady and layout.count(batch) >= self._full_samples

    @property
    def includes_copies(self) -> bool:
        """Whether the next step has copies for undoing its update in the memory that is measured."""
        is_early = self._updates < MEASURED_UPDATE - 1
        shares_memory = self._config.device.type == "cpu" and not self._state.parallel.is_sharded
        return is_early and shares_memory

    def peak_text(self) -> str:
        """Peak memory as text: reserved on CUDA, allocated on a CPU; predicted until measured."""
        plan, device, peak = self._config.plan, self._config.device, self._runner.peak
        budget_bytes = None if plan is None else plan.budget_bytes
        if device.type == "cuda":
            # the memory that the budget counts, except for the CUDA context
            return memory_text(torch.cuda.max_memory_reserved(device), budget_bytes)
        if peak is not None:
            return memory_text(peak.allocated_bytes, budget_bytes)
        average = self._state.average
        beside_bytes = 0 if average is None else average.held_bytes
        predicted_bytes = None if plan is None else plan.predicted_peak_allocated_bytes + beside_bytes
        return memory_text(predicted_bytes, budget_bytes, predicted=True)

    @property
    def _updates(self) -> int:
        """Updates of this launch."""
        return self._state.updates - self._first_update

    @property
    def _full_samples(self) -> int:
        """Samples with which a step reaches its peak.

        Two micro-batches, as the second runs beside the gradients of the first; the whole batch where the loss
        couples its samples.
        """
        settings = self._config.settings
        of_rank = settings.rank_batch_size
        if self._config.job.embed is None:
            of_rank = min(of_rank, 2 * settings.micro_batch_size)
        return of_rank * self._state.ranks.count


def _ends_with_part(batches: Batches, total_steps: int, full_samples: int) -> bool:
    """Whether the last step of a run is on the rest of an epoch's samples, too few to reach the peak."""
    steps, samples = batches.steps_per_epoch, batches.last_samples
    return bool(steps and samples is not None and total_steps % steps == 0 and samples < full_samples)
