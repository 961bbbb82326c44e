"""`benchmarks/gpu/compare.py`: what a GPU measured, beside what is predicted now."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from brimful.devices import find_device  # noqa: E402
from gpu import compare  # noqa: E402

RECORD = json.loads((ROOT / "benchmarks" / "results" / compare.RECORD).read_text(encoding="utf-8"))
RESULT = json.loads((ROOT / "benchmarks" / "results" / compare.RESULT).read_text(encoding="utf-8"))


def test_a_convolutional_step_is_predicted_as_an_h100_measured_it() -> None:
    """A U-Net whose workspaces are a seventh of its peak, predicted in under a second."""
    measured = next(row for row in RECORD["configurations"] if row["name"] == "unet-fp32")
    row = compare.compare(measured, find_device(RECORD["device"]))
    assert abs(row["peak_allocated_bytes_error_fraction"]) < 0.005
    assert abs(row["peak_reserved_bytes_error_fraction"]) < 0.05
    assert row["is_in_predicted_device_interval_bytes"]


def test_the_summary_is_that_of_the_rows_of_all_recorded_steps() -> None:
    assert [row["name"] for row in RESULT["rows"]] == [row["name"] for row in RECORD["configurations"]]
    assert RESULT["summary"]["now"] == compare.summarise(RESULT["rows"])
    assert RESULT["summary"]["before"] == compare.summarise(RECORD["configurations"])
