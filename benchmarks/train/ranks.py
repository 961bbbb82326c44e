"""Two processes on one machine, over gloo: the loss curve of one process, and memory per rank as predicted.

    python benchmarks/train/ranks.py

Models without dropout or BatchNorm, trained by DDP and FSDP2 on two ranks and by one process on the same
global batches. Memory is that of the first rank's third update, beside the plan's prediction for one rank;
the median of several runs, as gloo's threads let go of their copies when they come to it. Accumulation is
timed with gradients averaged in the last micro-batch alone (`no_sync` on the others) and in each.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.train import Trainer, parallel
from machine import keep

RANKS, RUNS, STEPS, GLOBAL_BATCH = 2, 3, 8, 16
TIMED_STEPS = 12
VOCABULARY, WIDTH, LENGTH = 2000, 256, 64


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(6)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(512, 512), nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
    )


def job(name: str) -> bf.Job:
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        samples: Any = torch.randint(VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=generator)
        make, loss = Decoder, next_token
    else:
        samples = torch.randn(STEPS * GLOBAL_BATCH, 512, generator=generator)
        make, loss = mlp, lambda model, x: F.mse_loss(model(x), x)
    return bf.Job(
        name=name,
        model=make,
        loss=loss,
        batch=samples,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=lambda: bf.Data(train=samples),
    )


def plan(name: str, parallelism: str, ranks: int, micro_batch_size: int, recompute: str) -> bf.Plan:
    return bf.plan(
        job(name),
        "cpu",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        optimizer_implementation="for-loop",
        ranks=ranks,
        parallelism=parallelism,
    )


def train(name: str, how: bf.Plan, steps: int = STEPS) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(job(name), how, steps=steps, device="cpu", certifies=False, show_progress=False).fit()


def on_ranks(name: str, how: bf.Plan, *, synchronises_each: bool = False, steps: int = STEPS) -> Any:
    """The first rank's result."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, name, how, synchronises_each, steps)
        multiprocessing.spawn(_rank, arguments, nprocs=RANKS)
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _rank(rank: int, folder: str, name: str, how: bf.Plan, synchronises_each: bool, steps: int) -> None:
    torch.set_num_threads(1)
    if synchronises_each:
        parallel._Replicated.synchronising = lambda _self, _is_last: nullcontext()  # type: ignore[method-assign]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    result = train(name, how, steps)
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    dist.destroy_process_group()


def memory_and_curve(name: str, parallelism: str, micro_batch_size: int, recompute: str) -> dict[str, Any]:
    how = plan(name, parallelism, RANKS, micro_batch_size, recompute)
    alone = train(name, plan(name, "ddp", 1, micro_batch_size, recompute))
    results = [on_ranks(name, how) for _ in range(RUNS)]
    differences = [
        abs(a / b - 1) for result in results for a, b in zip(result.losses, alone.losses, strict=True)
    ]
    peaks = [result.measured_peak_allocated_bytes for result in results]
    measured, predicted = statistics.median(peaks), how.predicted_peak_allocated_bytes
    row = {
        "model": name,
        "settings": how.settings.describe(),
        "parallelism": parallelism,
        "predicted_peak_allocated_bytes": predicted,
        "measured_peak_allocated_bytes": measured,
        "measured_in_each_run": peaks,
        "error": round(predicted / measured - 1, 4),
        "one_process_measured_peak_allocated_bytes": alone.measured_peak_allocated_bytes,
        "largest_relative_loss_difference": max(differences),
        "steps": len(alone.losses),
    }
    print(row, flush=True)
    return row


def no_sync() -> dict[str, Any]:
    """Four micro-batches a step under DDP, averaged once or each time; medians, alternating."""
    how = plan("gpt", "ddp", RANKS, 2, "none")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for each in seconds:
            result = on_ranks("gpt", how, synchronises_each=each, steps=TIMED_STEPS)
            seconds[each].append(statistics.median(step.seconds for step in result.steps[4:]))
    once, always = (statistics.median(found) for found in seconds.values())
    return {
        "settings": how.settings.describe(),
        "step_seconds": round(once, 4),
        "step_seconds_averaging_in_each_micro_batch": round(always, 4),
        "ratio": round(always / once, 3),
    }


def main() -> None:
    rows = [
        memory_and_curve(name, parallelism, micro_batch_size, recompute)
        for name in ("gpt", "mlp")
        for parallelism in ("ddp", "fsdp2")
        for micro_batch_size, recompute in ((8, "none"), (4, "none"), (8, "all"))
    ]
    summary = {
        "largest_memory_error": max(abs(row["error"]) for row in rows),
        "largest_relative_loss_difference": max(row["largest_relative_loss_difference"] for row in rows),
        "no_sync": no_sync(),
    }
    print(summary)
    keep("train_ranks.json", "python benchmarks/train/ranks.py", {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
