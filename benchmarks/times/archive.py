"""Kernels of measured steps in one file: what `fit.py` fits factors to."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from brimful.devices import find_device
from brimful.devices.table import CUDA_LAUNCH_SECONDS
from times.kernel_classes import AtPeak


class Step(NamedTuple):
    """A measured step with its kernels."""

    source: str
    """The benchmark that captured it."""
    model: str
    family: str
    variant: str
    """Layout, mode or another way in which the same model was measured."""
    gpu: str
    batch_size: int
    measured_seconds: float
    host_seconds: float
    """Predicted time of the host to launch it."""
    kernels: Counter[AtPeak]


def take_steps(
    rows: Iterable[dict[str, Any]], source: str, *, model: str = "model", variant: str
) -> Iterator[Step]:
    """Steps of a benchmark's rows, from which their `kernels` are removed.

    Args:
        rows: Each with `kernels`, `measured_seconds`, the number of `ops`, and `host_seconds` where the time of
            the host is not that of launching all ops.
        source: Name of the benchmark.
        model: Key of the model.
        variant: Key of the way in which it was measured.
    """
    for row in rows:
        kernels = row.pop("kernels", None)
        if kernels is not None:
            yield Step(
                source=source,
                model=row[model],
                family=row.get("family", row[model]),
                variant=str(row[variant]),
                gpu=find_device(row["gpu"]).name,
                batch_size=row.get("batch_size", 1),
                measured_seconds=row["measured_seconds"],
                host_seconds=row.pop("host_seconds", row["ops"] * CUDA_LAUNCH_SECONDS),
                kernels=kernels,
            )


def write_steps(path: Path, steps: Iterable[Step]) -> None:
    """Write steps to a compressed CSV file: a row per step, followed by its kernels."""
    with gzip.open(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for step in steps:
            writer.writerow(["step", *step[:-1]])
            writer.writerows(
                [kernel.name, kernel.arithmetic, *(f"{each:.5g}" for each in kernel[2:]), count]
                for kernel, count in step.kernels.items()
            )


def read_steps(path: Path) -> Iterator[Step]:
    """The steps of a file."""
    with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
        step: Step | None = None
        for cells in csv.reader(file):
            if cells[0] == "step":
                if step is not None:
                    yield step
                *names, batch_size, measured, host = cells[1:]
                step = Step(*names, int(batch_size), float(measured), float(host), Counter())
            else:
                name, arithmetic, computing, moving, count = cells
                assert step is not None
                kernel = AtPeak(name, arithmetic, float(computing), float(moving))
                step.kernels[kernel] += int(count)  # two that differ by less than was written are one
        if step is not None:
            yield step
