"""A job's own training loop on a real device → `Measurement`."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from brimful.batches import make_batch
from brimful.errors import UsageError
from brimful.execution.job_loop import LoopBatches
from brimful.execution.setup import build_model
from brimful.job import Batch, Job
from brimful.profiling.cpu_memory import record_cpu_memory
from brimful.profiling.cuda_memory import record_cuda_memory
from brimful.profiling.peak import PeakMemory, measurement_of, peak_of_cpu, peak_of_cuda
from brimful.profiling.timing import WaitsForCores
from brimful.results import Measurement

_WARM_STEPS = 2
"""The first step makes optimizer state, the second finds the allocator as later ones do."""

_NO_GPU = ("Torch not compiled with CUDA", "Found no NVIDIA driver", "No CUDA GPUs are available")
"""What torch says of a GPU that is not there (torch/cuda/__init__.py, torch 2.13)."""


def measure_loop(
    job: Job, micro_batch_size: int, *, device: torch.device, steps: int, seed: int
) -> Measurement:
    """Run a job's loop over real batches and measure memory and time of its steps.

    The loop runs twice, each time with a new model: once for the memory of the third optimizer step and of the
    loop after it, once to time steps. It receives the same batch repeatedly.

    Args:
        job: Its `loop` is called, which decides where it runs.
        micro_batch_size: Samples per batch.
        device: The model's device.
        steps: Number of optimizer steps to time, at least 1.
        seed: Seeds the model's weights, the batch and dropout.

    Returns:
        Peak memory from the third step on, and the median time of a step.

    Raises:
        UsageError: The loop takes no batch, makes no third optimizer step, or uses a GPU that is not available.
    """
    runs = _Runs(job, micro_batch_size, device, seed)
    peak = runs.measured_memory()
    seconds, waited = runs.seconds(steps)
    return measurement_of(peak, seconds, device, loss=None, core_wait_fraction=waited)


class _Runs:
    """Runs a job's loop, each time from the same seed."""

    def __init__(self, job: Job, micro_batch_size: int, device: torch.device, seed: int) -> None:
        self._job, self._device, self._seed = job, device, seed
        self._size = micro_batch_size

    def measured_memory(self) -> PeakMemory:
        """The peak from where the step after the warm ones begins.

        The model is built while memory is recorded, so that whatever the loop frees is seen.
        """
        batch = self._batch()
        if self._device.type == "cuda":
            with record_cuda_memory(self._device) as cuda:
                self._run(batch, _WARM_STEPS + 1, cuda.count_from_here)
            return peak_of_cuda(cuda)
        with record_cpu_memory() as cpu:
            self._run(batch, _WARM_STEPS + 1, cpu.count_from_here)
        return peak_of_cpu(cpu, {}, batch)

    def seconds(self, steps: int) -> tuple[list[float], float | None]:
        """How long each step takes after the warm ones, and how much of it a thread waited for a processor.

        Args:
            steps: To time; fewer are where the loop ends by itself.

        Returns:
            Seconds per step, and what `WaitsForCores` measured from the first of them on.
        """
        begins: list[float] = []
        ends: list[float] = []
        waits: list[WaitsForCores] = []

        def begin() -> None:
            if not waits:
                waits.append(WaitsForCores())
            begins.append(self._now())

        made = self._run(self._batch(), _WARM_STEPS + steps, begin, lambda: ends.append(self._now()))
        waited = waits[0].fraction() if waits else None
        stamps = [*begins, *(ends or [self._now()])]  # a batch may be drawn that no step is made of
        timed = max(made - _WARM_STEPS, 0)
        return [end - begin for begin, end in pairwise(stamps)][:timed], waited

    def _run(
        self,
        batch: Batch,
        steps: int,
        begin_step: Callable[[], None],
        end: Callable[[], None] = lambda: None,
    ) -> int:
        """Call the loop on a new model; `begin_step` is called before each step after the warm-up.

        Args:
            batch: The batch that the loop receives repeatedly.
            steps: Maximum number of steps.
            begin_step: See above.
            end: Called when the loop requests a batch after its last step.

        Returns:
            The number of steps made.
        """

        def begin_batch() -> None:
            if batches.micro_batch == 0 and batches.steps >= _WARM_STEPS:
                begin_step()

        batches = LoopBatches(batch, steps, begin_batch, end)
        hook = register_optimizer_step_post_hook(lambda *_: batches.note_optimizer_step())
        try:
            with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                torch.manual_seed(self._seed)
                model = build_model(self._job, is_copied=True).to(self._device).train()
                batches.feed(self._job, model, UsageError)
        except (AssertionError, RuntimeError) as error:
            if self._device.type != "cpu" or not any(said in str(error) for said in _NO_GPU):
                raise
            raise UsageError(
                f"the loop of {self._job.name!r} uses a GPU, but is measured on the CPU. Use the device of "
                "the model, next(model.parameters()).device, in place of a fixed one."
            ) from error
        finally:
            hook.remove()
        if batches.steps <= _WARM_STEPS:
            raise UsageError(
                f"the loop of {self._job.name!r} ended after {batches.steps} optimizer "
                f"step{'s' if batches.steps > 1 else ''}; the memory of the third is measured. Let it train on "
                "all batches that it gets."
            )
        return batches.steps

    def _batch(self) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            return make_batch(self._job, self._size)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
