"""Predicted throughput of ResNet-50, BERT and Transformer-XL against what was measured on six GPUs.

    python benchmarks/times/gpus.py PATH/gpu_time_gpus.csv

The measurements are those of lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-{fp32,fp16}.csv:
NVIDIA's DeepLearningExamples in NGC containers, on 1 to 8 GPUs. `examples.py` has the models. Configuration and
logs there give what the tables do not. ResNet-50 is fed synthetic images, contiguous (`memory_format: nchw`).
In fp16, ResNet-50 runs under autocast with a constant loss scale, BERT and Transformer-XL as apex's O2:
half-precision parameters, with float32 copies in the optimizer. Transformer-XL has no adaptive softmax, but
logits of all 267,735 words, and samples of 192 tokens (base) and 256 (large). fp32 is TF32 where the GPU has
it, as NGC containers set it. LAMB is priced as fused Adam. Kernels that NVIDIA fused, clipping and input
are not modelled.

The main figure is the ratio of two GPUs on one model in one precision. The file of measurements is not part of
this project.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf

sys.path.insert(0, str(Path(__file__).parent.parent))
from brimful.capture import capture_step
from brimful.cost import step_seconds
from brimful.devices import Device, find_device
from brimful.settings import Precision
from brimful.trace import Op, Phase
from machine import keep
from times.archive import take_steps, write_steps
from times.examples import (
    BertForQuestions,
    BertShape,
    MasterAdam,
    ResNet,
    TransformerXl,
    TransformerXlShape,
    bert_loss,
    transformer_xl_loss,
)
from times.kernel_classes import class_seconds, kernels_at_peak, seconds_without_input_copies
from times.summary import by, summary_of

GPUS = {
    "Quadro RTX 8000": "Quadro RTX 8000",
    "A10": "A10",
    "A100 40GB PCIe": "A100 40GB PCIe",
    "RTX 6000 Ada": "RTX 6000 Ada",
    "RTX 4090": "RTX 4090",
    "H100 80GB SXM5": "H100 SXM",
}
BERT = {
    "bert_base_squad": BertShape(768, 12, 12),
    "bert_large_squad": BertShape(1024, 16, 24),
}
TRANSFORMER_XL = {
    "transformerxlbase": TransformerXlShape(512, 8, 16, 2048, 0.1, 0.0, 192),
    "transformerxllarge": TransformerXlShape(1024, 16, 18, 4096, 0.2, 0.2, 256),
}
PIXELS = 224
STEPS = 100
"""That BERT's script is asked for; its throughput is computed from these, though it stops after two epochs."""
SQUAD_SAMPLES = 88_900
"""Of one epoch: 278 batches of 320, in a log."""


class Example(NamedTuple):
    """A model as its script trains it."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    units_per_sample: int
    """Throughput counts these: images, sequences or tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("rows", type=Path, help="the CSV file of measurements")
    parser.add_argument("--kernels", type=Path, help="write the kernels of steps on one GPU here, for fit.py")
    options = parser.parse_args()
    with options.rows.open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    chosen = [row for row in measured if not is_miscounted(row)]
    began = time.perf_counter()
    rows = [compare(row) for row in chosen]
    steps = list(take_steps(rows, "gpus", variant="precision"))
    if options.kernels:
        write_steps(options.kernels, [step for step, row in zip(steps, rows, strict=True) if row["gpus"] == 1])
    content = {
        "seconds": round(time.perf_counter() - began, 1),
        "measured_rows": len(chosen),
        "miscounted": [row for row in measured if is_miscounted(row)],
        **summaries(rows),
        "rows": rows,
    }
    for name in (
        "ratios",
        "ratios_of_one_gpu",
        "ratios_by_model",
        "ratios_by_gpu",
        "one_gpu",
        "one_gpu_by_gpu",
    ):
        print(name, content[name])
    for row in rows:
        print(*(row[key] for key in ("system", "model", "precision")), f"{row['error_fraction']:+.2f}")
    keep("times_gpus.json", "python benchmarks/times/gpus.py PATH/gpu_time_gpus.csv", content)


def is_miscounted(row: dict[str, str]) -> bool:
    """Whether BERT's script reached the end of two epochs before the steps it counts."""
    return "bert" in row["model"] and int(row["batch_size_all_gpus"]) * STEPS > 2 * SQUAD_SAMPLES


def compare(row: dict[str, str]) -> dict[str, Any]:
    """A measured row beside its prediction."""
    warnings.simplefilter("ignore")
    device, half = device_of(row), row["precision"] == "fp16"
    example = example_of(row["model"], half=half)
    settings = settings_of(row, device)
    is_autocast = settings.precision.autocast_dtype is not None
    optimizer: Callable[[Any], torch.optim.Optimizer] = _adam
    if row["model"] == "resnet50":
        optimizer = _sgd
    elif half:
        optimizer = MasterAdam
    job = bf.Job(model=example.model, loss=example.loss, batch=example.batch, optimizer=optimizer)
    trace = capture_step(job, settings, device, steps=1)
    step_time = step_seconds(trace, device)
    predicted = seconds_without_input_copies(step_time)
    ops = [op for op in trace.ops if op.phase is not Phase.SETUP]
    measured = int(row["batch_size_all_gpus"]) * example.units_per_sample / float(row["throughput"])
    return {
        "gpu": device.name,
        "gpus": settings.world_size,
        "system": row["gpu"],
        "model": row["model"],
        "half": half,
        "precision": f"fp16 {'autocast' if is_autocast else 'O2'}" if half else str(settings.precision),
        "batch_size": settings.micro_batch_size,
        "measured_seconds": measured,
        "predicted_seconds": predicted,
        "error_fraction": predicted / measured - 1,
        "plain_roofline_seconds": sum(plain_seconds(op, device, settings.precision) for op in ops),
        "communication_seconds": step_time.communication_seconds,
        "ops": len(ops),
        "class_seconds": class_seconds(ops, device, settings.precision),
        "kernels": kernels_at_peak(ops, device, settings.precision),
    }


def device_of(row: dict[str, str]) -> Device:
    """The GPU of a system such as "LambdaCloud 8x H100 80GB SXM5"."""
    return find_device(GPUS[re.sub(r"^(?:LambdaCloud )?(?:\d+x )?", "", row["gpu"])])


def settings_of(row: dict[str, str], device: Device) -> bf.Settings:
    """DDP of one process per GPU; O2 has half-precision parameters, which are not a setting."""
    precision = Precision.FP32 if device.tf32_flops_per_second is None else Precision.TF32
    if row["precision"] == "fp16":
        precision = Precision.FP16 if row["model"] == "resnet50" else Precision.FP32
    gpus = int(row["gpus"])
    return bf.Settings(
        micro_batch_size=int(row["batch_size_all_gpus"]) // gpus, precision=precision, world_size=gpus
    )


def example_of(name: str, *, half: bool) -> Example:
    """A model with its loss and its batches."""
    if name in BERT:
        return bert(BERT[name], half=half)
    if name in TRANSFORMER_XL:
        return transformer_xl(TRANSFORMER_XL[name], half=half)
    return resnet()


def resnet(blocks: tuple[int, ...] = (3, 4, 6, 3)) -> Example:
    """ResNet v1.5, contiguous."""

    def batch(count: int) -> dict[str, Tensor]:
        images = torch.randn(count, 3, PIXELS, PIXELS)
        return {"images": images, "labels": torch.randint(0, 1000, (count,))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["labels"])

    return Example(lambda: ResNet(blocks), loss, batch, 1)


def bert(shape: BertShape, *, half: bool) -> Example:
    """BERT on questions."""

    def batch(count: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, shape.vocabulary, (count, shape.tokens))
        ends = {name: torch.randint(0, shape.tokens, (count,)) for name in ("first", "last")}
        return {"tokens": tokens, "kinds": tokens % 2, "is_text": torch.ones_like(tokens)} | ends

    return Example(lambda: _typed(BertForQuestions(shape), half=half), bert_loss, batch, 1)


def transformer_xl(shape: TransformerXlShape, *, half: bool) -> Example:
    """Transformer-XL with full memory."""
    dtype = torch.float16 if half else torch.float32

    def batch(count: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, shape.vocabulary, (count, shape.tokens))
        memories = torch.zeros(count, shape.layers, shape.tokens, shape.width, dtype=dtype)
        return {"tokens": tokens, "labels": tokens, "memories": memories}

    return Example(lambda: _typed(TransformerXl(shape), half=half), transformer_xl_loss, batch, shape.tokens)


def _typed(model: nn.Module, *, half: bool) -> nn.Module:
    return model.half() if half else model


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)


def plain_seconds(op: Op, device: Device, precision: Precision) -> float:
    """The op at peak rates: the larger of arithmetic and memory."""
    rate = device.flops_per_second(op.dtype, precision) if op.flops else None
    moving = (op.read_bytes + op.written_bytes) / device.memory_bandwidth_bytes_per_second
    return moving if rate is None else max(op.flops / rate, moving)


def summaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of ratios and of seconds, brimful's beside those of a plain roofline."""
    kinds = sorted({(row["model"], row["half"]) for row in rows})
    single = [row for row in rows if row["gpus"] == 1]
    return {
        "ratios": _beside(ratios, rows),
        "ratios_of_one_gpu": _beside(ratios, single),
        "ratios_by_model": {
            f"{model} {'fp16' if half else 'fp32'}": _beside(
                ratios, [row for row in rows if (row["model"], row["half"]) == (model, half)]
            )
            for model, half in kinds
        },
        "ratios_by_gpu": {
            gpu: _beside(lambda each, gpu=gpu: ratios(each, of=gpu), rows)
            for gpu in sorted({row["gpu"] for row in rows})
        },
        "summary": _beside(summary_of, rows),
        "one_gpu": _beside(summary_of, single),
        **{
            f"one_gpu_by_{key}": _beside(lambda each, key=key: by(each, key), single)
            for key in ("gpu", "model", "precision")
        },
        "by_gpus": _beside(lambda each: by(each, "gpus"), rows),
    }


def _beside(summarise: Callable[[list[dict[str, Any]]], Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    plain = [row | {"predicted_seconds": row["plain_roofline_seconds"]} for row in rows]
    return {"brimful": summarise(rows), "plain_roofline": summarise(plain)}


def ratios(rows: list[dict[str, Any]], *, of: str | None = None) -> dict[str, float]:
    """Errors of the ratio of two GPUs' throughput, over all pairs with one model, precision and count.

    Args:
        rows: Several systems with the same GPU are one, their mean.
        of: Only pairs with this GPU; None takes all.

    Returns:
        Median and 90th percentile of the error, which is the larger of predicted and measured ratio over the
        smaller, less 1, so that the order of a pair does not matter; and the part of pairs whose order is
        right.
    """
    groups: dict[tuple[Any, ...], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        rates = tuple(row["batch_size"] / row[f"{name}_seconds"] for name in ("measured", "predicted"))
        groups[row["model"], row["half"], row["gpus"]][row["gpu"]].append((rates[0], rates[1]))
    errors, right = [], 0
    for group in groups.values():
        means = {
            gpu: [statistics.mean(each) for each in zip(*rates, strict=True)] for gpu, rates in group.items()
        }
        for gpu, other in combinations(means, 2):
            if of not in (None, gpu, other):
                continue
            (measured, predicted), (other_measured, other_predicted) = means[gpu], means[other]
            is_ratio, predicted_ratio = measured / other_measured, predicted / other_predicted
            errors.append(max(predicted_ratio / is_ratio, is_ratio / predicted_ratio) - 1)
            right += (is_ratio > 1) == (predicted_ratio > 1)
    if not errors:
        return {"pairs": 0}
    found = {
        "pairs": len(errors),
        "median_error": statistics.median(errors),
        "p90_error": sorted(errors)[int(0.9 * (len(errors) - 1))],
        "right_order": right / len(errors),
    }
    return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
