"""Predicted time of a training step of language models against what was measured on 8 to 512 A100 and H100.

    python benchmarks/times/llm.py PATH/gpu_time_llm.csv [--sample 60] [--whole 16]

The measurements are those of mosaicml/llm-foundry, scripts/train/benchmarking/README.md: MPT of 125M to 70B
parameters under FSDP. `mpt.py` has the model. Parameters are gathered in bf16; gradients are reduced in float32
here, and in bf16 in rows with `PURE`. The optimizer is AdamW, one parameter after another, as in their
configuration files. Clipping of gradients and the input pipeline are not modelled.

All blocks of a model are alike, so each row is captured with 3 and with 5 blocks, and what it takes with all
of them follows in proportion. `--whole` captures that many rows with all blocks: these say how exact the
proportion is, and they have a predicted peak memory. Rows in fp8 are not compared. The file of measurements is
not part of this project.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import brimful as bf

sys.path.insert(0, str(Path(__file__).parent.parent))
from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.cost.roofline import Roofline
from brimful.devices import Device, find_device
from brimful.prediction.estimate import estimate_trace
from brimful.quantities import GIB
from brimful.settings import Parallelism
from brimful.trace import Op, Phase, Trace
from brimful.trace.extents import Attention, Product, extents_of
from machine import keep
from times.archive import take_steps, write_steps
from times.kernel_classes import AtPeak, class_seconds, kernels_at_peak
from times.mpt import SHAPES, Mpt, Shape, loss
from times.summary import by, summary_of

GPUS = {
    "a100_40gb": ("A100 40GB SXM", 1600e9 / 8),
    "a100_80gb": ("A100 80GB SXM", 1600e9 / 8),
    "h100_80gb": ("H100 SXM", 3200e9 / 8),
}
"""Names in brimful's table, and bytes per second between nodes: 1600 Gbit/s stands above both A100 tables; of
the H100 the README gives none, and eight links of 400 Gbit/s are assumed."""
GPUS_PER_NODE = 8
DEPTHS = (3, 5)
"""Blocks of the captures from which those of all blocks follow."""
SHORT = 2048
"""Tokens up to which attention takes little of a step."""
LONG = 16384
"""Tokens from which it takes much."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--sample", type=int, help="this many rows, drawn at random; default: all")
    parser.add_argument("--whole", type=int, default=16, help="rows captured with all blocks")
    parser.add_argument("--kernels", type=Path, help="write the kernels of steps on one node here, for fit.py")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8") as file:
        measured = [row for row in csv.DictReader(file) if row["precision"] != "amp_fp8"]
    chosen = measured
    if options.sample is not None:
        chosen = random.Random(0).sample(measured, min(options.sample, len(measured)))
    began = time.perf_counter()
    rows = [compare(row) for row in chosen]
    named = [row | {"gpu": GPUS[row["gpu"]][0], "batch_size": 1} for row in rows]
    steps = list(take_steps(named, "llm", variant="recomputes"))
    for row in rows:
        del row["kernels"]
    if options.kernels:
        of_one_node = [row["gpus"] == GPUS_PER_NODE for row in rows]
        write_steps(options.kernels, [step for step, one in zip(steps, of_one_node, strict=True) if one])
    whole = [
        compare_whole(row) | {"in_proportion_seconds": rows[chosen.index(row)]["predicted_seconds"]}
        for row in evenly(chosen, options.whole)
    ]
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "measured_rows": len(chosen),
        "summary": summary_of(rows),
        "one_node": summary_of([row for row in rows if row["gpus"] == GPUS_PER_NODE]),
        **{f"by_{key}": by(rows, key) for key in ("gpu", "model", "sharding", "recomputes", "gpus")},
        "by_gpu_and_length": by([row | {"group": _group(row)} for row in rows], "group"),
        "plain_roofline": by_gpu(rows, "plain_roofline_seconds"),
        "six_flops_per_parameter": by_gpu(rows, "six_flops_seconds"),
        "fractions_of_peak": fractions(rows),
        "whole_depth": whole,
        "rows": rows,
    }
    for name in ("summary", "one_node", "by_gpu_and_length", "plain_roofline", "fractions_of_peak"):
        print(name, content[name])
    for row in whole:
        print(row)
    command = "python benchmarks/times/llm.py PATH/gpu_time_llm.csv"
    command += "" if options.sample is None else f" --sample {options.sample}"
    keep("times_llm.json", f"{command} --whole {options.whole}", content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step takes; every number is affine in the number of blocks."""

    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    optimizer_seconds: float
    sent_bytes: float
    """That each rank sends."""
    alone_bytes: float
    """Of these, those that overlap with nothing."""
    plain_roofline_seconds: float
    work_seconds: dict[str, float]
    """brimful's, by kind."""
    peak_seconds: dict[str, float]
    """FLOPs at the peak rate, by kind; attention without those that a causal mask spares."""
    class_seconds: dict[str, float]
    kernels: dict[AtPeak, float]
    """How often each is launched."""

    def total_seconds(self, rate: float) -> float:
        """The step with the communication that does not overlap."""
        return self.computing_seconds + self.exposed_seconds(rate)

    @property
    def computing_seconds(self) -> float:
        """Without communication."""
        return self.forward_seconds + self.backward_seconds + self.recompute_seconds + self.optimizer_seconds

    def exposed_seconds(self, rate: float) -> float:
        """Communication beyond forward and backward, as `brimful.cost` has it for FSDP."""
        beside = self.forward_seconds + self.backward_seconds + self.recompute_seconds
        return max(self.sent_bytes / rate - beside, self.alone_bytes / rate)


def compare(row: dict[str, str]) -> dict[str, Any]:
    """A measured row beside its prediction."""
    warnings.simplefilter("ignore")
    shape, device, settings = SHAPES[row["model"]], device_of(row), settings_of(row)
    few, many = (parts_of(captured(row, shape._replace(layers=depth)), device) for depth in DEPTHS)
    parts = at_depth(few, many, shape.layers)
    rate = device.peer_bytes_per_second(settings.world_size, settings.num_nodes)
    tokens = int(row["global_batch_size"]) * int(row["sequence_length"])
    measured, predicted = tokens / float(row["tokens_per_second"]), parts.total_seconds(rate)
    peak = device.flops_per_second("bfloat16", settings.precision)
    assert peak is not None
    return about(row) | {
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "error_fraction": predicted / measured - 1,
        "computing_seconds": parts.computing_seconds,
        "exposed_communication_seconds": parts.exposed_seconds(rate),
        "communication_seconds": parts.sent_bytes / rate,
        "recompute_seconds": parts.recompute_seconds,
        "optimizer_seconds": parts.optimizer_seconds,
        "plain_roofline_seconds": parts.plain_roofline_seconds,
        "six_flops_seconds": 6 * float(row["parameters"]) * tokens / int(row["gpus"]) / peak,
        "work_seconds": _rounded(parts.work_seconds),
        "peak_seconds": _rounded(parts.peak_seconds),
        "class_seconds": _rounded(parts.class_seconds),
        "kernels": Counter({kernel: round(count) for kernel, count in parts.kernels.items()}),
        "ops": round(sum(parts.kernels.values())),
    }


def compare_whole(row: dict[str, str]) -> dict[str, Any]:
    """The same with all blocks captured: the time, and the peak memory beside the GPU's."""
    warnings.simplefilter("ignore")
    shape, device = SHAPES[row["model"]], device_of(row)
    trace = captured(row, shape)
    estimate = estimate_trace(trace, device)
    return about(row) | {
        "parameters_differ_by": trace.parameter_count - int(row["parameters"]),
        "predicted_seconds": step_seconds(trace, device).total_seconds,
        "verdict": str(estimate.verdict),
        "predicted_device_gib": estimate.predicted_peak_device_bytes / GIB,
        "capacity_gib": device.capacity_bytes / GIB,
        "peak_phase": str(estimate.peak_phase),
        "breakdown_gib": {str(name): size / GIB for name, size in estimate.breakdown},
    }


def about(row: dict[str, str]) -> dict[str, Any]:
    """What a row is."""
    return {
        "model": row["model"],
        "gpu": row["gpu"],
        "gpus": int(row["gpus"]),
        "tokens": int(row["sequence_length"]),
        "micro_batch_size": int(row["micro_batch_size"]),
        "accumulation": int(row["accumulation"]),
        "sharding": row["sharding"],
        "mixed_precision": row["mixed_precision_mode"],
        "recomputes": row["activation_checkpointing"] == "True",
    }


def device_of(row: dict[str, str]) -> Device:
    """The GPU, with the network of the table it is in."""
    name, network = GPUS[row["gpu"]]
    return replace(find_device(name), network_bytes_per_second=network)


def settings_of(row: dict[str, str]) -> bf.Settings:
    """FSDP2 in place of their FSDP."""
    return bf.Settings(
        micro_batch_size=int(row["micro_batch_size"]),
        gradient_accumulation_steps=int(row["accumulation"]),
        precision=bf.Precision.BF16,
        parallelism=Parallelism.FSDP2,
        param_dtype="bfloat16",
        reshard_after_forward=row["sharding"] == "FULL_SHARD",
        world_size=int(row["gpus"]),
        num_nodes=int(row["gpus"]) // GPUS_PER_NODE,
    )


def captured(row: dict[str, str], shape: Shape) -> Trace:
    """One step of a model of this shape, under the settings of a row."""
    settings, length = settings_of(row), int(row["sequence_length"])
    if row["activation_checkpointing"] == "True":
        paths = (f"blocks.{index}" for index in range(shape.layers))
        units = tuple(bf.UnitAction(fqn=path, action=bf.Action.RECOMPUTE) for path in paths)
        settings = replace(settings, units=units)

    def batch(count: int) -> Tensor:
        return torch.randint(0, shape.vocabulary, (count, length))

    job = bf.Job(
        model=lambda: Mpt(shape, length),
        loss=loss,
        batch=batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, betas=(0.9, 0.95), foreach=False),
    )
    return capture_step(job, settings, device_of(row), steps=1)


def parts_of(trace: Trace, device: Device) -> Parts:
    """What the traced step takes on a device."""
    predicted = step_seconds(trace, device)
    roofline, precision = Roofline(device, trace.settings.precision), trace.settings.precision
    bandwidth = device.memory_bandwidth_bytes_per_second
    peak = device.flops_per_second("bfloat16", precision)
    assert peak is not None
    plain, sent, alone = 0.0, 0.0, 0.0
    work: Counter[str] = Counter()
    at_peak: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    kernels: Counter[AtPeak] = Counter()
    for op, times in repeated(trace):
        kind = kind_of(op)
        work[kind] += times * roofline.work_seconds(op)
        if kind == "collective":
            size = max(op.read_bytes, op.written_bytes)
            sent, alone = sent + times * size, max(alone, size)
            continue
        plain += times * max(op.flops / peak, (op.read_bytes + op.written_bytes) / bandwidth)
        at_peak[kind] += times * op.flops / peak / (2 if kind == "attention" else 1)
        for name, seconds in class_seconds([op], device, precision).items():
            classes[name] += times * seconds
        for kernel, count in kernels_at_peak([op], device, precision).items():
            kernels[kernel] += times * count
    share = 1 - 1 / trace.settings.world_size
    return Parts(
        forward_seconds=predicted.forward_seconds,
        backward_seconds=predicted.backward_seconds,
        recompute_seconds=predicted.recompute_seconds,
        optimizer_seconds=predicted.optimizer_seconds,
        sent_bytes=share * sent,
        alone_bytes=share * alone,
        plain_roofline_seconds=plain,
        work_seconds=dict(work),
        peak_seconds=dict(at_peak),
        class_seconds=dict(classes),
        kernels=dict(kernels),
    )


def repeated(trace: Trace) -> Iterator[tuple[Op, int]]:
    """The ops of a step, and how often each runs: the last captured micro-batch stands for all later ones."""
    last_step, last = trace.captured_steps - 1, trace.captured_micro_batches - 1
    for op in trace.ops:
        if op.step != last_step or op.phase is Phase.SETUP:
            continue
        is_repeated = op.micro_batch == last and op.phase is not Phase.OPTIMIZER
        yield op, trace.settings.gradient_accumulation_steps - last if is_repeated else 1


def kind_of(op: Op) -> str:
    """matmul, attention, collective or other."""
    if op.name.startswith("c10d."):
        return "collective"
    extents = extents_of(op.extents)
    kinds = {Product: "matmul", Attention: "attention"}
    return kinds.get(type(extents), "other")


def at_depth(few: Parts, many: Parts, depth: int) -> Parts:
    """The parts of a model with so many blocks, from those of two shallow ones."""
    far = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def between(before: Any, after: Any) -> Any:
        if isinstance(before, dict):
            return {name: between(before.get(name, 0), after.get(name, 0)) for name in {**before, **after}}
        return before + far * (after - before)

    names = Parts.__dataclass_fields__
    return Parts(**{name: between(getattr(few, name), getattr(many, name)) for name in names})


def fractions(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Fractions of the peak rate that would make rows of one node right, all else as predicted.

    That of matmuls, from rows with short samples; then, with it, that of attention from rows with long ones,
    of the FLOPs that a causal mask leaves. They hold whatever else the prediction misses.
    """
    found: dict[str, dict[str, float]] = {}
    for gpu in sorted({row["gpu"] for row in rows}):
        here = [row for row in rows if row["gpu"] == gpu and row["gpus"] == GPUS_PER_NODE]
        matmul = [_needed(row, "matmul") for row in here if row["tokens"] <= SHORT]
        if not matmul:
            continue
        of_matmul = statistics.median(matmul)
        attention = [_needed(row, "attention", of_matmul) for row in here if row["tokens"] >= LONG]
        low, *_, high = statistics.quantiles(matmul, n=10) if len(matmul) > 1 else [of_matmul] * 2
        found[gpu] = {"matmul": of_matmul, "matmul_low": low, "matmul_high": high, "rows": len(matmul)}
        if attention:
            found[gpu] |= {"attention": statistics.median(attention), "attention_rows": len(attention)}
    return found


def _needed(row: dict[str, Any], kind: str, of_matmul: float | None = None) -> float:
    """The fraction of the peak rate of one kind that makes a row right."""
    rest = row["predicted_seconds"] - row["work_seconds"][kind]
    if of_matmul is not None:
        rest += row["peak_seconds"]["matmul"] / of_matmul - row["work_seconds"]["matmul"]
    return float(row["peak_seconds"][kind] / (row["measured_seconds"] - rest))


def by_gpu(rows: list[dict[str, Any]], peer: str) -> dict[str, dict[str, float]]:
    """Errors of another prediction, for all rows and each GPU."""
    theirs = [row | {"predicted_seconds": row[peer]} for row in rows]
    return {"all": summary_of(theirs)} | by(theirs, "gpu")


def evenly(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """So many rows, at even distances, of one node."""
    of_node = [row for row in rows if int(row["gpus"]) == GPUS_PER_NODE]
    step = max(len(of_node) / count, 1.0) if count else 1.0
    return [of_node[int(index * step)] for index in range(min(count, len(of_node)))]


def _group(row: dict[str, Any]) -> str:
    length = "short" if row["tokens"] <= SHORT else "long" if row["tokens"] >= LONG else "middle"
    return f"{row['gpu']} {length} {'one node' if row['gpus'] == GPUS_PER_NODE else 'several nodes'}"


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{each:.4g}") for name, each in seconds.items()}


if __name__ == "__main__":
    main()
