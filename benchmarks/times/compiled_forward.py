"""What `torch.compile` gains in forward passes of vision models, predicted beside measured on three GPUs.

    python benchmarks/times/compiled_forward.py PATH/gpu_time_vision_forward.csv [--sample 40]

The measurements are those that timm publishes (huggingface/pytorch-image-models,
results/benchmark-infer-amp-nchw-pt291-*.csv): fp16 autocast, contiguous, torch 2.9, on an RTX 4090, an RTX 5090
and an RTX PRO 6000 Blackwell Max-Q, eager and compiled. Each model is compared on one of them, drawn at random.
Here the precision is bf16, whose rates on these GPUs are the same. The file of measurements is not part of this
project.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from times.vision import PROCESSES, SETTINGS, family_of, job_of  # before torch

# isort: split
import argparse
import random
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import timm
import torch
from scipy.stats import spearmanr

import brimful as bf
from brimful.capture.step import capture_inference
from brimful.capture.step_part import recorded_by
from brimful.cost.queue import finish_seconds
from brimful.cost.roofline import Roofline
from brimful.devices import Device, find_device
from brimful.trace import Trace
from machine import keep
from times.timm_rows import rows_of

MODES = {"eager": "none", "compile": "model"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, help="this many models, drawn at random; default: all")
    options = parser.parse_args()
    began = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES) as pool:
        compared = list(pool.map(compare, pairs_of(rows_of(options.rows, options.sample))))
    rows = [row for row in compared if "refused" not in row]
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "summary": summary_of(rows),
        "not_built": [row for row in compared if "refused" in row],
        "rows": rows,
    }
    print(content["summary"])
    sample = "" if options.sample is None else f" --sample {options.sample}"
    command = f"python benchmarks/times/compiled_forward.py PATH/gpu_time_vision_forward.csv{sample}"
    keep("times_compiled_forward.json", command, content, "timm", "torchvision")


def pairs_of(rows: list[dict[str, str]]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Eager and compiled row of each model with the same batch, on one GPU."""
    by_model: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    for row in rows:
        by_model.setdefault(row["model"], {}).setdefault(row["gpu"], {})[row["mode"]] = row
    chosen = random.Random(0)
    pairs = []
    for by_gpu in by_model.values():
        both = [
            each
            for each in by_gpu.values()
            if len({row["batch_size"] for row in each.values()}) == 1 < len(each)
        ]
        if both:
            one = chosen.choice(both)
            pairs.append((one["eager"], one["compile"]))
    return pairs


def compare(pair: tuple[dict[str, str], dict[str, str]]) -> dict[str, Any]:
    """A model eager and compiled, predicted beside measured; why not, if it cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timm.layers.set_fused_attn(True)
    about: dict[str, Any] = {name: pair[0][name] for name in ("model", "gpu", "batch_size", "image_size")}
    about["family"] = family_of(pair[0]["model"])
    device = find_device(pair[0]["gpu"])
    for row in pair:
        settings = bf.Settings(micro_batch_size=int(row["batch_size"]), compile=MODES[row["mode"]], **SETTINGS)
        began = time.process_time()
        try:
            trace = capture_inference(job_of(row), settings, device, forward)
        except Exception as error:  # a name that today's timm does not have, among others
            return about | {"refused": f"{type(error).__name__}: {str(error)[:300]}"}
        about[row["mode"]] = {
            "measured_seconds": float(row["step_ms"]) / 1e3,
            "predicted_seconds": seconds(trace, device),
            "kernels": sum(bool(op.read_bytes or op.written_bytes) for op in trace.ops),
            "capture_seconds": round(time.process_time() - began, 1),
        }
        eagerly = [note for note in trace.uncertain_ops if "runs eagerly" in note]
        if eagerly:
            return about | {"refused": eagerly[0][:300]}
    return about


def forward(model: Any, batch: Any, recorder: Any) -> Any:
    """The model's forward pass alone."""
    model(batch["images"])
    return recorded_by(recorder)


def seconds(trace: Trace, device: Device) -> float:
    """Predicted seconds of a captured forward pass."""
    roofline = Roofline(device, trace.settings.precision)
    host, work = (
        np.array([of(op) for op in trace.ops]) for of in (roofline.host_seconds, roofline.work_seconds)
    )
    return float(finish_seconds(host, work)[-1])


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median errors of times and of the gain, and how well gains are ranked."""

    def errors(of: Any) -> dict[str, float]:
        found = [of(row) for row in rows]
        return {"median": statistics.median(found), "median_absolute": statistics.median(map(abs, found))}

    def ratio(mode: str, row: dict[str, Any]) -> float:
        return row[mode]["predicted_seconds"] / row[mode]["measured_seconds"]

    def gain(which: str, row: dict[str, Any]) -> float:
        return row["compile"][which] / row["eager"][which]

    gains = [[gain(which, row) for row in rows] for which in ("measured_seconds", "predicted_seconds")]
    return {
        "models": len(rows),
        **{mode: errors(lambda row, mode=mode: ratio(mode, row) - 1) for mode in MODES},
        "gain": errors(lambda row: ratio("compile", row) / ratio("eager", row) - 1),
        "rank_correlation_of_gains": float(spearmanr(*gains).statistic),
        "median_measured_gain": statistics.median(gains[0]),
        "median_predicted_gain": statistics.median(gains[1]),
    }


if __name__ == "__main__":
    main()
