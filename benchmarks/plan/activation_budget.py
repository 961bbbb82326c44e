"""The `activation_memory_budget` of torch.compile as a peer, on this machine's CPU, by real runs.

The budget is a fraction of what the graph would save, not a number of bytes. So a user who has bytes tries
fractions, 1.0 first, then 0.9 and so on, and takes the first whose measured peak is within them: so is it done
here, with the whole batch in one micro-batch. Fractions are measured once for all budgets.

The backend is `aot_eager_decomp_partition`: Inductor's decompositions and its partitioner, which is where the
budget acts, without generated kernels. Its peaks have temporaries that fused kernels would not make, and its
step times are not those of compiled code: compare them with its own at 1.0, not with the baseline's. Breaks
of the graph are counted; each graph has the budget for itself.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from brimful import Job
from brimful.job import Batch
from brimful.profiling import measure_step
from plan.bench import Bench, Failure, Run

BACKEND = "aot_eager_decomp_partition"
FRACTIONS = tuple(tenths / 10 for tenths in range(10, -1, -1))


class ActivationBudget:
    """The fractions of one bench, each measured when it is first asked for.

    Args:
        bench: Its job and plain settings, on a CPU.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.run = cache(self._run)

    def within(self, budget_bytes: int) -> Run | Failure:
        """The largest fraction whose measured peak is within a budget."""
        least: int | None = None
        for fraction in FRACTIONS:
            run = self.run(fraction)
            if isinstance(run, Failure) or run.peak_bytes <= budget_bytes:
                return run
            least = run.peak_bytes if least is None else min(least, run.peak_bytes)
        return Failure(why=f"no fraction is within the budget; the least takes {least} bytes")

    def _run(self, fraction: float) -> Run | Failure:
        job = compiled(self._bench.job, fraction)
        counters.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                measured = measure_step(job, self._bench.plain, steps=1)
        except Exception as error:  # whatever the compiler raises is what it has to say
            text = str(error).strip().partition("\n")[0]
            return Failure(why=f"fraction {fraction}: {type(error).__name__}: {text}")
        return Run(
            job=job,
            settings=self._bench.plain,
            peak_bytes=measured.measured_peak_allocated_bytes,
            notes={
                "activation_memory_budget": fraction,
                "backend": BACKEND,
                "graphs": counters["stats"]["unique_graphs"],
                "graph_breaks": sum(counters["graph_break"].values()),
            },
        )


def compiled(job: Job, fraction: float) -> Job:
    """A job whose model is compiled under a budget.

    Args:
        job: Its loss calls the model.
        fraction: What may be saved of what would be.

    Returns:
        The job with another loss.
    """
    latest: list[Any] = [None, None]  # the model and what it is compiled to

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if latest[0] is not model:
            torch._dynamo.reset()
            latest[:] = model, torch.compile(model, backend=BACKEND)
        with functorch_config.patch(activation_memory_budget=fraction):
            return job.loss(latest[1], batch)

    return replace(job, loss=loss)
