"""How long an optimizer's update takes on this CPU, by itself: small states cost arithmetic.

    python benchmarks/optimizer_update.py

Four matrices of 1024 × 4096; the optimizers in turns, medians of the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn

from machine import keep

ROUNDS = 7
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw, for-loop": partial(torch.optim.AdamW, foreach=False),
    "adamw, fused": partial(torch.optim.AdamW, fused=True),
    "adamw8bit": AdamW8bit,
}


def main() -> None:
    made = {
        name: make([nn.Parameter(torch.randn(1024, 4096)) for _ in range(4)])
        for name, make in OPTIMIZERS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS + 1):
        for name, optimizer in made.items():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            began = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - began)
    rows: list[dict[str, Any]] = []
    for name, each in seconds.items():
        median = statistics.median(each[1:])  # the first makes the state
        rows.append({"optimizer": name, "parameters": 4 * 1024 * 4096, "seconds": median})
        print(rows[-1], flush=True)
    keep("optimizer_update.json", "python benchmarks/optimizer_update.py", {"rows": rows}, "bitsandbytes")


if __name__ == "__main__":
    main()
