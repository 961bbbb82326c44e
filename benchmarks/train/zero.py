"""DeepSpeed's ZeRO on two processes over gloo: the loss curve of one process, and memory per rank as predicted.

    python benchmarks/train/zero.py

Models, batches and counts as in `ranks.py`. Each case is measured on both ranks, once as it runs and once with
a pause after each collective, in which gloo's threads let go (`gloo.py`).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from machine import keep
from train.gloo import RANKS, on_ranks
from train.ranks import STEPS, alone, plan, train

CASES = [("mlp", 8, "none"), ("mlp", 2, "none"), ("gpt", 8, "none"), ("gpt", 2, "none"), ("gpt", 8, "all")]


def main() -> None:
    names = [(case, stage) for stage in ("zero1", "zero2", "zero3") for case in CASES]
    rows = []
    for case, stage in names:
        name, size, recompute = case
        how = plan(name, stage, RANKS, size, recompute)
        predicted = how.predicted_peak_allocated_bytes
        plain, paused = (on_ranks(partial(train, name, how), pauses=pauses) for pauses in (False, True))
        peaks, with_pauses = (
            [result.measured_peak_allocated_bytes for result in results] for results in (plain, paused)
        )
        rows.append(
            {
                "model": name,
                "settings": how.settings.describe(),
                "parallelism": stage,
                "predicted_peak_allocated_bytes": predicted,
                "measured_peak_allocated_bytes": peaks,
                "with_pauses_bytes": with_pauses,
                "largest_relative_loss_difference": max(
                    abs(a / b - 1) for a, b in zip(plain[0].losses, alone(*case).losses, strict=True)
                ),
            }
        )
        print(
            stage,
            how.settings.describe(),
            [f"{predicted / peak - 1:+.1%}" for peak in peaks + with_pauses],
            flush=True,
        )
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
    main()
