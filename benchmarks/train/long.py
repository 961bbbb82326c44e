"""A long run of small steps: memory stays flat, and no files are left but those that are kept.

    python benchmarks/train/long.py

20,000 optimizer steps of a small network with validation after each of 50 epochs, a save every 500 steps and at
each epoch's end, of which two are kept, and a shuffling DataLoader. The resident memory of the process and the
names and sizes of its files are read every 500 steps; growth is told from step 2,000 on.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import brimful as bf
from brimful.settings import Settings
from brimful.trainer import Trainer
from machine import keep

STEPS, EVERY, WARM, BATCH, EPOCHS = 20_000, 500, 2_000, 16, 50


def job() -> bf.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(STEPS // EPOCHS * BATCH, 32, generator=generator)
    y = x[:, :4].argmax(1)

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4)
        )

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return bf.Job(
        name="long",
        model=model,
        loss=loss,
        batch=[x, y],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=lambda: bf.Data(
            train=DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True),
            validation=[x[:512], y[:512]],
        ),
    )


class Watch(bf.Callback):
    """Reads memory and files."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._process = psutil.Process()
        self.seen: list[dict[str, Any]] = []

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step % EVERY == 0:
            files = [path for path in self._run_dir.rglob("*") if path.is_file()]
            metrics = [path for path in files if path.name == "metrics.jsonl"]
            self.seen.append(
                {
                    "step": record.step,
                    "resident_bytes": self._process.memory_info().rss,
                    "files": len(files),
                    "metrics_bytes": sum(path.stat().st_size for path in metrics),
                    "other_bytes": sum(path.stat().st_size for path in files if path not in metrics),
                }
            )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        watch = Watch(run_dir)
        result = Trainer(
            job(), Settings(micro_batch_size=BATCH), run_dir=run_dir, steps=STEPS, epochs=EPOCHS, device="cpu",
            save_every=EVERY, keep_saves=2, callbacks=[watch], show_progress=False,
        ).fit()  # fmt: skip
        left = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*"))
    warm = next(each for each in watch.seen if each["step"] >= WARM)
    last = watch.seen[-1]
    summary = {
        "steps": len(result.steps),
        "resident_growth_fraction": round(last["resident_bytes"] / warm["resident_bytes"] - 1, 4),
        "resident_bytes_at_last": last["resident_bytes"],
        "metrics_bytes_per_step": round(last["metrics_bytes"] / last["step"], 1),
        "most_files": max(each["files"] for each in watch.seen),
        "other_bytes_from_warm_on": sorted(
            {each["other_bytes"] for each in watch.seen if each["step"] >= WARM}
        ),
        "left_in_the_end": left,
    }
    print(summary)
    keep("train_long.json", "python benchmarks/train/long.py", {"summary": summary, "rows": watch.seen})


if __name__ == "__main__":
    main()
