"""Steps that an H100 SXM measured, predicted without and with the calibration that it made of itself."""

import statistics
from collections.abc import Mapping
from typing import Any

import pytest

from brimful.devices import find_device
from gpu.step_times import kept_calibration, measured_steps, predicted_times, row_of

CHOSEN = ("unet-fp32", "unet-tf32-accumulate", "resnet50-tf32", "resnet50-fp32")
"""Of the steps those captured soonest; `benchmarks/results/gpu_times.json` has all."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    table = find_device("H100 SXM")
    devices = {"uncalibrated": table, "calibrated": kept_calibration().applied_to(table)}
    measured = {row["name"]: row for row in measured_steps()}
    return [row_of(measured[name], predicted_times(name, devices), devices) for name in CHOSEN]


def median_error(rows: list[Mapping[str, Any]], which: str) -> float:
    return statistics.median(abs(row[which]["error_fraction"]) for row in rows)


def test_a_calibration_makes_predictions_better(rows: list[dict[str, Any]]) -> None:
    assert median_error(rows, "calibrated") < 0.8 * median_error(rows, "uncalibrated")
    assert median_error(rows, "calibrated") < 0.1


@pytest.mark.parametrize("which", ["uncalibrated", "calibrated"])
def test_intervals_cover_the_measured_times(rows: list[dict[str, Any]], which: str) -> None:
    assert sum(row[which]["is_covered"] for row in rows) >= len(CHOSEN) - 1
