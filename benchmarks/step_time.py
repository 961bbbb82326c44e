"""Predicted step time against measured, on this machine's CPU.

    python benchmarks/step_time.py [--unprepared]

Small versions of real architectures: built-in ones with few layers or small images, others of `cpu_truth.py`
and `zoo/`. With `--unprepared`: the ResNet of the examples, and the jobs of `job_zoo/` that train in brimful's
loop without `torch.compile`, as one micro-batch. Of those, the kinds in `DEVELOPED_ON` were looked at when the
CPU's cost model was last changed; the others are held out.

Predicted: `capture_step`, then `step_seconds` for the CPU, which is calibrated anew first. Measured: the median
of some steps of `measure_step`, made several times in a process of the row's own: in a process that trained
other models before, memory is fragmented and the same step takes up to 1.4 times as long. The lowest median
counts, as other work on the machine only adds time. All medians are kept. Before each, other work is waited
for, though not for long.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.devices import Device, find_device
from brimful.job import Job
from brimful.models import find_architecture
from brimful.profiling import measure_step
from brimful.profiling.calibrate import measure_device
from brimful.settings import Settings
from brimful.utils.quantities import format_seconds
from cpu_truth import MODELS
from job_zoo import JOBS, JobCase
from machine import keep
from zoo import ZOO

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

STEPS = 5
MOMENTS = 3
CALIBRATIONS_AT_MOST = 6
UNDISTURBED_FRACTION = 0.1
"""Of a calibration's sizes, that other work may disturb; else it is made again, before any error is seen."""
IDLE_PERCENT = 10.0
IDLE_SECONDS_AT_MOST = 40
AIM_FRACTION = 0.15
"""The project's own aim for the median error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    job: Callable[[], Job]
    micro_batch_size: int
    kind: str = "users"
    """Of the zoo of jobs."""


def built_in(architecture: str, micro_batch_size: int, **options: Any) -> Row:
    said = ", ".join(f"{name}={value}" for name, value in options.items())
    return Row(
        name=f"{architecture} ({said})",
        job=lambda: find_architecture(architecture, **options),
        micro_batch_size=micro_batch_size,
    )


def own(name: str) -> Row:
    model = next(model for model in MODELS if model.name == name)
    return Row(
        name=f"{name} (cpu_truth.py, dropout)", job=lambda: model.job(0.1), micro_batch_size=model.batch_size
    )


def of_zoo(name: str, times: int) -> Row:
    model = next(model for model in ZOO if model.name == name)
    return Row(name=f"{name} (zoo)", job=model.job, micro_batch_size=times * model.micro_batch_size)


ROWS = (
    built_in("bert-base", 4, num_hidden_layers=2, sequence_length=128),
    built_in("gpt2", 2, num_hidden_layers=2, sequence_length=64),
    built_in("vit-base", 8, num_hidden_layers=2, image_size=112),
    built_in("resnet50", 8, image_size=64),
    built_in("unet", 2, image_size=64),
    built_in("vgg16", 4, image_size=64),
    own("mlp"),
    own("cnn"),
    own("gpt"),
    own("lstm"),
    of_zoo("llama", 4),
    of_zoo("t5", 4),
    of_zoo("whisper", 4),
    of_zoo("convnext", 4),
    of_zoo("mobilenet-v2", 4),
)


def digits() -> Job:
    """The ResNet of the examples."""
    sys.path.insert(0, str(EXAMPLES))
    from digits import job

    return job()


DEVELOPED_ON = ("language", "adapters", "classification", "users")


def of_job_zoo(case: JobCase) -> Row:
    return Row(name=case.name, job=case.job, micro_batch_size=case.samples, kind=case.kind)


def is_timed(case: JobCase) -> bool:
    return not (case.refused or case.gpu or case.missing or case.kind == "compiled" or "loop" in case.name)


UNPREPARED = (
    Row(name="digits (examples/digits.py)", job=digits, micro_batch_size=128),
    *(of_job_zoo(case) for case in JOBS if is_timed(case)),
)
"""Timed with `--unprepared`, into a result of their own."""


def predict(row: Row, device: Device) -> dict[str, Any]:
    trace = capture_step(row.job(), Settings(micro_batch_size=row.micro_batch_size), device)
    predicted = step_seconds(trace, device)
    return {
        "model": row.name,
        "micro_batch_size": row.micro_batch_size,
        "kind": row.kind,
        "ops": sum(op.step == trace.captured_steps - 1 for op in trace.ops),
        "predicted_step_seconds": predicted.total_seconds,
        "predicted": asdict(predicted),
    }


def wait_until_idle(most_seconds: int = IDLE_SECONDS_AT_MOST) -> None:
    """Until the other programs on the machine take hardly any time, or long enough."""
    for _ in range(most_seconds):
        if psutil.cpu_percent(interval=1.0) < IDLE_PERCENT:
            return


def measure_apart(index: int, *, is_unprepared: bool) -> list[float]:
    """Some medians of a row's steps, from a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["step_time"])
    with context.Pool(1) as process:
        return process.apply(_measure, (index, is_unprepared))


def _measure(index: int, is_unprepared: bool) -> list[float]:
    warnings.simplefilter("ignore")
    row = (UNPREPARED if is_unprepared else ROWS)[index]
    settings = Settings(micro_batch_size=row.micro_batch_size)
    medians = []
    for _ in range(MOMENTS):
        wait_until_idle()
        medians.append(measure_step(row.job(), settings, steps=STEPS).measured_step_seconds)
    return medians


def errors_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = sorted(abs(row["error_fraction"]) for row in rows)
    return {
        "rows": len(rows),
        "median_error_fraction": statistics.median(errors),
        "p90_error_fraction": errors[round(0.9 * (len(errors) - 1))],
        "largest_error_fraction": errors[-1],
        "aim_fraction": AIM_FRACTION,
        "is_aim_reached": statistics.median(errors) <= AIM_FRACTION,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--unprepared", action="store_true", help="models that nobody prepared for")
    is_unprepared = parser.parse_args().unprepared
    warnings.simplefilter("ignore")  # of the libraries
    start = time.perf_counter()
    for _ in range(CALIBRATIONS_AT_MOST):
        wait_until_idle()
        calibration = measure_device(find_device("cpu"), torch.device("cpu"))
        if calibration.disturbed_fraction < UNDISTURBED_FRACTION:
            break
    device = calibration.applied_to(find_device("cpu"))
    rows = []
    for index, each in enumerate(UNPREPARED if is_unprepared else ROWS):
        row = predict(each, device)
        rows.append(row)
        moments = measure_apart(index, is_unprepared=is_unprepared)
        row["measured_median_seconds"] = moments
        row["measured_step_seconds"] = min(moments)
        row["error_fraction"] = row["predicted_step_seconds"] / row["measured_step_seconds"] - 1
        print(
            f"{row['model']:<56} {format_seconds(row['predicted_step_seconds']):>8} "
            f"{format_seconds(row['measured_step_seconds']):>8} {row['error_fraction']:>+7.1%}",
            flush=True,
        )
    held_out = [row for row in rows if row["kind"] not in DEVELOPED_ON]
    summary = {
        **errors_of(rows),
        "held_out": errors_of(held_out) if held_out else None,
        "bias_fraction": statistics.median(row["error_fraction"] for row in rows),
        "calibration_seconds": calibration.took_seconds,
        "calibration_disturbed_fraction": calibration.disturbed_fraction,
        "seconds": round(time.perf_counter() - start),
    }
    print(summary)
    content = {"steps": STEPS, "moments": MOMENTS, "summary": summary, "rows": rows}
    name, option = ("step_time_unprepared.json", " --unprepared") if is_unprepared else ("step_time.json", "")
    keep(name, f"python benchmarks/step_time.py{option}", content, "transformers")


if __name__ == "__main__":
    main()
