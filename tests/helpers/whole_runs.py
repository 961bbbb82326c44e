"""A whole run, small and with everything in it: where memory runs out at one op, and what is left then."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from brimful.job import Data, Job
from brimful.settings import Settings
from brimful.trainer import Schedule, Trainer

# B batch, D width

WIDTH, CLASSES, SAMPLES, GLOBAL_BATCH = 4, 3, 8, 4


class Noisy(Dataset[dict[str, Tensor]]):
    """Augmentation that draws from all generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = random.random() + float(np.random.rand())
        x = torch.linspace(-1, 1, WIDTH) * (index + 1) + noise + 0.1 * torch.randn(WIDTH)
        return {"x": x, "y": torch.tensor(index % CLASSES)}


class Net(nn.Module):
    """Statistics and masks, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.last(self.norm(self.first(x)))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def make_job() -> Job:
    def data() -> Data:
        train, validation = (DataLoader(Noisy(), batch_size=GLOBAL_BATCH, shuffle=True) for _ in range(2))
        return Data(train=train, validation=validation)

    return Job(
        name="noisy",
        model=Net,
        loss=loss,
        batch={"x": torch.zeros(2, WIDTH), "y": torch.zeros(2, dtype=torch.long)},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
        data=data,
        metrics=lambda model, batch: {"hits": (model(batch["x"]).argmax(-1) == batch["y"]).float().mean()},
    )


def fit(
    run_dir: Path, *, resume: bool = False, around: AbstractContextManager[Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Everything that a run of two epochs of two steps leaves behind.

    Args:
        run_dir: Its own.
        resume: Resume what is there.
        around: Entered before the run begins, and left after its end.
        **options: For `Trainer`, instead of those here.

    Returns:
        Losses, validations and tensors by name.
    """
    how = Settings(micro_batch_size=GLOBAL_BATCH // 2, gradient_accumulation_steps=2)
    asked: dict[str, Any] = {
        "epochs": 2,
        "save_every": 1,
        "ema_decay": 0.5,
        "max_gradient_norm": 0.5,
        "schedule": Schedule("cosine"),
        "show_progress": False,
        "device": "cpu",
        "seed": 3,
    }
    job = make_job()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(job, how, run_dir=run_dir, resume=resume, **asked | options)
        with around or nullcontext():
            result = trainer.fit()
    files = ("weights", "best", "average")
    return {
        "steps": [(record.step, record.epoch, record.loss, record.gradient_norm) for record in result.steps],
        "validations": [(record.step, record.loss, record.metrics["hits"]) for record in result.validations],
        "stopped": str(result.stopped_because),
        "model": dict(trainer.model.state_dict()),
        "optimizer": trainer.optimizer.state_dict(),
        **{name: load_file(run_dir / f"{name}.safetensors") for name in files},
    }


@contextmanager
def quick() -> Iterator[None]:
    """One thread is enough for tiny ops; garbage is looked for among new objects only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(before)
