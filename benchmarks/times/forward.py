"""Predicted time of a forward pass of vision models against what was measured on three GPUs.

    python benchmarks/times/forward.py PATH/gpu_time_vision_forward.csv [--sample 60]

The measurements are those that timm publishes (huggingface/pytorch-image-models,
results/benchmark-infer-amp-nchw-pt291-*.csv): fp16 autocast, contiguous, torch 2.9, on an RTX 4090, an RTX 5090
and an RTX PRO 6000 Blackwell Max-Q. Only eager rows are compared. The prediction is of the evaluation phase of
a captured step. The file of measurements is not part of this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from times.vision import PROCESSES, SETTINGS, family_of, job_of, try_capture  # before torch

# isort: split
import argparse
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import timm
import torch

import brimful as bf
from brimful.cost.queue import finish_seconds
from brimful.cost.roofline import Roofline
from brimful.devices import find_device
from brimful.trace import Phase
from machine import keep
from times.archive import take_steps, write_steps
from times.kernel_classes import class_seconds, kernels_at_peak, plain_roofline_seconds
from times.sample import rows_of
from times.summary import by, plain_roofline_of, summary_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, help="this many models, drawn at random; default: all")
    parser.add_argument("--kernels", type=Path, help="write the kernels of each step here, for fit.py")
    options = parser.parse_args()
    chosen = rows_of(options.rows, options.sample, mode="eager")
    began = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES) as pool:
        compared = list(pool.map(compare, chosen, chunksize=3))
    rows = [row for row in compared if "refused" not in row]
    steps = list(take_steps(rows, "forward", variant="mode"))
    if options.kernels:
        write_steps(options.kernels, steps)
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "measured_rows": len(chosen),
        "summary": summary_of(rows),
        "plain_roofline": plain_roofline_of(rows),
        "by_gpu": by(rows, "gpu"),
        "by_family": by(rows, "family"),
        "not_built": [row for row in compared if "refused" in row],
        "rows": rows,
    }
    for name in ("summary", "plain_roofline", "by_gpu"):
        print(name, content[name])
    sample = "" if options.sample is None else f" --sample {options.sample}"
    command = f"python benchmarks/times/forward.py PATH/gpu_time_vision_forward.csv{sample}"
    keep("times_forward.json", command, content, "timm", "torchvision")


def compare(row: dict[str, str]) -> dict[str, Any]:
    """A measured row beside its prediction; why there is none, if it cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timm.layers.set_fused_attn(True)
    about = {"model": row["model"], "family": family_of(row["model"]), "gpu": row["gpu"], "mode": row["mode"]}
    settings = bf.Settings(micro_batch_size=int(row["batch_size"]), **SETTINGS)
    device = find_device(row["gpu"])
    trace = try_capture(lambda is_built: job_of(row, is_built=is_built), settings, device, evaluates=True)
    if isinstance(trace, str):
        return about | {"refused": trace}
    ops = [op for op in trace.ops if op.phase is Phase.EVALUATION]
    roofline = Roofline(device, settings.precision)
    host, work = (
        np.array([seconds(op) for op in ops]) for seconds in (roofline.host_seconds, roofline.work_seconds)
    )
    predicted, measured = float(finish_seconds(host, work)[-1]), float(row["step_ms"]) / 1e3
    return about | {
        "batch_size": settings.micro_batch_size,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "error_fraction": predicted / measured - 1,
        "roofline_seconds": plain_roofline_seconds(ops, device, settings.precision),
        "ops": len(ops),
        "class_seconds": class_seconds(ops, device, settings.precision),
        "kernels": kernels_at_peak(ops, device, settings.precision),
    }


if __name__ == "__main__":
    main()
