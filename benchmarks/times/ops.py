"""Predicted time and peak memory of single blocks against what was measured on five GPUs.

    python benchmarks/times/ops.py PATH/gpu_ops.csv [--kernel rope]

The measurements are those that Liger-Kernel publishes of plain PyTorch, in eager mode
(linkedin/Liger-Kernel, benchmark/data/all_benchmark_data.csv, providers "huggingface" and "torch"). `blocks.py`
has the blocks. The file of measurements is not part of this project.

Time is the median of triton's do_bench: it writes 256 MB before each call, so that the L2 cache is cold, and
submits one call after another without waiting. The prediction is of the last of several such calls in a queue.
Memory is the peak of allocated bytes during a call that follows others. It includes the tensors that a script
holds, gradients of earlier calls, and cuBLAS's workspaces; not the CUDA context.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import structs

sys.path.insert(0, str(Path(__file__).parent.parent))

import argparse
import csv
import json
import statistics
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.cost.kinds import base_name
from brimful.cost.queue import DEVICE, LinkOp, finish_seconds, synchronizes
from brimful.cost.roofline import Roofline
from brimful.devices import Device, find_device
from brimful.memory import predict_memory
from brimful.settings import Precision
from brimful.trace import Op, Trace
from machine import keep
from times.archive import take_steps, write_steps
from times.blocks import BLOCKS, call_of, cleared_by, sizes_of
from times.kernel_classes import class_seconds, kernels_at_peak, plain_roofline_seconds
from times.summary import by, plain_roofline_of, summary_of

PROCESSES = 2
CALLS = 3
"""From the second on each call finds the gradients of earlier ones; the last one is compared."""
FLUSHED_BYTES = 256e6
"""What do_bench writes before each call."""
QUEUED_CALLS = 6
"""After these the host's lead no longer changes the time of a call."""
LATE = ("fused_moe", "geglu", "tiled_geglu")
"""Kernels whose forward is measured after backward ran in the process: cuBLAS has both its workspaces."""
PRECISIONS = {"sparse_multi_token_attention": Precision.TF32}
"""Of float32 arithmetic, other than torch's default for matmuls; cuDNN's convolutions round to TF32."""
NOTES = {
    "distill_jsd_loss": "Measured two months before the script was committed, in a version that is not public. "
    "With gradients of the teacher, times agree within 5 %; memory then still differs.",
    "fused_linear_cpo_loss": "2084.05 MiB more are measured at every size: two weights of the head and 80 MiB, "
    "which the process held.",
    "fused_linear_simpo_loss": "2084.05 MiB more are measured at every size, as for fused_linear_cpo_loss.",
    "multi_token_attention": "cuDNN's workspace is unknown; `upper_bytes` has the largest that is assumed.",
}
"""What is known of rows whose errors are large."""
ELSEWHERE = {
    ("embedding", "memory"): "12 GiB of other benchmarks of the same process are held: 12,356 MiB are measured "
    "for a table of 3 MiB and an output of 48 MiB"
}
"""Rows that do not measure what they say, with the reason."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--kernel", help="only this kernel; nothing is written")
    parser.add_argument("--kernels", type=Path, help="write the kernels of each call here, for fit.py")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8") as file:
        measured = [row for row in csv.DictReader(file) if options.kernel in (None, row["kernel"])]
    began = time.perf_counter()
    with ProcessPoolExecutor(PROCESSES) as pool:
        compared = list(pool.map(compare, measured, chunksize=8))
    rows = [row for row in compared if "refused" not in row]
    speed = [row for row in rows if "measured_seconds" in row]
    steps = list(take_steps(speed, "ops", model="kernel", variant="mode"))
    if options.kernels:
        write_steps(options.kernels, steps)
    memory = [row for row in rows if "measured_bytes" in row]
    content: dict[str, Any] = {
        "seconds": round(time.perf_counter() - began, 1),
        "measured_rows": len(measured),
        "rows_of_speed": len(speed),
        "rows_of_memory": len(memory),
    }
    if speed:
        content["speed"] = summary_of(speed) | {"plain_roofline": plain_roofline_of(speed)}
        content |= {f"speed_by_{key}": by(speed, key) for key in ("kernel", "gpu", "mode")}
    if memory:
        content["memory"] = errors_of(memory)
        content |= {f"memory_by_{key}": errors_by(memory, key) for key in ("kernel", "gpu", "mode")}
    content |= {"notes": NOTES, "refused": refusals(compared)}
    for name in content:
        print(name, json.dumps(content[name], indent=1))
    if options.kernel is None:
        keep("times_ops.json", "python benchmarks/times/ops.py PATH/gpu_ops.csv", content | {"rows": rows})
    else:
        for row in rows:
            print(json.dumps({name: value for name, value in row.items() if name != "config"}))


def compare(row: dict[str, str]) -> dict[str, Any]:
    """A measured row beside its prediction; why there is none, if it cannot be built or says something else."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about: dict[str, Any] = {name: row[name] for name in ("kernel", "provider", "mode", "gpu")}
    about |= {"config": row["config"], "x_name": row["x_name"], "x": int(float(row["x"]))}
    if (row["kernel"], row["metric"]) in ELSEWHERE:
        return about | {"metric": row["metric"], "refused": ELSEWHERE[row["kernel"], row["metric"]]}
    device = find_device(row["gpu"])
    try:
        trace = captured(row, device)
    except bf.BrimfulError as error:
        return about | {"metric": row["metric"], "refused": f"{type(error).__name__}: {str(error)[:300]}"}
    if row["metric"] == "memory":
        return about | memory_of(trace, float(row["median"]) * 2**20)
    precision = PRECISIONS.get(row["kernel"], Precision.FP32)
    ops = [op for op in trace.ops if op.step == CALLS - 1 and op.phase in ("forward", "backward")]
    predicted, measured = queued_seconds(ops, device, precision), float(row["median"]) / 1e3
    return about | {
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "error_fraction": predicted / measured - 1,
        "roofline_seconds": plain_roofline_seconds(ops, device, precision),
        "ops": len(ops),
        "host_seconds": exposed_host_seconds(ops, device),
        "class_seconds": class_seconds(ops, device, precision),
        "kernels": kernels_at_peak(ops, device, precision),
    }


def captured(row: dict[str, str], device: Device) -> Trace:
    """Some calls of a row's block, each as a step of a loop, with its setup before."""
    of_memory = row["metric"] == "memory"

    def loop(placeholder: nn.Module, batches: Iterable[Any]) -> None:
        where = next(placeholder.parameters()).device
        block = BLOCKS[row["kernel"]](sizes_of(row), where)
        call = call_of(block, row["mode"], of_memory=of_memory)
        cleared = cleared_by(block, row["mode"], of_memory=of_memory)
        if of_memory and row["kernel"] in LATE:
            _take_workspaces(where)
        steps_nothing = torch.optim.SGD(placeholder.parameters())
        for _batch in batches:
            for tensor in cleared:
                tensor.grad = None
            call()
            steps_nothing.step()

    job = bf.Job(
        model=lambda: nn.Linear(1, 1),
        loss=lambda _model, batch: batch,
        batch=lambda count: torch.zeros(count, 1),
        loop=loop,
        name=f"{row['kernel']} {row['mode']}",
    )
    return capture_step(job, bf.Settings(micro_batch_size=1), device, steps=CALLS)


def _take_workspaces(device: torch.device) -> None:
    x = torch.ones(1, 1, device=device, requires_grad=True)
    torch.autograd.backward((x @ x).sum())


def memory_of(trace: Trace, measured_bytes: float) -> dict[str, Any]:
    """Predicted and measured peak of a call, and what the prediction holds."""
    prediction = predict_memory(trace)
    predicted = prediction.steady_peak_allocated_bytes
    most = tuple(
        structs.replace(storage, size_bytes=max(storage.size_bytes, storage.most_bytes or 0))
        for storage in trace.storages
    )
    return {
        "measured_bytes": round(measured_bytes),
        "predicted_bytes": predicted,
        "upper_bytes": predict_memory(replace(trace, storages=most)).steady_peak_allocated_bytes,
        "error_fraction": predicted / measured_bytes - 1,
        "peak_op": prediction.peak_op,
    }


def queued_seconds(ops: Sequence[Op], device: Device, precision: Precision) -> float:
    """Time of one call among others in a queue, from the end of the write before it to its own end."""
    roofline = Roofline(device, precision)
    host = [device.launch_seconds, *(roofline.host_seconds(op) for op in ops)]
    work = [roofline.copy_seconds(int(FLUSHED_BYTES)), *(roofline.work_seconds(op) for op in ops)]
    waits = [index for index, op in enumerate(ops, start=1) if synchronizes(base_name(op.name))]
    places = [call * len(work) + index for call in range(QUEUED_CALLS) for index in waits]
    ends = finish_seconds(
        np.tile(host, QUEUED_CALLS),
        np.tile(work, QUEUED_CALLS),
        [LinkOp(place, DEVICE, copy_seconds=None) for place in places],
    )
    return float(ends[-1] - ends[-1 - len(ops)])


def exposed_host_seconds(ops: Sequence[Op], device: Device) -> float:
    """Time of the host to launch a call, less its lead: it goes ahead while the device clears the cache."""
    roofline = Roofline(device, Precision.FP32)
    launches = sum(roofline.host_seconds(op) for op in ops)
    return max(launches - roofline.copy_seconds(int(FLUSHED_BYTES)), 0.0)


def errors_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Errors of rows of memory."""
    ratios = [row["predicted_bytes"] / row["measured_bytes"] for row in rows]
    errors = [abs(ratio - 1) for ratio in ratios]
    found = {
        "rows": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": float(np.quantile(errors, 0.9)),
        "median_ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "within_1_percent": sum(error <= 0.01 for error in errors),
    }
    return {name: round(value, 5) for name, value in found.items()}


def errors_by(rows: Sequence[dict[str, Any]], key: str) -> dict[str, dict[str, float]]:
    """The same for each value of a field."""
    return {
        name: errors_of([row for row in rows if row[key] == name]) for name in {row[key]: 0 for row in rows}
    }


def refusals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without a comparison, once for each reason."""
    found: dict[tuple[str, str, str, str], int] = {}
    for row in rows:
        if "refused" in row:
            key = (row["kernel"], row["metric"], row["mode"], row["refused"])
            found[key] = found.get(key, 0) + 1
    names = ("kernel", "metric", "mode", "reason")
    return [dict(zip(names, key, strict=True)) | {"rows": count} for key, count in found.items()]


if __name__ == "__main__":
    main()
