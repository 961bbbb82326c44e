"""The steps that a real GPU took, beside what brimful predicts of them now.

    PYTHONPATH=src python3 benchmarks/gpu/compare.py
    PYTHONPATH=src python3 benchmarks/gpu/compare.py --only resnet     # prints, writes nothing

The record has predictions of the day on which it was made. This predicts the same steps with
the code that is here, on a CPU, in some two minutes, and writes benchmarks/results/gpu_predicted.json: for each
step predicted and measured bytes and their errors; for all of them medians, before and now.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

from brimful.devices import Device, find_device  # noqa: E402
from gpu.configurations import CONFIGURATIONS  # noqa: E402
from gpu.predicted import predict, settings_of  # noqa: E402
from machine import keep  # noqa: E402

RECORD, RESULT = "gpu_record.json", "gpu_predicted.json"
QUANTITIES = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes")
"""Compared: `predicted_` and `measured_` of each are fields of a row of the record and of a prediction."""
INTERVALS = {"predicted_device_interval_bytes": "measured_peak_device_bytes"}
"""An interval and what should lie in it."""
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="steps whose name contains this; writes no results")
    options = parser.parse_args()
    record = json.loads((BENCHMARKS / "results" / RECORD).read_text(encoding="utf-8"))
    measured = [row for row in record["configurations"] if options.only in row["name"]]
    if not measured:
        parser.error(f"no step of {RECORD} has {options.only!r} in its name")
    device = find_device(record["device"])
    rows = [compare(row, device) for row in measured]
    summary = {"before": summarise(measured), "now": summarise(rows)}
    print(json.dumps(summary, indent=1))
    if not options.only:
        about = {name: record[name] for name in ("device", "commit")}
        content = {"measured": RECORD, "record": about, "summary": summary, "rows": rows}
        keep(RESULT, "python benchmarks/gpu/compare.py", content, "transformers")


def compare(measured: Row, device: Device) -> Row:
    """One step: predicted again, beside what the record measured; printed as it is there."""
    configuration = CONFIGURATIONS[measured["name"]]
    job = configuration.job(toy=False)
    settings = settings_of(configuration, job, device, toy=False)
    _trace, predicted = predict(job, settings, device)
    row: Row = {"name": measured["name"], "settings": measured["settings"]}
    for quantity in QUANTITIES:
        row[f"predicted_{quantity}"] = predicted[f"predicted_{quantity}"]
        row[f"measured_{quantity}"] = measured[f"measured_{quantity}"]
        row[f"{quantity}_error_fraction"] = round(error_fraction(row, quantity), 5)
    for interval in INTERVALS:
        row[interval] = predicted[interval]
        row[f"is_in_{interval}"] = is_in_interval(row, interval)
    errors = "  ".join(f"{row[f'{quantity}_error_fraction']:+7.1%}" for quantity in QUANTITIES)
    print(f"{row['name']:<28} {errors}  {[row[f'is_in_{interval}'] for interval in INTERVALS]}", flush=True)
    return row


def summarise(rows: list[Row]) -> Row:
    """Medians and the largest of the errors' sizes, and how many measurements lie in their interval."""
    summary: Row = {"rows": len(rows)}
    for quantity in QUANTITIES:
        sizes = [abs(error_fraction(row, quantity)) for row in rows]
        summary[quantity] = {
            "median_error_fraction": round(statistics.median(sizes), 5),
            "largest_error_fraction": round(max(sizes), 5),
        }
    for interval in INTERVALS:
        summary[interval] = {
            "in": _count(rows, lambda row, interval=interval: is_in_interval(row, interval)),
            "above": _count(rows, lambda row, interval=interval: row[INTERVALS[interval]] > row[interval][1]),
        }
    return summary


def error_fraction(row: Row, quantity: str) -> float:
    """Predicted / measured - 1."""
    fraction: float = row[f"predicted_{quantity}"] / row[f"measured_{quantity}"] - 1
    return fraction


def is_in_interval(row: Row, interval: str) -> bool:
    """Whether what was measured lies in a predicted interval."""
    low, high = row[interval]
    return bool(low <= row[INTERVALS[interval]] <= high)


def _count(rows: list[Row], holds: Callable[[Row], bool]) -> int:
    return sum(map(holds, rows))


if __name__ == "__main__":
    main()
