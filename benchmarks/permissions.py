"""What plans suggest with the user's permission: each gain beside that of its own capture, and its cost.

Usage: python benchmarks/permissions.py [--only NAME]

Each job is planned on an RTX 3090 in half of what its baseline takes, or in the whole card where that is less
or no plan fits half. Every suggestion is then captured whole, under its own settings and with its change of the
job, in a new capture. Seconds of planning are those of the processor, which other work hardly changes. Small
jobs are planned on this CPU too, in all that the baseline takes, and the suggested steps are measured there.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import brimful as bf
from brimful.capture import CautiousCapture
from brimful.devices import Device, find_device
from brimful.errors import UsageError
from brimful.models.resolve import VARIANT_OPTIONS
from brimful.planner.candidate import estimate_of
from brimful.profiling.named_device import resolve_device
from brimful.results import Suggestion
from machine import keep

GPU, BUDGET = "RTX 3090", "50%"
CPU_BUDGET = "100%"
"""Of the small models on the CPU, which hold little besides parameters and optimizer state."""
SEARCH: Any = importlib.import_module("brimful.planner.search")

JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "bert-base": ({"sequence_length": 128}, 64),
    "bert-large": ({"sequence_length": 512}, 32),
    "xlm-roberta-base": ({"sequence_length": 256}, 32),
    "gpt2": ({"sequence_length": 1024}, 16),
    "llama-3.2-1b": ({"sequence_length": 512}, 4),
    "qwen2.5-0.5b": ({"sequence_length": 1024}, 16),
    "t5-small": ({"sequence_length": 512}, 32),
    "vit-base": ({}, 64),
    "resnet50": ({}, 128),
    "vgg16": ({}, 64),
    "unet": ({}, 16),
}
"""Options and global batch of each job."""

ON_CPU: dict[str, tuple[dict[str, Any], int]] = {
    "bert-base": ({"sequence_length": 64, "num_hidden_layers": 2}, 16),
    "gpt2": ({"sequence_length": 64, "num_hidden_layers": 2}, 8),
    "vit-base": ({"image_size": 64, "num_hidden_layers": 2}, 16),
}


SIZES = {"--seq-len": "sequence_length", "--image-size": "image_size"}


def variant(suggestion: Suggestion) -> dict[str, str | int]:
    """The options of the model that a suggestion asks for."""
    words = suggestion.flag.split()
    asked = dict(zip(words[::2], words[1::2], strict=True))
    sizes = {SIZES[flag]: int(value) for flag, value in asked.items() if flag in SIZES}
    return sizes | {flag[2:]: value for flag, value in asked.items() if flag[2:] in VARIANT_OPTIONS}


def planned(job: bf.Job, device: str, batch: int, budget: str = BUDGET) -> tuple[bf.Plan, float, float]:
    """The plan, the processor's seconds that it took, and those of them that suggestions took."""
    spent = [0.0]
    suggest = SEARCH.suggestions

    def timed(*args: Any, **given: Any) -> Any:
        began = time.process_time()
        found = suggest(*args, **given)
        spent[0] = time.process_time() - began
        return found

    began = time.process_time()
    with patch.object(SEARCH, "suggestions", timed):
        try:
            plan = bf.plan(job, device, global_batch_size=batch, budget=budget)
        except (bf.InfeasibleError, UsageError):  # nothing fits that, or it is more than the card
            plan = bf.plan(job, device, global_batch_size=batch)
    return plan, time.process_time() - began, spent[0]


def rows_of(name: str, options: dict[str, Any], plan: bf.Plan, device: Device) -> Iterator[dict[str, Any]]:
    """Each suggestion of a plan beside a capture of its own."""
    for each in plan.suggestions:
        job = bf.find_architecture(name, **{**options, **variant(each)})
        own = estimate_of(each.settings, CautiousCapture(job, device), device)
        yield {
            "flag": each.flag,
            "settings": each.settings.describe(),
            "predicted_gain": 1 - each.predicted_step_seconds / plan.predicted_step_seconds,
            "gain_of_own_capture": 1 - own.predicted_step_seconds / plan.predicted_step_seconds,
            "predicted_peak_device_bytes": each.predicted_peak_device_bytes,
            "peak_of_own_capture": own.predicted_peak_device_bytes,
            "uncertain": list(each.uncertain),
        }


def on_gpu(name: str) -> dict[str, Any]:
    options, batch = JOBS[name]
    job = bf.find_architecture(name, **options)
    plan, seconds, spent = planned(job, GPU, batch)
    rows = list(rows_of(name, options, plan, find_device(GPU)))
    return {
        "job": name,
        "options": options,
        "global_batch_size": batch,
        "budget_bytes": plan.budget_bytes,
        "settings": plan.settings.describe(),
        "predicted_step_seconds": plan.predicted_step_seconds,
        "planning_seconds_without": round(seconds - spent, 2),
        "suggesting_seconds": round(spent, 2),
        "suggestions": rows,
    }


def on_cpu(name: str) -> dict[str, Any]:
    """A plan for this CPU, whose suggestions are measured; ranks are left out, as there is one machine."""
    options, batch = ON_CPU[name]
    job = bf.find_architecture(name, **options)
    plan, seconds, spent = planned(job, "cpu", batch, CPU_BUDGET)
    before = bf.measure(job, plan, "cpu")
    rows = []
    for each, row in zip(plan.suggestions, rows_of(name, options, plan, resolve_device("cpu")), strict=True):
        changed = bf.find_architecture(name, **{**options, **variant(each)})
        after = bf.measure(changed, replace(each.settings), "cpu")
        row["measured_gain"] = 1 - after.measured_step_seconds / before.measured_step_seconds
        row["measured_peak_bytes"] = after.measured_peak_allocated_bytes
        rows.append(row)
    return {
        "job": name,
        "options": options,
        "settings": plan.settings.describe(),
        "planning_seconds_without": round(seconds - spent, 2),
        "suggesting_seconds": round(spent, 2),
        "suggestions": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a part of a job's name")
    only = parser.parse_args().only
    gpu, cpu = [], []
    for name in (each for each in JOBS if only in each):
        gpu.append(on_gpu(name))
        print(gpu[-1], flush=True)
    for name in (each for each in ON_CPU if only in each):
        cpu.append(on_cpu(name))
        print(cpu[-1], flush=True)
    rows = [row for job in gpu for row in job["suggestions"]]
    shares = sorted(job["suggesting_seconds"] / job["planning_seconds_without"] for job in gpu)
    summary = {
        "jobs": len(gpu),
        "suggestions": len(rows),
        "largest_difference_of_gain": max(
            (abs(row["predicted_gain"] - row["gain_of_own_capture"]) for row in rows), default=0.0
        ),
        "largest_relative_difference_of_peak": max(
            (abs(row["predicted_peak_device_bytes"] / row["peak_of_own_capture"] - 1) for row in rows),
            default=0.0,
        ),
        "median_share_of_planning_time": shares[len(shares) // 2] if shares else 0.0,
        "largest_share_of_planning_time": shares[-1] if shares else 0.0,
    }
    print(summary)
    if not only:
        content = {"device": GPU, "budget": BUDGET, "summary": summary, "rows": gpu, "on_cpu": cpu}
        keep("permissions.json", "python benchmarks/permissions.py", content, "transformers", "peft")


if __name__ == "__main__":
    main()
