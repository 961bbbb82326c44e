"""How far plans are above a lower bound of every schedule that fits the same budget by recomputing.

    python benchmarks/plan/bound.py [--only NAME] [--limit SECONDS]

The bound is that of `recompute_bound`, on the ops of one captured step: Checkmate's problem, relaxed so that it
bounds any schedule. Both are predictions by the same cost model. The batch is trained whole on both sides, in
the same precision and with the same fused optimizer; plans may neither offload nor chunk the loss, which the
bound does not cover.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful import Job, Precision, find_architecture
from brimful.devices import find_device
from brimful.errors import InfeasibleError
from machine import RESULTS, Rows
from plan.bench import Bench, Outcome
from plan.dataflow import capture_dataflow, step_of
from plan.published import UNet
from plan.recompute_bound import Bound, Step, lower_bound

NAME = "plan_bound.json"
DEVICE = "RTX 3090"
BETWEEN = (0.0, 0.25, 0.5, 0.75)
"""Budgets between the least that a plan takes and what the baseline takes."""
LIMIT_SECONDS = 60.0
"""Of the solver, for one bound. A choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallStep:
    """One job whose trace is small enough for a solver."""

    name: str
    make: Callable[[], Job]
    batch_size: int
    precision: Precision = Precision.FP32


def _classifier(name: str, model: Callable[[], nn.Module], *shape: int) -> Job:
    return Job(
        name=name,
        model=model,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, *shape), "y": torch.zeros(n, dtype=torch.long)},
        optimizer="adamw",
    )


def _mlp() -> nn.Module:
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def _convolutions() -> nn.Module:
    """A chain whose feature maps shrink, so that its values differ in size."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 64, 64, 128, 128, 256, 256):
        stride = 2 if width != channels and channels > 3 else 1
        layers += [nn.Conv2d(channels, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


class Encoder(nn.Module):
    """Four layers of a transformer, (B, T, D) in, (B, classes) out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def _unet() -> Job:
    return Job(
        name="unet",
        model=lambda: UNet(lambda x, size: F.interpolate(x, size, mode="bilinear", align_corners=True)),
        loss=lambda model, batch: F.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, 3, 128, 128), "y": torch.zeros(n, 1, 128, 128)},
        optimizer="adamw",
    )


STEPS = (
    SmallStep(name="mlp, 12 layers", make=lambda: _classifier("mlp", _mlp, 1024), batch_size=65536),
    SmallStep(
        name="chain of 8 convolutions",
        make=lambda: _classifier("cnn", _convolutions, 3, 64, 64),
        batch_size=512,
    ),
    SmallStep(
        name="transformer encoder, 4 layers",
        make=lambda: _classifier("encoder", Encoder, 256, 512),
        batch_size=128,
        precision=Precision.BF16,
    ),
    SmallStep(name="resnet18", make=lambda: find_architecture("resnet18"), batch_size=128),
    SmallStep(name="unet, 128 × 128", make=_unet, batch_size=32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="this model; may be repeated")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds of the solver for a bound")
    args = parser.parse_args()
    command = " ".join(
        ["python benchmarks/plan/bound.py", *(f"--only {each!r}" for each in args.only or ())]
        + ([] if args.limit == LIMIT_SECONDS else [f"--limit {args.limit:g}"])
    )
    results = Rows(NAME, command, "scipy")
    for small in STEPS:
        if (args.only is None or small.name in args.only) and not results.has(model=small.name):
            for row in compare(small, args.limit):
                print(json.dumps(row), flush=True)
                results.add(row)
    content = {"device": DEVICE, "limit_seconds": args.limit, "summary": summary(results.rows)}
    results.keep(content)
    print(f"{RESULTS / NAME}: {json.dumps(content['summary'])}")


def compare(small: SmallStep, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """One model at all budgets."""
    device = find_device(DEVICE)
    bench = Bench(small.make(), device, small.batch_size, small.precision, splits_batch=False)
    plain = bench.plain_outcome()
    step = step_of(capture_dataflow(bench.job, bench.plain, device), device)
    least_bytes = _least_bytes(bench)
    for part in BETWEEN:
        budget_bytes = int(least_bytes + part * (plain.peak_device_bytes - least_bytes))
        ours = _plan(bench, budget_bytes)
        bound = lower_bound(
            step, budget_bytes - device.context_bytes, integral=True, limit_seconds=limit_seconds
        )
        same_bytes = lower_bound(step, ours.peak_allocated_bytes, integral=True, limit_seconds=limit_seconds)
        if same_bytes.seconds < bound.seconds:  # not solved to the end: less memory is never faster
            same_bytes = bound
        yield {
            "model": small.name,
            "batch_size": small.batch_size,
            "precision": str(small.precision),
            "forward_ops": sum(op.again_seconds is not None for op in step.ops),
            "ops": len(step.ops),
            "budget_fraction": round(budget_bytes / plain.peak_device_bytes, 4),
            "between_least_and_baseline": part,
            "budget_bytes": budget_bytes,
            "plain_step_seconds": plain.step_seconds,
            "plan": _told(ours, plain),
            "bound": _proven(bound, step, ours),
            "bound_in_allocated_bytes_of_plan": _proven(same_bytes, step, ours),
        }


def _least_bytes(bench: Bench) -> int:
    """The least budget that has a plan."""
    try:
        _plan(bench, 1)
    except InfeasibleError as error:
        return error.smallest_peak_bytes
    raise AssertionError("a step fits one byte")


def _plan(bench: Bench, budget_bytes: int) -> Outcome:
    asked = replace(bench.request.asked, chunked_loss=False)
    return bench.searched(budget_bytes, asked=asked)


def _told(ours: Outcome, plain: Outcome) -> dict[str, Any]:
    return {
        "settings": ours.settings.describe(),
        "peak_device_bytes": ours.peak_device_bytes,
        "peak_allocated_bytes": ours.peak_allocated_bytes,
        "step_seconds": ours.step_seconds,
        "overhead": round(ours.step_seconds / plain.step_seconds - 1, 4),
    }


def _proven(bound: Bound, step: Step, ours: Outcome) -> dict[str, Any]:
    """A bound as the JSON tells it."""
    if bound.is_impossible or bound.seconds > ours.step_seconds * (1 + 1e-6):
        raise AssertionError(f"the plan is faster than a bound of every schedule: {bound}, {ours}")
    return {
        "step_seconds": bound.seconds,
        "overhead": round(bound.seconds / step.seconds - 1, 4),
        "plan_above": round(ours.step_seconds / bound.seconds - 1, 4),
        "solver_gap": None if bound.gap_fraction is None else round(bound.gap_fraction, 4),
        "solver_seconds": round(bound.solver_seconds, 1),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How far plans are above the bound."""
    found: dict[str, Any] = {"cases": len(rows)}
    for name in ("bound", "bound_in_allocated_bytes_of_plan"):
        above = [row[name]["plan_above"] for row in rows]
        found[name] = {
            "median_plan_above": round(statistics.median(above), 4),
            "largest_plan_above": max(above),
            "within_1_percent": sum(each <= 0.01 for each in above),
        }
    return found


if __name__ == "__main__":
    main()
