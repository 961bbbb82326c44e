"""DeepSpeed's ZeRO on two processes over gloo: the loss curve of one process, and memory per rank as predicted.

    python benchmarks/train/zero.py

Models, batches and counts as in `ranks.py`. Each case is measured on both ranks, once as it runs and once with
a pause after each collective, in which gloo's threads let go of what they sent; NCCL holds on to nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import brimful as bf
from machine import keep
from train.ranks import RANKS, STEPS, plan, train

PAUSE_SECONDS = 0.03
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
CASES = [("mlp", 8, "none"), ("mlp", 2, "none"), ("gpt", 8, "none"), ("gpt", 2, "none"), ("gpt", 8, "all")]


def on_ranks(cases: list[tuple[str, bf.Plan]], *, pauses: bool, folder: Path) -> list[list[Any]]:
    """Results of each case, by rank."""
    multiprocessing.spawn(_rank, (str(folder), cases, pauses), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, folder: str, cases: list[tuple[str, bf.Plan]], pauses: bool) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store {pauses}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    for name in COLLECTIVES if pauses else ():
        setattr(dist, name, _pausing(getattr(dist, name)))
    torch.save([train(name, how) for name, how in cases], Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _pausing(collective: Any) -> Any:
    def paused(*arguments: Any, **options: Any) -> Any:
        work = collective(*arguments, **options)
        time.sleep(PAUSE_SECONDS)
        return work

    return paused


def main(folder: Path) -> None:
    names = [(case, stage) for stage in ("zero1", "zero2", "zero3") for case in CASES]
    cases = [(name, plan(name, stage, RANKS, size, recompute)) for (name, size, recompute), stage in names]
    alone = {case: train(case[0], plan(case[0], "ddp", 1, case[1], case[2])).losses for case in CASES}
    plain, paused = (on_ranks(cases, pauses=pauses, folder=folder) for pauses in (False, True))
    rows = []
    for index, ((case, stage), (name, how)) in enumerate(zip(names, cases, strict=True)):
        predicted = how.predicted_peak_allocated_bytes
        peaks, with_pauses = (
            [results[index].measured_peak_allocated_bytes for results in runs] for runs in (plain, paused)
        )
        losses = plain[0][index].losses
        rows.append(
            {
                "model": name,
                "settings": how.settings.describe(),
                "parallelism": stage,
                "predicted_peak_allocated_bytes": predicted,
                "measured_peak_allocated_bytes": peaks,
                "with_pauses_bytes": with_pauses,
                "largest_relative_loss_difference": max(
                    abs(a / b - 1) for a, b in zip(losses, alone[case], strict=True)
                ),
            }
        )
        print(stage, how.settings.describe(), [f"{predicted / peak - 1:+.1%}" for peak in peaks + with_pauses])
    errors = [
        row["predicted_peak_allocated_bytes"] / peak - 1 for row in rows for peak in row["with_pauses_bytes"]
    ]
    worst = [
        row["predicted_peak_allocated_bytes"] / peak - 1
        for row in rows
        for peak in row["measured_peak_allocated_bytes"]
    ]
    summary = {
        "memory_errors_with_pauses": [round(min(errors), 4), round(max(errors), 4)],
        "memory_errors": [round(min(worst), 4), round(max(worst), 4)],
        "largest_relative_loss_difference": max(row["largest_relative_loss_difference"] for row in rows),
    }
    print(summary)
    content = {"summary": summary, "steps": STEPS, "ranks": RANKS, "rows": rows}
    keep("train_zero.json", "python benchmarks/train/zero.py", content, "deepspeed")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
