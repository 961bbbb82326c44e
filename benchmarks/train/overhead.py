"""What a trainer adds to a step, against a loop written by hand and other trainers doing the same work.

    pip install lightning
    python benchmarks/train/overhead.py

The same small GPT, weights, batches, AdamW and clipping for all, on a CPU; steps of about 50 ms. All do what
a careful loop does: the gradient norm is clipped, loss and norm are read as numbers each step. Each way
trains once in a round, the order is turned from round to round, and ratios to the hand-written loop are taken
within a round; the median of rounds is told. Trainers write nothing and show nothing; brimful keeps its
checks (finite loss and gradients, buffers, random numbers, an update that can be finished) in force.
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import brimful as bf
from brimful.settings import OptimizerImplementation, Settings
from brimful.train import Trainer
from machine import keep
from train.ranks import LENGTH, VOCABULARY, Decoder, next_token

STEPS, SKIPPED, ROUNDS, BATCH = 80, 10, 9, 3
RATE, NORM = 1e-3, 1.0


def samples() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def by_hand(tokens: Tensor) -> list[float]:
    """Seconds at which steps began."""
    torch.manual_seed(0)
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    times, order = [], torch.randperm(len(tokens))
    for indices in order.split(BATCH):
        times.append(time.perf_counter())
        loss = next_token(model, tokens[indices])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        float(loss), float(norm)
        optimizer.step()
        optimizer.zero_grad()
    return times


def by_brimful(tokens: Tensor) -> list[float]:
    times: list[float] = []

    class Clock(bf.Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            times.append(time.perf_counter())

    job = bf.Job(
        name="gpt",
        model=Decoder,
        loss=next_token,
        batch=tokens,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        data=lambda: bf.Data(train=tokens),
    )
    settings = Settings(micro_batch_size=BATCH, optimizer_implementation=OptimizerImplementation.FOR_LOOP)
    Trainer(job, settings, device="cpu", max_gradient_norm=NORM, callbacks=[Clock()], show_progress=False).fit()
    return times


def by_transformers(tokens: Tensor) -> list[float]:
    from transformers import Trainer as TransformersTrainer
    from transformers import TrainerCallback, TrainingArguments

    times: list[float] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decoder()

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": next_token(self.inner, tokens)}

    class Clock(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
            times.append(time.perf_counter())

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=RATE,
            max_grad_norm=NORM, lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.01,
            use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
            dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"tokens": row} for row in tokens]
        trainer = TransformersTrainer(model=Model(), args=arguments, train_dataset=data, callbacks=[Clock()])
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    return times


def by_lightning(tokens: Tensor) -> list[float]:
    import lightning

    times: list[float] = []
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decoder()

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            loss = next_token(self.inner, batch[0])
            float(loss)
            return loss

        def on_train_batch_end(self, *_arguments: Any) -> None:
            times.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH, shuffle=True)
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=NORM, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader)  # fmt: skip
    return times


WAYS: dict[str, Callable[[Tensor], list[float]]] = {
    "by hand": by_hand,
    "brimful": by_brimful,
    "Transformers": by_transformers,
    "Lightning": by_lightning,
}


def step_seconds(times: list[float]) -> float:
    steady = times[SKIPPED:]
    return statistics.median(b - a for a, b in pairwise(steady))


def main() -> None:
    warnings.simplefilter("ignore")
    tokens, names = samples(), list(WAYS)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(step_seconds(WAYS[name](tokens)))
        print({name: round(seconds[-1] * 1e3, 2) for name, seconds in found.items()}, flush=True)
    rows = [
        {
            "trainer": name,
            "step_seconds": round(statistics.median(seconds), 5),
            "over_by_hand": round(
                statistics.median(a / b for a, b in zip(seconds, found["by hand"], strict=True)) - 1, 4
            ),
            "step_seconds_in_each_round": [round(each, 5) for each in seconds],
        }
        for name, seconds in found.items()
    ]
    print(rows)
    command = "python benchmarks/train/overhead.py"
    keep("train_overhead.json", command, {"rows": rows}, "transformers", "lightning")


if __name__ == "__main__":
    main()
