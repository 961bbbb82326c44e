"""Predicted peak memory against measured, on a CPU, for the architectures of `zoo`.

    python benchmarks/cpu_zoo.py [name ...]

Predicted and measured as in cpu_truth.py, without micro-batches. Models of packages that cannot be imported are
left out, with the reason. Where shapes depend on unknown values the prediction is the most that it can be.
Names run some models alone and write nothing.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

from brimful.settings import Settings
from brimful.utils.quantities import format_bytes
from cpu_truth import NAMED_ABOVE_FRACTION, compare, explanation
from machine import keep
from zoo import ZOO, ZooModel, missing

CLOSE_FRACTION = 0.005
AS_LARGE_AS = "at its largest possible size"
"""What a capture says of a result whose shape depends on unknown values."""


def run(model: ZooModel) -> dict[str, Any]:
    """One row of the table."""
    start = time.perf_counter()
    row = compare(model.job(), Settings(micro_batch_size=model.micro_batch_size))
    return {
        "model": model.name,
        "family": model.family,
        "micro_batch_size": model.micro_batch_size,
        **row,
        "explanation": explanation(row),
        "seconds": round(time.perf_counter() - start, 1),
    }


def summary_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = {row["model"]: abs(row["error_fraction"]) for row in rows}
    most = {row["model"] for row in rows if any(AS_LARGE_AS in named for named in row["uncertain_ops"])}
    largest = max(errors, key=lambda model: errors[model])
    return {
        "rows": len(errors),
        "families": len({row["family"] for row in rows}),
        "median_error_fraction": statistics.median(errors.values()),
        "rows_within_0.5_percent": sum(error <= CLOSE_FRACTION for error in errors.values()),
        "rows_within_1_percent": sum(error <= NAMED_ABOVE_FRACTION for error in errors.values()),
        "largest_error_fraction": errors[largest],
        "largest_error_model": largest,
        "shapes_taken_for_the_largest": sorted(most),
        "largest_error_fraction_of_the_others": max(
            (error for model, error in errors.items() if model not in most), default=None
        ),
    }


def show(row: dict[str, Any]) -> None:
    predicted, measured = row["predicted_peak_allocated_bytes"], row["measured_peak_allocated_bytes"]
    print(
        f"{row['model']:<32} {row['family']:<20} {format_bytes(predicted):>11} {format_bytes(measured):>11} "
        f"{row['error_fraction']:>8.2%}  {row['explanation']}",
        flush=True,
    )


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")  # of the libraries
    start = time.perf_counter()
    rows, left_out = [], {}
    print(f"{'model':<32} {'family':<20} {'predicted':>11} {'measured':>11} {'error':>8}  why, if over 1 %")
    for model in ZOO:
        reason = missing(model.needs) if model.needs else None
        if reason:
            left_out[model.name] = f"{model.needs}: {reason}"
        elif not names or model.name in names:
            rows.append(run(model))
            show(rows[-1])
    summary = summary_of(rows)
    print(summary)
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})")
    if names:
        return
    seconds = round(time.perf_counter() - start, 1)
    content = {"seconds": seconds, "summary": summary, "left_out": left_out, "rows": rows}
    packages = ("transformers", "torchvision", "timm", "diffusers", "peft")
    keep("cpu_zoo.json", "python benchmarks/cpu_zoo.py", content, *packages)


if __name__ == "__main__":
    main(sys.argv[1:])
