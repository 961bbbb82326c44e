"""Two processes on one machine, over gloo: the loss curve of one process, and memory per rank as predicted.

    python benchmarks/train/ranks.py

Models without dropout or BatchNorm, trained by DDP and FSDP2 on two ranks and by one process on the same
global batches. Memory is that of each rank's third update, beside the plan's prediction for one rank: once
gloo's threads have let go of what they hold, and in several runs as it comes (`gloo.py`). Accumulation is timed
with gradients averaged in the last micro-batch alone (`no_sync` on the others) and in each.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.distributed import strategies as parallel
from brimful.trainer import Trainer
from machine import keep
from train.gloo import RANKS, on_ranks

RUNS, STEPS, GLOBAL_BATCH = 2, 8, 16
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


def plan(
    name: str,
    parallelism: str,
    ranks: int,
    micro_batch_size: int,
    recompute: str,
    reshard_after_forward: bool | None = None,
) -> bf.Plan:
    return bf.plan(
        job(name),
        "cpu",
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=micro_batch_size,
        recompute=recompute,
        optimizer_implementation="for-loop",
        world_size=ranks,
        parallelism=parallelism,
        reshard_after_forward=reshard_after_forward,
    )


def train(name: str, how: bf.Plan, steps: int = STEPS) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Trainer(job(name), how, steps=steps, device="cpu", verify=False, show_progress=False).fit()


@cache
def alone(name: str, micro_batch_size: int, recompute: str) -> Any:
    return train(name, plan(name, "ddp", 1, micro_batch_size, recompute))


def memory_and_curve(
    name: str, parallelism: str, reshard_after_forward: bool | None, micro_batch_size: int, recompute: str
) -> dict[str, Any]:
    how = plan(name, parallelism, RANKS, micro_batch_size, recompute, reshard_after_forward)
    by_one = alone(name, micro_batch_size, recompute)
    runs = [on_ranks(partial(train, name, how)) for _ in range(RUNS)]
    paused = on_ranks(partial(train, name, how), pauses=True)
    differences = [
        abs(a / b - 1)
        for result in [*paused, *(result for results in runs for result in results)]
        for a, b in zip(result.losses, by_one.losses, strict=True)
    ]
    predicted = how.predicted_peak_allocated_bytes
    once_let_go = [result.measured_peak_allocated_bytes for result in paused]
    as_it_runs = [[result.measured_peak_allocated_bytes for result in results] for results in runs]
    row = {
        "model": name,
        "settings": how.settings.describe(),
        "parallelism": parallelism,
        "predicted_peak_allocated_bytes": predicted,
        "measured_once_gloo_let_go_bytes": once_let_go,
        "measured_as_it_runs_bytes": as_it_runs,
        "error_once_gloo_let_go": _largest_error(predicted, once_let_go),
        "error_as_it_runs": _largest_error(predicted, [peak for peaks in as_it_runs for peak in peaks]),
        "one_process_measured_peak_allocated_bytes": by_one.measured_peak_allocated_bytes,
        "largest_relative_loss_difference": max(differences),
        "steps": len(by_one.losses),
    }
    print(row, flush=True)
    return row


def _largest_error(predicted: int, measured: list[int]) -> float:
    return round(max((predicted / peak - 1 for peak in measured), key=abs), 4)


def no_sync() -> dict[str, Any]:
    """Four micro-batches a step under DDP, averaged once or each time; medians, alternating."""
    how = plan("gpt", "ddp", RANKS, 2, "none")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3):
        for each in seconds:
            first, _second = on_ranks(partial(_train_averaging, how, each))
            seconds[each].append(statistics.median(step.seconds for step in first.steps[4:]))
    once, always = (statistics.median(found) for found in seconds.values())
    return {
        "settings": how.settings.describe(),
        "step_seconds": round(once, 4),
        "step_seconds_averaging_in_each_micro_batch": round(always, 4),
        "ratio": round(always / once, 3),
    }


def _train_averaging(how: bf.Plan, in_each: bool) -> Any:
    if in_each:
        parallel._Replicated.synchronising = lambda _self, _is_last: nullcontext()  # type: ignore[method-assign]
    return train("gpt", how, TIMED_STEPS)


def main() -> None:
    rows = [
        memory_and_curve(name, parallelism, reshard_after_forward, micro_batch_size, recompute)
        for name in ("gpt", "mlp")
        for parallelism, reshard_after_forward in (("ddp", None), ("fsdp2", True), ("fsdp2", False))
        for micro_batch_size, recompute in ((8, "none"), (4, "none"), (8, "all"))
    ]
    summary = {
        "largest_memory_error": max((row["error_once_gloo_let_go"] for row in rows), key=abs),
        "largest_memory_error_as_it_runs": max((row["error_as_it_runs"] for row in rows), key=abs),
        "largest_relative_loss_difference": max(row["largest_relative_loss_difference"] for row in rows),
        "no_sync": no_sync(),
    }
    print(summary)
    keep("train_ranks.json", "python benchmarks/train/ranks.py", {"summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
