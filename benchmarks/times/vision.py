"""Predicted time of a training step of vision models against what was measured on an RTX 3090.

    python benchmarks/times/vision.py PATH/gpu_time_vision.csv [--sample 60]

The measurements are those that timm publishes (huggingface/pytorch-image-models,
results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv), made by its benchmark.py with torch 1.12: fp16
autocast without a loss scaler, SGD with momentum, a loop over parameters, cross-entropy, attention not fused.
Models are built by name with today's timm. Here the precision is bf16, whose rates on this GPU are the same and
which has no loss scaler. Batches lie on the GPU. The file of measurements is not part of this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torchvision_on_cpu  # noqa: F401  # before timm, which imports torchvision

# isort: split
import argparse
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.devices import Device, find_device
from brimful.trace import Trace
from machine import keep
from times.archive import take_steps, write_steps
from times.kernel_classes import (
    class_seconds,
    kernels_at_peak,
    plain_roofline_seconds,
    seconds_without_input_copies,
)
from times.summary import by, plain_roofline_of, summary_of
from times.timm_rows import differs, rows_of

DEVICE = "RTX 3090"
PROCESSES = 2
SETTINGS = {"precision": "bf16"}
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
COLLECTIONS = re.compile(r"^(?:tf|gluon|ig|ssl|swsl|legacy|ese|jx|adv|ens)_")
"""Where weights came from, which is not a family of models."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, help="this many models, drawn at random; default: all")
    parser.add_argument("--kernels", type=Path, help="write the kernels of each step here, for fit.py")
    options = parser.parse_args()
    chosen = rows_of(options.rows, options.sample)
    began = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES) as pool:
        compared = list(pool.map(compare, chosen, chunksize=4))
    rows = [row for row in compared if "refused" not in row]
    steps = list(take_steps(rows, "vision", variant="layout"))
    if options.kernels:
        write_steps(options.kernels, steps)
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "measured_rows": len(chosen),
        "summary": summary_of(rows),
        "plain_roofline": plain_roofline_of(rows),
        "by_layout": by(rows, "layout"),
        "by_family": by(rows, "family"),
        "gain_of_channels_last": gains(rows),
        "not_built": [row for row in compared if "refused" in row],
        "rows": rows,
    }
    for name in ("summary", "plain_roofline", "by_layout", "gain_of_channels_last"):
        print(name, content[name])
    sample = "" if options.sample is None else f" --sample {options.sample}"
    command = f"python benchmarks/times/vision.py PATH/gpu_time_vision.csv{sample}"
    keep("times_vision.json", command, content, "timm", "torchvision")


def compare(row: dict[str, str]) -> dict[str, Any]:
    """A measured row beside its prediction; why there is none, if it cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timm.layers.set_fused_attn(False)
    about = {"model": row["model"], "family": family_of(row["model"]), "layout": row["layout"], "gpu": DEVICE}
    settings = bf.Settings(micro_batch_size=int(row["batch_size"]), **SETTINGS)
    device = find_device(DEVICE)
    trace = try_capture(lambda is_built: job_of(row, is_built=is_built), settings, device)
    if isinstance(trace, str):
        return about | {"refused": trace}
    if other := differs(trace.parameter_count, row["parameters_millions"]):
        return about | {"refused": other}
    predicted = seconds_without_input_copies(step_seconds(trace, device))
    ops = [op for op in trace.ops if op.phase != "setup"]
    measured = float(row["step_ms"]) / 1e3
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


def try_capture(
    make_job: Callable[[bool], bf.Job],
    settings: bf.Settings,
    device: Device,
) -> Trace | str:
    """Captured steps, or why there is none; a model that reads its weights is built with real ones."""
    try:
        try:
            return capture_step(make_job(False), settings, device)
        except bf.BrimfulError as error:
            if "reads its weights while it is built" not in str(error):
                raise
            return capture_step(make_job(True), settings, device)
    except Exception as error:  # a name that today's timm does not have, among others
        return f"{type(error).__name__}: {str(error)[:300]}"


def job_of(row: dict[str, str], *, is_built: bool = False) -> bf.Job:
    """The step of timm's benchmark.py; `is_built` builds the model first, with real weights."""
    layout, pixels = LAYOUTS[row.get("layout", "nchw")], int(row["image_size"])

    def model() -> nn.Module:
        return timm.create_model(row["model"]).to(memory_format=layout)

    def batch(count: int) -> dict[str, Tensor]:
        images = torch.randn(count, 3, pixels, pixels).to(memory_format=layout)
        return {"images": images, "labels": torch.randint(0, 1000, (count,))}

    return bf.Job(
        model=model() if is_built else model,
        loss=lambda model, batch: F.cross_entropy(model(batch["images"]), batch["labels"]),
        batch=batch,
        optimizer=lambda parameters: torch.optim.SGD(
            parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=False
        ),
    )


def family_of(model: str) -> str:
    """The first word of a model's name, after that of its collection."""
    return re.split(r"[_\d]", COLLECTIONS.sub("", model))[0]


def gains(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speedup of channels_last, measured and predicted: medians, and the median error of the ratio."""
    seconds = {(row["model"], row["layout"]): row for row in rows}
    ratios = []
    for model in {row["model"] for row in rows}:
        pair = [seconds.get((model, layout)) for layout in ("nchw", "nhwc")]
        if None not in pair:
            ratios.append([pair[0][key] / pair[1][key] for key in ("measured_seconds", "predicted_seconds")])
    errors = sorted(abs(predicted / measured - 1) for measured, predicted in ratios)
    middle = len(ratios) // 2
    return {
        "models": len(ratios),
        "median_measured": sorted(ratio[0] for ratio in ratios)[middle],
        "median_predicted": sorted(ratio[1] for ratio in ratios)[middle],
        "median_error": errors[middle],
    }


if __name__ == "__main__":
    main()
