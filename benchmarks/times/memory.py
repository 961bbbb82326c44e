"""Does brimful predict which batch size of a vision model fits an RTX 3090? Against what timm measured.

    python benchmarks/times/memory.py PATH/gpu_time_vision.csv [--sample 60]

The measurements are those of `vision.py`. Their batch size is the largest that ran of 512, 384, 256, …, 1: it
fits 24 GiB, and the next larger one does not. So a row gives two verdicts, or one if its batch size is 512.

The step is timm's benchmark.py under torch 1.12: fp16 autocast around forward and backward, no loss scaler, and
`zero_grad` that keeps gradients and writes zeros, which was the default then. `STATISTICS` lists what is
compared with the memory that the driver reports of the card. The chosen one is `surviving`, for what torch does
when memory runs out: it releases the blocks in its cache and tries again. So a step fails only if live blocks,
and the gaps between them that no request fits into, exceed what the CUDA context leaves of the memory. No
constant is fitted to these rows.

What limits the verdicts:

- The CUDA context of torch 1.12 is known to 976 to 1,627 MiB only: public figures of two RTX 3090 with older
  releases differ by that much. `surviving_low_context` and `surviving_high_context` show what that decides. The
  memory that the driver reports depends on its version, by 150 MiB.
- cuDNN's workspaces are not counted: in benchmark mode it skips algorithms whose workspace does not fit. How
  the workspaces of those that it takes fragment the cache is not known.
- Fragmentation is simulated for the requests of today's torch, whose ops differ from 1.12's in temporaries, and
  without the attempts at larger batches that failed before in the same process.
- Today's timm builds some models otherwise. Those with another number of parameters are not compared; a model
  with the same number may still keep other tensors.
- Neighbouring batch sizes differ by a factor of 1.33 to 2, so an error of some percent decides few verdicts.
  `right_if_scaled` counts right verdicts for predictions that are 5 and 10 % smaller or larger.

The file of measurements is not part of this project.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from times import vision  # before brimful: it imports torchvision first

# isort: split
import argparse
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.devices import Device, find_device
from brimful.prediction.estimate import NO_LIMIT_BYTES, estimate_trace
from brimful.trace import Trace
from machine import Rows
from times.same_model import differs
from times.sample import rows_of
from times.verdicts import (
    Trial,
    Verdict,
    medians_of_capacity,
    right_if_scaled,
    tally,
    tally_by,
    trials_of,
    wrong,
)

PROCESSES = 2
TORCH = "1.12"
"""Whose CUDA contexts count: it loads all kernels at once."""
STEPS = 2
"""Captured steps of timm's loop: momentum and gradients exist from the second on."""
STATISTICS = {
    "surviving": "timm's step: least capacity with which the simulated allocator completes it, and the "
    "context of torch 1.12",
    "surviving_low_context": "the same with the low end of that context",
    "surviving_high_context": "the same with the high end of that context",
    "allocated": "timm's step: peak allocated bytes, and the context of torch 1.12",
    "reserved": "timm's step: predicted_peak_device_bytes, with the context of torch 1.12",
    "upper_end": "timm's step: upper end of the interval, with the largest workspaces and context",
    "own_step_then": "brimful's step, which frees gradients: least capacity, and the context of torch 1.12",
    "own_step_surviving": "brimful's step: least capacity, and today's context",
    "own_step_reserved": "brimful's step: predicted_peak_device_bytes, with today's context",
}
CHOSEN = "surviving"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, help="this many models, drawn at random; default: all")
    options = parser.parse_args()
    chosen = rows_of(options.rows, options.sample)
    sample = "" if options.sample is None else f" --sample {options.sample}"
    command = f"python benchmarks/times/memory.py PATH/gpu_time_vision.csv{sample}"
    kept = Rows("times_memory.json", command, "timm", "torchvision")
    began = time.perf_counter()
    missing = [row for row in chosen if not kept.has(model=row["model"], layout=row["layout"])]
    with ProcessPoolExecutor(PROCESSES) as pool:
        for found in pool.map(compare, missing):
            kept.add(found)
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "models": len({row["model"] for row in chosen}),
        "measured_rows": len(chosen),
        **summary(kept.rows),
        "not_built": [row for row in kept.rows if "refused" in row],
    }
    for name in ("device", "summary", "by_layout", "right_if_scaled"):
        print(name, content[name])
    for each in content["wrong"]:
        print(each)
    kept.keep(content)


def compare(row: dict[str, str]) -> dict[str, Any]:
    """The trials of a measured row beside their predictions; why there are none, if it cannot be built."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timm.layers.set_fused_attn(False)
    about = {"model": row["model"], "family": vision.family_of(row["model"]), "layout": row["layout"]}
    trials = []
    for trial in trials_of(int(row["batch_size"])):
        predicted = predict(row, trial.batch_size)
        if isinstance(predicted, str):
            return about | {"refused": predicted}
        trials.append({"batch_size": trial.batch_size, "fits": trial.fits, "predicted_bytes": predicted})
    return about | {"image_size": int(row["image_size"]), "trials": trials}


def predict(row: dict[str, str], batch_size: int) -> dict[str, int] | str:
    """Each of `STATISTICS` for a row's model at a batch size; why not, if it cannot be built."""
    then, today = devices()
    settings = bf.Settings(micro_batch_size=batch_size, **vision.SETTINGS)

    def timm_job(is_built: bool) -> bf.Job:
        return replace(vision.job_of(row, is_built=is_built), loop=timm_loop)

    measured = vision.try_capture(timm_job, settings, then, steps=STEPS)
    if isinstance(measured, str):
        return measured
    if other := differs(measured.parameter_count, row["parameters_millions"]):
        return other
    own = vision.try_capture(lambda is_built: vision.job_of(row, is_built=is_built), settings, today)
    if isinstance(own, str):
        return own
    return of_measured_step(measured, then) | of_own_step(own, today, then)


def timm_loop(model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
    """The step of timm's benchmark.py as torch 1.12 ran it; always the same images, new labels."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)
    images: Tensor | None = None

    def step(images: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.float16):
            output = model(images)
            labels = torch.empty(len(output), device="cuda", dtype=torch.long).random_(output.shape[-1])
            F.cross_entropy(output, labels).backward()
        optimizer.step()

    for batch in batches:
        images = batch["images"].to("cuda") if images is None else images
        step(images)


def of_measured_step(trace: Trace, device: Device) -> dict[str, int]:
    """The statistics of timm's step on the device as it was."""
    estimate = estimate_trace(trace, device, capacity_bytes=NO_LIMIT_BYTES)
    surviving = estimate.smallest_surviving_capacity_bytes
    assert surviving is not None, "a GPU caches"
    return {
        "surviving": surviving + device.context_bytes,
        "surviving_low_context": surviving + device.context_low_bytes,
        "surviving_high_context": surviving + device.context_high_bytes,
        "allocated": estimate.predicted_peak_allocated_bytes + device.context_bytes,
        "reserved": estimate.predicted_peak_device_bytes,
        "upper_end": estimate.predicted_device_interval_bytes[1],
    }


def of_own_step(trace: Trace, today: Device, then: Device) -> dict[str, int]:
    """The statistics of brimful's step, on the device as it is today and as it was."""
    estimate = estimate_trace(trace, today, capacity_bytes=NO_LIMIT_BYTES)
    surviving = estimate.smallest_surviving_capacity_bytes
    assert surviving is not None, "a GPU caches"
    return {
        "own_step_then": surviving + then.context_bytes,
        "own_step_surviving": surviving + today.context_bytes,
        "own_step_reserved": estimate.predicted_peak_device_bytes,
    }


def devices() -> tuple[Device, Device]:
    """The GPU with the torch that was measured, and with the newest."""
    return find_device(vision.DEVICE, torch_version=TORCH), find_device(vision.DEVICE)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Right and wrong verdicts by statistic; of the chosen one by layout and family, and which are wrong."""
    device = devices()[0]
    by_statistic = {name: list(verdicts_of(rows, name, device.capacity_bytes)) for name in STATISTICS}
    chosen = by_statistic[CHOSEN]
    return {
        "device": {
            "name": device.name,
            "capacity_bytes": device.capacity_bytes,
            "context_bytes": [device.context_low_bytes, device.context_bytes, device.context_high_bytes],
        },
        "statistics": STATISTICS,
        "chosen": CHOSEN,
        "summary": {name: tally(verdicts) for name, verdicts in by_statistic.items()},
        "right_if_scaled": right_if_scaled(chosen),
        "median_fraction_of_capacity": medians_of_capacity(chosen),
        "by_layout": tally_by(chosen, lambda verdict: verdict.layout),
        "by_family": tally_by(chosen, lambda verdict: verdict.family),
        "wrong": wrong(chosen),
    }


def verdicts_of(rows: list[dict[str, Any]], statistic: str, capacity_bytes: int) -> Iterable[Verdict]:
    """The verdicts of all rows that were compared, by one statistic."""
    for row in rows:
        for trial in row.get("trials", ()):
            yield Verdict(
                model=row["model"],
                family=row["family"],
                layout=row["layout"],
                trial=Trial(trial["batch_size"], fits=trial["fits"]),
                predicted_bytes=trial["predicted_bytes"][statistic],
                capacity_bytes=capacity_bytes,
            )


if __name__ == "__main__":
    main()
