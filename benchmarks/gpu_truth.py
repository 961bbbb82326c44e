"""Predicted memory against what public runs measured on GPUs.

    python benchmarks/gpu_truth.py PATH/gpu_truth.csv

The runs are xMem's (see `gpu_truth_models`). They measured the device's memory as NVML shows it, less what was
used as they began: what the allocator reserves, what the libraries hold for themselves, and the CUDA context
only so far as it was not there before. So what is compared is peak reserved bytes on a device of that capacity.
The file of measurements is not part of this project; its rows come with the predictions of xMem, DNNMem,
SchedTune and LLMem on the same runs, which are compared in the same way.
"""

from __future__ import annotations

import gpu_truth_models as models  # before transformers

# isort: split
import argparse
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from brimful.capture import capture_step
from brimful.devices import Device, find_device
from brimful.prediction import Estimate, estimate_trace
from brimful.settings import Settings
from machine import keep

UNKNOWN_MODE, OTHER_MODES = 0, (1, 2)
"""Where a run's record does not say when it cleared gradients: what its code falls back to, and the others."""
OUTLIER_FRACTION = 0.06
OTHERS = {
    "xMem": "xmem_bytes",
    "DNNMem": "dnnmem_bytes",
    "SchedTune": "schedtune_bytes",
    "LLMem": "llmem_bytes",
}
DEVICES = {
    "NVIDIA GeForce RTX 3060": "RTX 3060 12GB",
    "NVIDIA GeForce RTX 4060": "RTX 4060",
    "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="the CSV file of measured runs")
    parser.add_argument("--only", help="models whose name contains this; writes no results")
    options = parser.parse_args()
    with options.runs.open(encoding="utf-8") as file:
        runs = [run for run in csv.DictReader(file) if not options.only or options.only in run["model"]]
    if not runs:
        parser.error(f"no model of {options.runs} has {options.only!r} in its name")
    rows = []
    start = time.perf_counter()
    for run in runs:
        row = compare(run)
        rows.append(row)
        print(
            f"{row['model']:<44} {row['optimizer']:<10} {row['batch_size']:>4} {row['gpu']:<16}"
            f" {row['predicted_peak_reserved_bytes'] / 2**20:>8.0f} {row['error_fraction']:>+7.1%}"
            f"  [{row['interval_fractions'][0]:+.1%} {row['interval_fractions'][1]:+.1%}]"
            f"  xMem {row['errors_of_others'].get('xMem', 0):+7.1%}  {row['seconds']:.1f} s",
            flush=True,
        )
    summary = summarise(rows)
    print(json.dumps(summary, indent=1))
    if not options.only:
        seconds = round(time.perf_counter() - start, 1)
        keep(
            "gpu_truth.json",
            "python benchmarks/gpu_truth.py PATH/gpu_truth.csv",
            {"seconds": seconds, "summary": summary, "rows": rows},
            "transformers",
            "torchvision",
        )


def compare(run: dict[str, str]) -> dict[str, Any]:
    """One run: predicted against measured, ours and the others'.

    Where the record does not say when gradients were cleared, what is predicted is the mode its code falls back
    to, and the interval covers all three.
    """
    measured = int(run["measured_device_bytes"])
    recorded = run["zero_grad_mode"] not in ("", "null")
    modes = (int(run["zero_grad_mode"]),) if recorded else (UNKNOWN_MODE, *OTHER_MODES)
    device = find_device(DEVICES[run["gpu"]])
    start = time.perf_counter()
    estimates = [predict(run, mode, device) for mode in modes[:1]]
    seconds = time.perf_counter() - start
    estimates += [predict(run, mode, device) for mode in modes[1:]]
    predicted = estimates[0].predicted_peak_reserved_bytes
    least = min(estimate.smallest_surviving_capacity_bytes for estimate in estimates)
    most = max(
        estimate.predicted_device_interval_bytes[1] - device.context_high_bytes for estimate in estimates
    )
    by_mode = {
        mode: estimate.predicted_peak_reserved_bytes / measured - 1
        for mode, estimate in zip(modes, estimates, strict=True)
    }
    row = {
        "model": run["model"],
        "optimizer": run["optimizer"],
        "batch_size": int(run["batch_size"]),
        "gpu": DEVICES[run["gpu"]],
        "zero_grad_mode": run["zero_grad_mode"],
        "predicted_peak_allocated_bytes": estimates[0].predicted_peak_allocated_bytes,
        "predicted_peak_reserved_bytes": predicted,
        "error_fraction": predicted / measured - 1,
        "error_fraction_by_mode": by_mode,
        "interval_fractions": [least / measured - 1, most / measured - 1],
        "cache_flushes": estimates[0].cache_flushes,
        "errors_of_others": {
            name: float(run[column]) / measured - 1 for name, column in OTHERS.items() if run[column]
        },
        "seconds": round(seconds, 2),
    }
    return row | {"explanation": explanation(row)}


def predict(run: dict[str, str], mode: int, device: Device) -> Estimate:
    job = models.job_of_run(run["model"], run["optimizer"], mode)
    trace = capture_step(job, Settings(micro_batch_size=int(run["batch_size"])), device, steps=models.STEPS)
    return estimate_trace(trace, device)


def explanation(row: dict[str, Any]) -> str:
    """What is known of an error that is an outlier."""
    if abs(row["error_fraction"]) <= OUTLIER_FRACTION:
        return ""
    near = [mode for mode, error in row["error_fraction_by_mode"].items() if abs(error) <= 0.02]
    if near:
        return f"the run's mode is not recorded; clearing gradients as in mode {near[0]} it is within 2 %"
    if row["interval_fractions"][0] <= 0 <= row["interval_fractions"][1]:
        return "within the interval, not explained"
    return "not explained"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and 90th percentile of the errors' sizes, ours and the others' on the rows that they have."""
    errors = {"brimful": [row["error_fraction"] for row in rows]}
    for name in OTHERS:
        errors[name] = [row["errors_of_others"][name] for row in rows if name in row["errors_of_others"]]
    summary: dict[str, Any] = {
        name: {
            "rows": len(found),
            "median_error_fraction": statistics.median(map(abs, found)),
            "percentile_90_error_fraction": percentile(list(map(abs, found)), 0.9),
            "share_measured_above_predicted": sum(error < 0 for error in found) / len(found),
        }
        for name, found in errors.items()
        if found
    }
    for kind, is_image in (("CNNs", True), ("transformers", False)):
        found = [abs(row["error_fraction"]) for row in rows if models.is_image_model(row["model"]) is is_image]
        if found:
            summary["brimful"][f"median_error_fraction_of_{kind}"] = statistics.median(found)
    above = [row for row in rows if row["interval_fractions"][1] < 0]
    summary["brimful"]["share_measured_above_interval"] = len(above) / len(rows)
    summary["brimful"]["share_measured_in_interval"] = sum(
        row["interval_fractions"][0] <= 0 <= row["interval_fractions"][1] for row in rows
    ) / len(rows)
    return summary


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of them do not exceed, between neighbours by proportion."""
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), share))


if __name__ == "__main__":
    sys.exit(main())
