"""Steps in both memory formats on this machine's CPU: predicted against measured peak, time and ratio of times.

    python benchmarks/memory_format.py

Small convolutional models, built in or of `zoo/`. Predicted: `capture_step` and `step_seconds` for the CPU,
which is calibrated first. Measured: peak and median step time of `measure_step`, in turns for the two formats;
the lowest of several medians counts, as other work on the machine only adds time. All medians are kept.
"""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch

from brimful.capture import capture_step
from brimful.devices import Device, find_device
from brimful.prediction import estimate_trace
from brimful.profiling import measure_step
from brimful.profiling.calibrate import measure_device
from brimful.results import Measurement
from brimful.settings import MemoryFormat, Settings
from machine import keep
from step_time import CALIBRATIONS_AT_MOST, UNDISTURBED_FRACTION, Row, built_in, of_zoo, wait_until_idle

STEPS = 5
MOMENTS = 6
IDLE_SECONDS_AT_MOST = 3
"""Before each of many measurements; the minimum of the medians is for a machine that is never idle."""
PEAK_AIM_FRACTION = 0.01
"""How far a predicted peak may be off on a CPU."""

ROWS = (
    built_in("resnet18", 8, image_size=64),
    built_in("vgg16", 4, image_size=64),
    built_in("unet", 2, image_size=64),
    of_zoo("mobilenet-v2", 4),
    of_zoo("convnext", 4),
    of_zoo("video, 3-d", 4),
)


def settings_of(row: Row, memory_format: MemoryFormat) -> Settings:
    return Settings(micro_batch_size=row.micro_batch_size, memory_format=memory_format)


def predict(row: Row, memory_format: MemoryFormat, device: Device) -> dict[str, Any]:
    estimate = estimate_trace(capture_step(row.job(), settings_of(row, memory_format), device), device)
    return {
        "predicted_step_seconds": estimate.predicted_step_seconds,
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
    }


def measure(row: Row, memory_format: MemoryFormat) -> Measurement:
    wait_until_idle(IDLE_SECONDS_AT_MOST)
    return measure_step(row.job(), settings_of(row, memory_format), steps=STEPS)


def compare(row: Row, device: Device) -> dict[str, Any]:
    """Both formats of a model, and the ratio of channels_last to contiguous."""
    found = {each: predict(row, each, device) for each in MemoryFormat}
    medians: dict[MemoryFormat, list[float]] = {each: [] for each in MemoryFormat}
    for _ in range(MOMENTS):
        for each in MemoryFormat:
            measured = measure(row, each)
            medians[each].append(measured.measured_step_seconds)
            found[each]["measured_peak_allocated_bytes"] = measured.measured_peak_allocated_bytes
    for each, values in found.items():
        values["measured_median_seconds"] = medians[each]
        values["measured_step_seconds"] = min(medians[each])
        values["peak_error_fraction"] = (
            values["predicted_peak_allocated_bytes"] / values["measured_peak_allocated_bytes"] - 1
        )
    contiguous, last = found[MemoryFormat.CONTIGUOUS], found[MemoryFormat.CHANNELS_LAST]
    return {
        "model": row.name,
        "micro_batch_size": row.micro_batch_size,
        **{str(each): values for each, values in found.items()},
        "predicted_ratio": last["predicted_step_seconds"] / contiguous["predicted_step_seconds"],
        "measured_ratio": last["measured_step_seconds"] / contiguous["measured_step_seconds"],
    }


def calibrated() -> tuple[Device, float]:
    """This machine's CPU, and the fraction of sizes that other work disturbed while it was measured."""
    for _ in range(CALIBRATIONS_AT_MOST):
        wait_until_idle(IDLE_SECONDS_AT_MOST)
        calibration = measure_device(find_device("cpu"), torch.device("cpu"))
        if calibration.disturbed_fraction < UNDISTURBED_FRACTION:
            break
    return calibration.applied_to(find_device("cpu")), calibration.disturbed_fraction


def main() -> None:
    warnings.simplefilter("ignore")  # of the libraries
    device, disturbed_fraction = calibrated()
    rows = []
    for each in ROWS:
        row = compare(each, device)
        rows.append(row)
        peaks = [row[str(layout)]["peak_error_fraction"] for layout in MemoryFormat]
        print(
            f"{row['model']:<32} channels_last / contiguous: predicted {row['predicted_ratio']:.3f}, "
            f"measured {row['measured_ratio']:.3f}; peaks {peaks[0]:+.2%} {peaks[1]:+.2%}",
            flush=True,
        )
    peak_errors = [abs(row[str(layout)]["peak_error_fraction"]) for row in rows for layout in MemoryFormat]
    ratio_errors = [abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in rows]
    summary = {
        "rows": len(rows),
        "largest_peak_error_fraction": max(peak_errors),
        "peak_aim_fraction": PEAK_AIM_FRACTION,
        "is_peak_aim_reached": max(peak_errors) <= PEAK_AIM_FRACTION,
        "median_ratio_error_fraction": statistics.median(ratio_errors),
        "largest_ratio_error_fraction": max(ratio_errors),
        "faster_format_is_predicted": sum(
            (row["predicted_ratio"] < 1) == (row["measured_ratio"] < 1) for row in rows
        ),
        "calibration_disturbed_fraction": disturbed_fraction,
    }
    print(summary)
    content = {"steps": STEPS, "moments": MOMENTS, "summary": summary, "rows": rows}
    keep("memory_format.json", "python benchmarks/memory_format.py", content, "transformers")


if __name__ == "__main__":
    main()
