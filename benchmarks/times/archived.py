"""The measured steps whose kernels are archived, predicted with brimful's tables, within a minute.

    python benchmarks/times/archived.py [--every 5]

`benchmarks/times/steps` has the kernels of steps that the other benchmarks here captured, and the measured
times. They are predicted as the product does, from its tables, with their intervals. Factors are fitted to the
same steps: `fit.py` has the errors of families and GPUs that were held out.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from brimful.cost import StepTime, time_interval
from brimful.cost.gpu_work import GpuWork
from brimful.cost.kernels import Kernel, Unit
from brimful.cost.kernels.classes import FUSED_ATTENTION
from brimful.cost.kernels.constants import integers_per_second
from brimful.devices import Device, find_device
from brimful.settings import Precision
from machine import keep
from times.archive import Step, read_steps
from times.kernel_classes import AtPeak
from times.summary import by, summary_of

STEPS = Path(__file__).parent / "steps"
PRECISIONS = {"half": Precision.FP16, "tf32": Precision.TF32, "fp32": Precision.FP32}

PARTS_OF_ATTENTION = (0.0, 0.1, 0.3, 1.0)
"""Of a step's time, between which steps of language models are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="only every so many steps of each file")
    options = parser.parse_args()
    rows = list(predicted_rows(every=options.every))
    content = {
        "steps": len(rows),
        "by_source": by(rows, "source"),
        "by_gpu": by(rows, "gpu"),
        "covered_by_source": {
            source: round(covered([row for row in rows if row["source"] == source]), 3)
            for source in sorted({row["source"] for row in rows})
        },
        "llm_by_part_of_attention": by_part_of_attention([row for row in rows if row["source"] == "llm"]),
    }
    for name, each in content.items():
        print(name, each)
    keep("times_archived.json", f"python benchmarks/times/archived.py --every {options.every}", content)


def predicted_rows(*, every: int = 1) -> Iterator[dict[str, Any]]:
    """The archived steps, each with its predicted time and interval.

    Args:
        every: 1 takes all steps, 5 a fifth of them.
    """
    for path in sorted(STEPS.glob("*.csv.gz")):
        for step in list(read_steps(path))[::every]:
            time = step_time(step)
            low, high = time_interval(time, find_device(step.gpu))
            yield {
                **{name: getattr(step, name) for name in step._fields if name != "kernels"},
                "predicted_seconds": time.total_seconds,
                "low_seconds": low,
                "high_seconds": high,
                "part_of_attention": _attention_seconds(time) / time.total_seconds,
            }


def step_time(step: Step) -> StepTime:
    """The time of a step on its GPU: of its kernels, or of the host if that is longer."""
    device = find_device(step.gpu)
    work = {name: GpuWork(device, precision) for name, precision in PRECISIONS.items()}
    seconds: Counter[str] = Counter()
    for kernel, count in step.kernels.items():
        arithmetic = kernel.arithmetic if kernel.arithmetic in work else "half"  # else unused
        dtype = "float16" if arithmetic == "half" else "float32"
        rate = device.flops_per_second(dtype, PRECISIONS[arithmetic]) or device.fp32_flops_per_second
        launch = work[arithmetic].kernel_seconds(_from_peak(kernel, device, rate), dtype, rate)
        seconds[kernel.name] += launch * count
    total = seconds.total()
    seconds["host"] += max(step.host_seconds - total, 0.0)
    return StepTime(
        forward_seconds=max(total, step.host_seconds),
        backward_seconds=0.0,
        recompute_seconds=0.0,
        optimizer_seconds=0.0,
        kernel_seconds=tuple(seconds.items()),
    )


def _from_peak(kernel: AtPeak, device: Device, rate: float) -> Kernel:
    peaks = {Unit.SCALAR: device.fp32_flops_per_second, Unit.INTEGER: integers_per_second(device)}
    unit = Unit(kernel.arithmetic) if kernel.arithmetic in peaks else Unit.TENSOR
    return Kernel(
        kernel.name,
        kernel.computing_seconds * peaks.get(unit, rate),
        unit,
        round(kernel.moving_seconds * device.memory_bandwidth_bytes_per_second),
        kernel.loads_elements,
    )


def by_part_of_attention(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Errors and coverage by the part of a step's predicted time that is fused attention.

    Language models were measured with the first version of FlashAttention. brimful predicts the second, which
    PyTorch has now and which is about twice as fast: what is left where attention takes little is the error of
    the rest.
    """
    found = {}
    for low, high in pairwise(PARTS_OF_ATTENTION):
        chosen = [row for row in rows if low <= row["part_of_attention"] < high]
        if chosen:
            found[f"{low} to {high}"] = summary_of(chosen) | {"covered": round(covered(chosen), 3)}
    return found


def _attention_seconds(time: StepTime) -> float:
    return sum(seconds for name, seconds in time.kernel_seconds if name in FUSED_ATTENTION)


def covered(rows: list[dict[str, Any]]) -> float:
    """Fraction of rows whose measured time is within the interval."""
    inside = [row["low_seconds"] <= row["measured_seconds"] <= row["high_seconds"] for row in rows]
    return sum(inside) / len(inside)


if __name__ == "__main__":
    main()
