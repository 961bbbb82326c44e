"""What a trainer adds to a step, against a loop written by hand and other trainers doing the same work.

    pip install lightning accelerate
    python benchmarks/train/overhead.py

The same small GPT, weights, batches, AdamW and clipping for all, on a CPU; steps of about 50 ms. All do what
a careful loop does: the gradient norm is clipped, loss and norm are read as numbers each step. Trainers write
nothing and show nothing; brimful keeps its checks (finite loss and gradients, buffers, random numbers, an
update that can be finished) in force.

A machine's speed drifts by more than is to be measured. So each trainer is in a process of its own, and they
take turns: one step each, in an order drawn anew, while the others wait. A ratio is of two steps of the same
turn; told are the median over turns, and between which 95 % of the medians lie of turns drawn from these. The
hand-written loop runs twice: by what its second row differs is noise.

The C library's heap keeps what is freed. Otherwise it gives some of it back to the system in each step or
none, as its past happens to be, and steps that page in what they had before take up to 10 % longer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

import brimful as bf
from brimful.settings import OptimizerImplementation, Settings
from brimful.trainer import Trainer
from machine import keep
from train.ranks import LENGTH, VOCABULARY, Decoder, next_token

STEPS, SKIPPED, BATCH = 400, 20, 1
RATE, NORM = 1e-3, 1.0
DRAWN = 2000
KEEPS_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""Of glibc: 32 MiB, the most it takes, and 8 GiB."""


def samples() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


class Turns:
    """A trainer's side of the turns.

    Args:
        others: The connection to who says whose turn it is.
    """

    def __init__(self, others: Connection) -> None:
        self._others = others
        self._began = 0.0

    def end(self) -> None:
        """A step is done; returns when the next may begin."""
        self._others.send(time.perf_counter() - self._began)
        self._others.recv()
        self._began = time.perf_counter()


def by_hand(tokens: Tensor, turns: Turns) -> None:
    torch.manual_seed(0)
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for indices in torch.randperm(len(tokens)).split(BATCH):
        loss = next_token(model, tokens[indices])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), NORM)
        float(loss), float(norm)
        optimizer.step()
        optimizer.zero_grad()
        turns.end()


def by_brimful(tokens: Tensor, turns: Turns) -> None:
    class Clock(bf.Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            turns.end()

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


def by_transformers(tokens: Tensor, turns: Turns) -> None:
    from transformers import Trainer as TransformersTrainer
    from transformers import TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Decoder()

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            return {"loss": next_token(self.inner, tokens)}

    class Clock(TrainerCallback):
        def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
            turns.end()

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


def by_lightning(tokens: Tensor, turns: Turns) -> None:
    import lightning

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
            turns.end()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=BATCH, shuffle=True)
    lightning.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=NORM, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader)  # fmt: skip


WAYS: dict[str, Callable[[Tensor, Turns], None]] = {
    "by hand": by_hand,
    "by hand, again": by_hand,
    "brimful": by_brimful,
    "Transformers": by_transformers,
    "Lightning": by_lightning,
}


def train(name: str, connection: Connection) -> None:
    """In a process of its own."""
    warnings.simplefilter("ignore")
    WAYS[name](samples(), Turns(connection))


def step_seconds(names: list[str]) -> dict[str, list[float]]:
    """Of each trainer, its steps turn by turn, the first ones left out."""
    found: dict[str, list[float]] = {name: [] for name in names}
    os.environ.update(KEEPS_FREED)
    order = random.Random(0)
    spawning = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        connections: dict[str, Connection] = {}
        for name in names:
            connections[name], theirs = spawning.Pipe()
            process = spawning.Process(target=train, args=(name, theirs), daemon=True)
            process.start()
            theirs.close()  # so that its end is noticed here
            stack.callback(process.kill)
            connections[name].recv()  # its first step, which none waits for
        for _turn in range(STEPS - 1):
            for name in order.sample(names, len(names)):
                connections[name].send(None)
                found[name].append(connections[name].recv())
    return {name: seconds[SKIPPED:] for name, seconds in found.items()}


def middle(ratios: list[float]) -> tuple[float, float]:
    """Between which 95 % of the medians lie of as many ratios drawn from these, with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWN))
    return medians[round(0.025 * DRAWN)], medians[round(0.975 * DRAWN)]


def main() -> None:
    found = step_seconds(list(WAYS))
    rows = []
    for name, seconds in found.items():
        ratios = [own / other for own, other in zip(seconds, found["by hand"], strict=True)]
        low, high = middle(ratios)
        rows.append(
            {
                "trainer": name,
                "step_seconds": round(statistics.median(seconds), 5),
                "over_by_hand": round(statistics.median(ratios) - 1, 4),
                "over_by_hand_95": [round(low - 1, 4), round(high - 1, 4)],
                "turns": len(seconds),
            }
        )
        print(rows[-1])
    command = "python benchmarks/train/overhead.py"
    keep("train_overhead.json", command, {"rows": rows}, "transformers", "lightning")


if __name__ == "__main__":
    main()
