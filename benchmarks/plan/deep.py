"""A thousand layers in checkpoint segments: what plans take at least, beside `checkpoint_sequential`.

Usage: python benchmarks/plan/deep.py

Predictions for a T4: bytes allocated at the peak of one step, and its time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import brimful as bf
from brimful.devices import find_device
from brimful.prediction import Estimate
from machine import keep

LAYERS, WIDTH, BATCH, DEVICE = 1000, 64, 4096, "T4"
SEGMENTS = (2, 8, 32, 100)
BUDGETS = {"flat": (130, 80), "residual": (200, 120)}
"""MiB, the first of which plans without nested runs fit."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def flat() -> nn.Sequential:
    return nn.Sequential(
        *(module for _ in range(LAYERS // 2) for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


def residual() -> nn.Sequential:
    return nn.Sequential(*(Residual() for _ in range(LAYERS)))


def job_of(build: Callable[[], nn.Sequential], segments: int | None = None) -> bf.Job:
    def loss(model: nn.Sequential, x: Tensor) -> Tensor:
        x = model(x) if segments is None else checkpoint_sequential(model, segments, x, use_reentrant=False)
        return x.square().mean()

    return bf.Job(model=build, loss=loss, batch=lambda samples: torch.zeros(samples, WIDTH), optimizer="sgd")


def row(how: str, estimate: Estimate | bf.Plan) -> dict[str, Any]:
    found = {
        "how": how,
        "settings": estimate.settings.describe(),
        "predicted_peak_allocated_bytes": estimate.predicted_peak_allocated_bytes,
        "predicted_step_seconds": estimate.predicted_step_seconds,
    }
    print(found, flush=True)
    return found


def rows(build: Callable[[], nn.Sequential]) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"device": DEVICE, "micro_batch_size": BATCH}
    made = [row("everything kept", bf.estimate(job_of(build), **given))]
    for segments in SEGMENTS:
        made.append(row(f"checkpoint_sequential({segments})", bf.estimate(job_of(build, segments), **given)))
    for size in BUDGETS[build.__name__]:
        plan = bf.plan(
            job_of(build),
            DEVICE,
            global_batch_size=BATCH,
            offload_optimizer=False,
            micro_batch_size=BATCH,
            budget=find_device(DEVICE).context_bytes + size * 2**20,
        )
        made.append(row(f"a plan within {size} MiB and the CUDA context", plan))
    return made


def main() -> None:
    found = {build.__name__: rows(build) for build in (flat, residual)}
    keep("plan_deep.json", "python benchmarks/plan/deep.py", {"device": DEVICE, "rows": found})


if __name__ == "__main__":
    main()
