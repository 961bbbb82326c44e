"""What a plan that changes nothing adds to a step: `bf.apply` against a loop written by hand.

    python benchmarks/plan/wrapping.py

Copies of a small net train on the same batches in one thread, a step of each in turn: a loop by hand, the same
loop once more, and `bf.apply` with every unit kept. The order turns with each round. The second loop says what
noise is: its ratio to the first would be 1 on a quiet machine. The loops compute what a plan's step does, the
gradients' norm included; a fourth leaves that out, as it is for use. Times are the processor's, which other
processes lengthen less than the clock's; those are given beside. The same on a net of next to no arithmetic
tells what is added in seconds, which is the same for any model, with less noise.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.settings import Action, Settings, UnitAction
from machine import keep

ROUNDS = 400
WARM_UP = 24
LAYERS = 3
STEP_SECONDS = 0.02
AIM = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the net and its batches."""

    width: int
    vocabulary: int
    sequence: int
    samples: int


SIZES = {
    "a step of about 20 ms": Size(width=96, vocabulary=256, sequence=64, samples=4),
    "next to no arithmetic": Size(width=8, vocabulary=4, sequence=2, samples=1),
}


class Net(nn.Module):
    """Encoder layers between an embedding and a head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embedding = nn.Embedding(size.vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(LAYERS)
        )
        self.head = nn.Linear(width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


Step = Callable[[Tensor], object]


def by_hand(model: nn.Module, *, computes_norm: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(batch: Tensor) -> Tensor:
        value = loss(model, batch)
        value.backward()
        if computes_norm:
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def planned(model: nn.Module, size: Size) -> Step:
    units = tuple(UnitAction(fqn=f"layers.{i}", action=Action.KEEP) for i in range(LAYERS))
    job = bf.Job(
        model=model,
        loss=loss,
        batch=lambda n: torch.zeros(n, size.sequence, dtype=torch.long),
        optimizer="adamw",
    )
    settings = Settings(micro_batch_size=size.samples, optimizer="adamw", units=units)
    return bf.apply(settings, job, model, torch.optim.AdamW(model.parameters(), fused=True))


def main() -> None:
    torch.set_num_threads(1)
    real, empty = (run(size) for size in SIZES.values())
    added_seconds = empty[PLANNED]["median_difference_seconds"]
    summary = {
        "aim_fraction": AIM,
        "added_fraction": round(real[PLANNED]["median_of_ratios"] - 1, 4),
        "added_fraction_by_noise": round(real[AGAIN]["median_of_ratios"] - 1, 4),
        "added_seconds": added_seconds,
        "added_seconds_by_noise": empty[AGAIN]["median_difference_seconds"],
        "added_seconds_over_20_ms": round(added_seconds / STEP_SECONDS, 4),
        "added_seconds_by_least": round(empty[PLANNED]["least_seconds"] - empty[BY_HAND]["least_seconds"], 6),
        "added_seconds_by_least_and_noise": round(
            empty[AGAIN]["least_seconds"] - empty[BY_HAND]["least_seconds"], 6
        ),
        "load_average": [round(load, 1) for load in os.getloadavg()],
    }
    rows = {name: list(rows) for name, rows in zip(SIZES, (real, empty), strict=True)}
    for row in (*real, *empty, summary):
        print(row)
    keep("plan_wrapping.json", "python benchmarks/plan/wrapping.py", summary | {"rounds": ROUNDS, "rows": rows})


BY_HAND, AGAIN, PLANNED, WITHOUT_NORM = range(4)
NAMES = ("by hand", "by hand again", "planned", "by hand without the norm")


def run(size: Size) -> list[dict[str, Any]]:
    """All ways to train at one size, a row each."""
    torch.manual_seed(0)
    model = Net(size)
    steps = (
        by_hand(copy.deepcopy(model), computes_norm=True),
        by_hand(copy.deepcopy(model), computes_norm=True),
        planned(copy.deepcopy(model), size),
        by_hand(copy.deepcopy(model), computes_norm=False),
    )
    taken: list[list[float]] = [[] for _ in steps]
    elapsed: list[list[float]] = [[] for _ in steps]
    for round_ in range(WARM_UP + ROUNDS):
        batch = torch.randint(size.vocabulary, (size.samples, size.sequence))
        first = round_ % len(steps)
        order = [*range(first, len(steps)), *range(first)]
        for which in order if round_ // len(steps) % 2 else order[::-1]:
            began, began_processor = time.perf_counter(), time.process_time()
            steps[which](batch)
            if round_ >= WARM_UP:
                taken[which].append(time.process_time() - began_processor)
                elapsed[which].append(time.perf_counter() - began)
    return [_row(*each, taken[BY_HAND]) for each in zip(NAMES, taken, elapsed, strict=True)]


def _row(name: str, taken: list[float], elapsed: list[float], by_hand: list[float]) -> dict[str, Any]:
    """Medians of a way to train, and of its ratio and difference to the loop by hand in the same round."""
    ratios = [mine / other for mine, other in zip(taken, by_hand, strict=True)]
    differences = [mine - other for mine, other in zip(taken, by_hand, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "name": name,
        "least_seconds": round(min(taken), 6),
        "median_seconds": round(statistics.median(taken), 6),
        "median_elapsed_seconds": round(statistics.median(elapsed), 6),
        "median_of_ratios": round(middle, 4),
        "quartiles_of_ratios": [round(low, 4), round(high, 4)],
        "standard_error_of_ratio": round(1.2533 * statistics.stdev(_middle(ratios)) / len(ratios) ** 0.5, 4),
        "median_difference_seconds": round(statistics.median(differences), 6),
    }


def _middle(values: list[float]) -> list[float]:
    """Without the tenth at either end, where other processes ran."""
    tenth = len(values) // 10
    return sorted(values)[tenth : len(values) - tenth]


if __name__ == "__main__":
    main()
