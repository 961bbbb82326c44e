"""The scripts of docs/howto/own-loop.md: losses beside those of the same loops without brimful, and peaks.

    python benchmarks/own_loops.py

Each script runs as the page has it, DDP and FSDP2 on two ranks over gloo. Losses are compared with the same
loop on whole batches in one process, without brimful. Peaks are the profiler's, of the third step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch

from helpers.own_loops import run, run_on_two_ranks, write_files
from helpers.own_loops_alone import losses_alone
from machine import Rows

SCRIPTS = {
    "plain": "plain PyTorch",
    "compiled": "`torch.compile`",
    "ddp": "DDP, two ranks",
    "fsdp2": "FSDP2, two ranks",
    "lbfgs": "LBFGS",
    "train_gan": "GAN",
}
"""Scripts of the page, by name, and what they show."""
ON_RANKS = ["ddp", "fsdp2"]


def row_of(
    folder: Path, name: str, settings: str, losses: list[float], measured_bytes: int, predicted_bytes: int
) -> dict[str, Any]:
    """What a script did, beside the same loop without brimful."""
    alone = losses_alone(folder, name)
    return {
        "script": name,
        "shows": SCRIPTS[name],
        "settings": settings,
        "largest_loss_difference": max(abs(a - b) for a, b in zip(losses, alone, strict=True)),
        "predicted_peak_allocated_bytes": predicted_bytes,
        "measured_peak_allocated_bytes": measured_bytes,
        "peak_error_fraction": predicted_bytes / measured_bytes - 1,
    }


def rows_of_all(folder: Path) -> list[dict[str, Any]]:
    """A row for each script."""
    write_files(folder)
    run(folder, "plans")
    ranks = run_on_two_ranks(folder, ON_RANKS)
    rows = []
    for name in SCRIPTS:
        if name in ON_RANKS:
            both = [rank[name] for rank in ranks]
            losses = [sum(each) / len(each) for each in zip(*(rank.losses for rank in both), strict=True)]
            most = max(both, key=lambda rank: rank.peak_bytes)
            rows.append(row_of(folder, name, most.settings, losses, most.peak_bytes, most.predicted_bytes))
        else:
            ran = run(folder, name)
            settings = ran.variables["plan"].settings.describe()
            rows.append(row_of(folder, name, settings, ran.losses, ran.peak_bytes, ran.predicted_bytes))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    rows = Rows("own_loops.json", "python benchmarks/own_loops.py")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows_of_all(Path(folder)):
            rows.add(row)
            print(json.dumps(row, indent=1), flush=True)
    rows.keep({})


if __name__ == "__main__":
    main()
