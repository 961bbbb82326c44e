"""Times of the steps of `gpu_record.json`, predicted by the present code without and with a calibration.

    python benchmarks/gpu/step_times.py [--kernels PATH/mechanisms.json]

Needs no GPU: measured times are those of `results/gpu_record.json`, and the calibration is that of
`results/gpu_calibration.json`, which the same machine made. `--kernels` adds, for the steps whose kernels
`mechanisms.py` timed, measured beside predicted seconds by kind of kernel. Writes `results/gpu_times.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(BENCHMARKS))

import msgspec  # noqa: E402

from brimful.capture import capture_step  # noqa: E402
from brimful.cost import StepTime, step_seconds, time_interval  # noqa: E402
from brimful.cost.kernels import FactorTable  # noqa: E402
from brimful.cost.kernels.factors import reached_by  # noqa: E402
from brimful.devices import Device, find_device  # noqa: E402
from brimful.profiling.calibrate import Calibration  # noqa: E402
from gpu.configurations import CONFIGURATIONS  # noqa: E402
from gpu.predicted import settings_of  # noqa: E402
from machine import RESULTS, keep  # noqa: E402
from times.summary import summary_of  # noqa: E402

RECORD, CALIBRATION, RESULT = "gpu_record.json", "gpu_calibration.json", "gpu_times.json"

KINDS_BY_NAME: tuple[tuple[str, str], ...] = (
    ("Memcpy", "copy of the batch"),
    ("Optimizer.step", ""),  # an annotation that spans kernels
    ("bn_bw|batch_norm_backward", "BatchNorm backward"),
    ("bn_fw|batch_norm", "BatchNorm"),
    ("nchwToNhwc|nhwcToNchw|AddPadding", "layout conversion"),
    ("align1|align2", "misaligned product"),
    ("sdpa|flash|compute_dot_do_o|fmha", "attention"),
    ("max_pool|avg_pool", "pooling"),
    ("SoftMax|softmax", "softmax"),
    ("layer_norm|GammaBeta", "layer norm"),
    ("multi_tensor", "optimizer"),
    ("copy_kernel|CatArray", "copy"),
    ("dropout", "dropout"),
    ("reduce_kernel", "reduction"),
    ("nvjet|cublas|cutlass|gemm|cudnn|xmma|wgrad|splitK", "product or convolution"),
    ("elementwise", "pointwise"),
)
"""Kinds of kernels, by what their names contain; the first that matches counts."""

KINDS_BY_CLASS: tuple[tuple[str, str], ...] = (
    ("input_copy", "copy of the batch"),
    ("batch_norm_backward", "BatchNorm backward"),
    ("batch_norm", "BatchNorm"),
    ("layout_conversion", "layout conversion"),
    ("matmul_unaligned", "misaligned product"),
    ("attention", "attention"),
    ("softmax", "softmax"),
    ("layer_norm", "layer norm"),
    ("random", "dropout"),
    ("reduction", "reduction"),
    ("matmul|batched_matmul|pointwise|convolution|stem", "product or convolution"),
    ("transposing_copy|copy", "copy"),
    ("elementwise|activation", "pointwise"),
)
"""The same of the classes of the cost model, by the beginning of their names."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernels", type=Path, help="what mechanisms.py wrote of the kernels of steps")
    options = parser.parse_args()
    devices = {"uncalibrated": find_device("H100 SXM")}
    devices["calibrated"] = kept_calibration().applied_to(devices["uncalibrated"])
    _leave_imports_to_themselves()
    rows, times = [], {}
    for measured in measured_steps():
        name = measured["name"]
        times[name] = predicted_times(name, devices)
        rows.append(row_of(measured, times[name], devices))
        print(rows[-1], flush=True)
    content: dict[str, Any] = {
        "steps": len(rows),
        **{which: summary(rows, which) for which in devices},
        "recorded": recorded_summary(),
        "probed": probed(devices),
        "rows": rows,
    }
    if options.kernels:
        content["kernels"] = by_kind(options.kernels, times)
    for which in ("recorded", *devices):
        print(which, content[which])
    suffix = " --kernels PATH/mechanisms.json" if options.kernels else ""
    keep(RESULT, f"python benchmarks/gpu/step_times.py{suffix}", content, "transformers")


def measured_steps() -> list[dict[str, Any]]:
    """The recorded steps."""
    rows: list[dict[str, Any]] = _result(RECORD)["configurations"]
    return rows


def kept_calibration() -> Calibration:
    """The calibration that was measured beside the recorded steps."""
    rows = _result(CALIBRATION)["rows"]
    found = next(row["calibration"] for row in rows if "calibration" in row)
    return msgspec.convert(found, Calibration)


def predicted_times(name: str, devices: Mapping[str, Device]) -> dict[str, StepTime]:
    """The times of a configuration's step on each of the devices."""
    configuration, device = CONFIGURATIONS[name], devices["uncalibrated"]
    job = configuration.job(toy=False)
    trace = capture_step(job, settings_of(configuration, job, device, toy=False), device)
    return {which: step_seconds(trace, each) for which, each in devices.items()}


def row_of(
    measured: Mapping[str, Any], times: Mapping[str, StepTime], devices: Mapping[str, Device]
) -> dict[str, Any]:
    """A recorded step beside its predictions."""
    seconds = measured["measured_step_seconds"]
    row: dict[str, Any] = {"name": measured["name"], "measured_seconds": seconds}
    for which, time in times.items():
        low, high = time_interval(time, devices[which])
        row[which] = {
            "predicted_seconds": time.total_seconds,
            "error_fraction": round(time.total_seconds / seconds - 1, 4),
            "interval_seconds": [low, high],
            "is_covered": low <= seconds <= high,
            "class_seconds": {kind: float(f"{each:.4g}") for kind, each in time.kernel_seconds[:8]},
        }
    return row


def summary(rows: list[dict[str, Any]], which: str) -> dict[str, Any]:
    """Errors and coverage of one way to predict."""
    flat = [row | {"predicted_seconds": row[which]["predicted_seconds"]} for row in rows]
    return summary_of(flat) | {"covered": sum(row[which]["is_covered"] for row in rows)}


def recorded_summary() -> dict[str, float]:
    """Errors of the predictions that were made before the steps were measured."""
    return summary_of(
        [
            {
                "predicted_seconds": row["predicted_step_seconds"],
                "measured_seconds": row["measured_step_seconds"],
            }
            for row in measured_steps()
        ]
    )


def probed(devices: Mapping[str, Device]) -> dict[str, float]:
    """Fractions of the peaks that the calibration found, as in `data/gpu_fractions.csv`.

    There convolutions are relative to the table's products in half types, whose fraction is that of published
    steps.
    """
    table, own = reached_by(devices["uncalibrated"]), FactorTable.of(devices["calibrated"]).reached
    relative_half = own.half / table.half
    names = ("bandwidth", "half", "tf32", "fp32", "convolution_half", "convolution_fp32", "convolution_spread")
    found = {name: round(getattr(own, name), 3) for name in names}
    return found | {"convolution_half_of_the_table": round(own.convolution_half * relative_half, 3)}


def by_kind(path: Path, times: Mapping[str, Mapping[str, StepTime]]) -> list[dict[str, Any]]:
    """Measured and predicted seconds by kind of kernel."""
    found = []
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        kernels = row.get("kernel_microseconds_by_name")
        if not kernels:
            continue
        seconds: dict[str, Counter[str]] = {"measured": Counter()}
        for name, (_count, microseconds) in kernels.items():
            seconds["measured"][kind_of(name, KINDS_BY_NAME, re.search)] += microseconds / 1e6
        for which, time in times[row["kernels"]].items():
            seconds[which] = Counter()
            for name, each in time.kernel_seconds:
                seconds[which][kind_of(name, KINDS_BY_CLASS, re.match)] += each
        kinds = [kind for kind, _ in seconds["measured"].most_common() if kind]
        found.append(
            {
                "name": row["kernels"],
                "seconds": {
                    kind: {which: round(each[kind], 6) for which, each in seconds.items()} for kind in kinds
                },
            }
        )
    return found


def kind_of(name: str, kinds: tuple[tuple[str, str], ...], find: Any) -> str:
    """The kind whose pattern matches a name."""
    return next((kind for pattern, kind in kinds if find(pattern, name)), _kind_if_none(name))


def _kind_if_none(name: str) -> str:
    """A class of the cost model is a kind of its own, kernels without a kind are all one."""
    return name if re.fullmatch(r"\w+", name) else "other"


def _result(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def _leave_imports_to_themselves() -> None:
    """Capturing collects garbage first: among all modules' objects that takes most of the time."""
    import transformers.modeling_utils  # noqa: F401  # with all that models import later

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
