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
from brimful.profiling.peak import PeakMemory, measurement_of, peak_from_creation
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
    loop after it, once to time `steps` steps, at least 1. It receives the same batch of `micro_batch_size`
    samples repeatedly. `seed` seeds the model's weights, the batch and dropout.

    Raises `UsageError` if the loop takes no batch, makes no third optimizer step, or uses a GPU that is not
    available.
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
        """The peak memory from the beginning of the first step after the warm-up."""
        batch = self._batch()
        with peak_from_creation(self._device, held=[batch]) as (peak, count_from_here):
            self._run(batch, _WARM_STEPS + 1, count_from_here)
        return peak

    def seconds(self, steps: int) -> tuple[list[float], float | None]:
        """Seconds of each step after the warm-up, and the fraction that a thread waited for a processor.

        There are fewer than `steps` where the loop ends by itself. `WaitsForCores` measures the fraction from
        the first of them on.
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
        """Call the loop on a new model, with the same batch repeatedly; return the number of steps made.

        It makes at most `steps`. `begin_step` is called before each step after the warm-up, `end` when the loop
        requests a batch after its last step.
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
