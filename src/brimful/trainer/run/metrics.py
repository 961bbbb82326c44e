"""The metrics of a validation: means over samples, and what a job computes from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from brimful.distributed.ranks import Ranks
from brimful.errors import UsageError
from brimful.job import Job


class MetricSums:
    """Sums of a job's metrics over samples, from which their means follow for any split of the data."""

    def __init__(self, job: Job) -> None:
        self._summarize = job.summarize
        self._sums: dict[str, Tensor] = {}

    def add(self, means: Mapping[str, Tensor], samples: int) -> None:
        """Add the metrics of a batch: means over its samples, as `read_metrics` returns them."""
        for name, value in means.items():
            before = self._sums.setdefault(name, torch.zeros_like(value))
            if before.shape != value.shape:
                raise UsageError(
                    f"Job(metrics=…) returned {name!r} of shape {tuple(value.shape)}, and of shape "
                    f"{tuple(before.shape)} for another batch. A metric is a mean over samples of one shape."
                )
            if samples:
                self._sums[name] = before + value * samples

    def metrics(self, samples: float, ranks: Ranks) -> dict[str, float]:
        """The metrics to report: means over the samples of all ranks, or what `Job.summarize` makes of them.

        All ranks call this together. `samples` is the number of samples over all ranks, at least 1. Raises
        UsageError if `Job.summarize` does not return names and numbers.
        """
        names = sorted(self._sums)
        flat = [number for name in names for number in self._sums[name].flatten().tolist()]
        totals = iter(ranks.all_reduce(*flat)) if flat else iter(())
        means = {
            name: torch.tensor(
                [next(totals) / samples for _ in range(self._sums[name].numel())], dtype=torch.float64
            ).reshape(self._sums[name].shape)
            for name in names
        }
        if self._summarize is None or not means:
            return {name: float(value) for name, value in means.items()}
        found = read_metrics(self._summarize(means), what="summarize", is_single=True)
        return {name: float(value) for name, value in found.items()}


def metrics_of(job: Job, *arguments: Any) -> dict[str, Tensor]:
    """Call a job's metrics; return means over the batch by name, none for a job without metrics.

    `arguments` are the model and a batch; or the embeddings of a batch. The means are float64 on the host,
    without dimensions unless the job has `summarize`.
    """
    if job.metrics is None:
        return {}
    return read_metrics(job.metrics(*arguments), what="metrics", is_single=job.summarize is None)


def read_metrics(found: Any, *, what: str, is_single: bool) -> dict[str, Tensor]:
    """Read names and numbers that a job's function returned, as float64 tensors on the host.

    `what` names the function in errors. If `is_single`, each value must be one number, not a tensor of several.
    """
    if not isinstance(found, Mapping):
        raise UsageError(
            f"Job({what}=…) returned {type(found).__name__}; it must return names and numbers, such as "
            '{"accuracy": 0.9}.'
        )
    return {_name(name, what): _value(name, value, what, is_single) for name, value in found.items()}


def _name(name: Any, what: str) -> str:
    if not isinstance(name, str):
        raise UsageError(f"Job({what}=…) returned the name {name!r}; names of metrics must be text.")
    return name


def _value(name: str, value: Any, what: str, is_single: bool) -> Tensor:
    found = type(value).__name__
    try:
        if isinstance(value, Tensor):
            if value.numel() == 1 or not is_single:
                value = value.detach().to("cpu", torch.float64)
                return value.reshape(()) if value.numel() == 1 and is_single else value
            found = f"a tensor of shape {tuple(value.shape)}"
        else:
            return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError):
        pass
    hint = " With Job(summarize=…) it may be a tensor." if what == "metrics" and is_single else ""
    raise UsageError(
        f"Job({what}=…) returned {found} for {name!r}; it must return a number for each name.{hint}"
    )
