"""torch's own runtime estimator on the training steps of `vision.py`, beside brimful and a plain roofline.

    python benchmarks/times/torch_estimator.py PATH/gpu_time_vision.csv [--sample 30]

torch.distributed._tools.runtime_estimator.RuntimeEstimator, in its mode without a GPU's measurements
("operator-level-cost-model"), asks torch for the peaks of the GPU at hand. Here it gets those of the measured
GPU from brimful's table, and runs the step on fake tensors of a CPU. It halves FLOPs ("MACs"), and divides them
by 75 % of the peak. It sees forward, backward and the optimizer; not the time of the host.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from times.vision import DEVICE, compare, job_of  # before torch

# isort: split
import argparse
import contextlib
import csv
import io
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import timm
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.utils._pytree import tree_map

from brimful.devices import find_device
from brimful.settings import Precision
from machine import keep
from times.summary import plain_roofline_of, summary_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, default=30, help="this many rows, drawn at random")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8") as file:
        measured = random.Random(1).sample(list(csv.DictReader(file)), options.sample)
    rows, refused = [], []
    for row in measured:
        ours = compare(row)
        theirs = estimated_seconds(row)
        if "refused" in ours or isinstance(theirs, str):
            reason = ours.get("refused") or theirs
            refused.append({"model": row["model"], "layout": row["layout"], "reason": reason})
            continue
        del ours["kernels"]
        rows.append(ours | {"torch_seconds": theirs})
        print(row["model"], row["layout"], *(f"{rows[-1][key]:.3f}" for key in SECONDS))
    content = {
        "brimful": summary_of(rows),
        "plain_roofline": plain_roofline_of(rows),
        "torch_runtime_estimator": summary_of(
            [row | {"predicted_seconds": row["torch_seconds"]} for row in rows]
        ),
        "refused": refused,
        "rows": rows,
    }
    for name in ("brimful", "plain_roofline", "torch_runtime_estimator", "refused"):
        print(name, content[name])
    command = f"python benchmarks/times/torch_estimator.py PATH/gpu_time_vision.csv --sample {options.sample}"
    keep("times_torch_estimator.json", command, content, "timm", "torchvision")


SECONDS = ("measured_seconds", "predicted_seconds", "roofline_seconds", "torch_seconds")


def estimated_seconds(row: dict[str, str]) -> float | str:
    """The step's time by torch's estimator, or why it gives none."""
    warnings.simplefilter("ignore")
    device = find_device(DEVICE)
    timm.layers.set_fused_attn(False)

    def tflops(dtype: torch.dtype) -> float:
        rate = device.flops_per_second(str(dtype).removeprefix("torch."), Precision.BF16)
        return (rate or device.fp32_flops_per_second) / 1e12

    bandwidth = device.memory_bandwidth_bytes_per_second / 1e9
    job, source = job_of(row), "torch.utils._runtime_estimation"
    try:
        run = _fake_step(job, int(row["batch_size"]))
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch(f"{source}.get_device_tflops", tflops),
            mock.patch(f"{source}.get_gpu_dram_gbps", return_value=bandwidth),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            return run()
    except Exception as error:  # models that read values, among others
        return f"{type(error).__name__}: {str(error)[:200]}"


def _fake_step(job: Any, batch_size: int) -> Callable[[], float]:
    """A step on fake tensors, after a first that made the momentum; calling it returns the estimate."""
    model, fake = job.model(), FakeTensorMode()
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: _fake_of(fake, each) for name, each in held.items() if each is not None})
    batch = tree_map(fake.from_tensor, job.batch(batch_size))
    optimizer = job.optimizer(model.parameters())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def estimated() -> float:
        estimator = RuntimeEstimator()
        with fake, estimator("operator-level-cost-model"):
            step()
        return float(estimator.total_runtime / 1e3)

    with fake:
        step()
    return estimated


def _fake_of(fake: FakeTensorMode, tensor: Tensor) -> Tensor:
    of = fake.from_tensor(tensor)
    return nn.Parameter(of) if isinstance(tensor, nn.Parameter) and not isinstance(of, nn.Parameter) else of


if __name__ == "__main__":
    main()
