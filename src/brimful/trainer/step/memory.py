"""Which steps of a run have their memory measured, and the peak memory as text."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.batches import BatchLayout, layout_of, sample_sizes
from brimful.job import Batch
from brimful.results import SampleSize, larger_entries
from brimful.trainer.data.batches import Batches
from brimful.trainer.monitor.progress import memory_text
from brimful.trainer.options import RunConfig
from brimful.trainer.resume import Start
from brimful.trainer.state import TrainState
from brimful.trainer.step.runner import StepRunner

MEASURED_UPDATE = 3
"""The update whose memory is measured: the first makes the optimizer's state, the second may still warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """How large a batch is."""

    samples: int
    sizes: tuple[SampleSize, ...]

    @classmethod
    def of(cls, batch: Batch, layout: BatchLayout) -> _Sizes:
        return cls(samples=layout.count(batch), sizes=sample_sizes(batch, layout))

    @property
    def elements(self) -> float:
        return self.samples * sum(size.elements for size in self.sizes)

    def exceed(self, other: _Sizes) -> bool:
        return self.samples > other.samples or bool(larger_entries(self.sizes, other.sizes))

    def merged(self, other: _Sizes | None) -> _Sizes:
        """The larger of both sizes, in each entry."""
        if other is None:
            return self
        larger = {size.name: size for size in (*other.sizes, *larger_entries(self.sizes, other.sizes))}
        return _Sizes(samples=max(self.samples, other.samples), sizes=tuple(larger.values()))


class MemoryMeter:
    """Chooses the steps whose memory is measured: a steady one on a full batch, and each on a larger batch.

    Steps are counted from the start of this launch: in its first updates a run, resumed or not, has copies on
    the host that later steps do not have. The last batch of an epoch may be too small to show the peak.
    `total_steps` is the length of the run; None if it is not known.
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
        saved = None if start.saved is None else start.saved.checkpoint
        self._first_update = 0 if saved is None else saved.updates
        self._measured_update = MEASURED_UPDATE
        if total_steps is not None:
            left = total_steps - (0 if saved is None else saved.step)
            if _ends_with_part(batches, total_steps, self._full_samples):
                left -= 1
            self._measured_update = min(MEASURED_UPDATE, left)
        self._layout = layout_of(config.job, whole=config.settings.global_batch_size)
        self._measured: _Sizes | None = None
        """The largest sizes that were measured, in each entry."""
        self._early: tuple[_Sizes, Batch] | None = None
        """The largest batch before a steady step."""

    def measures(self, batch: Batch) -> bool:
        """Whether to measure the memory of the next step, on `batch`.

        True for one steady step of a run, and afterwards for each on a batch larger than those before.
        """
        sizes = _Sizes.of(batch, self._layout)
        if self._runner.peak is None:
            self._measured = None  # no step yet, or none since settings changed
        if self._updates < max(self._measured_update - 1, 1):
            if self._early is None or sizes.elements > self._early[0].elements:
                self._early = sizes, batch
            return False
        if self._measured is None:
            return sizes.samples >= self._full_samples
        return sizes.exceed(self._measured)

    def note_measured(self, batch: Batch) -> Batch | None:
        """Keep the size of a batch whose step was measured; return the batch that is still to be measured.

        That is the largest batch of the steps before steady ones; None if it is not larger than those measured.
        """
        sizes, early = _Sizes.of(batch, self._layout), self._early
        self._measured, self._early = sizes.merged(self._measured), None
        if early is None or not early[0].exceed(self._measured):
            return None
        self._measured = early[0].merged(self._measured)
        return early[1]

    @property
    def is_as_planned(self) -> bool:
        """Whether the largest batch that was measured is as large as the planned one, and no larger."""
        plan = self._config.plan
        if plan is None or not plan.sample_sizes or self._measured is None:
            return True
        planned, measured = plan.sample_sizes, self._measured.sizes
        return not larger_entries(planned, measured) and not larger_entries(measured, planned)

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
            return memory_text(self._runner.epoch_peak.run_reserved_bytes, budget_bytes)
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
