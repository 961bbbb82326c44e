"""What every rank is to do alike, done on one of them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.errors import EquivalenceError, NonFiniteError
from brimful.job import Data, Job
from brimful.results import TrainingResult
from brimful.settings import Action, Parallelism, Settings, UnitAction
from brimful.trainer import Trainer

NAN_STEP = 3


class Counting(nn.Linear):
    """Its forward depends on how often it was called, so recomputing it gives something else."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Net(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), *layers)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"])[:, 0], batch["x"].sum(1))


def batches(*, nan: bool = False) -> list[dict[str, Tensor]]:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    if nan:
        x[8 * (NAN_STEP - 1) + 7] = float("nan")  # a sample of the second rank
    return [{"x": part} for part in x.split(8)]


def fitted(
    parallelism: str,
    *layers: nn.Module,
    nan: bool = False,
    validates: bool = False,
    rate: float = 1e-2,
    recomputed: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Trainer, TrainingResult]:
    job = Job(
        name="net",
        model=lambda: Net(*layers),
        loss=loss,
        batch=batches()[0],
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0),
        data=lambda: Data(train=batches(nan=nan), validation=batches() if validates else None),
    )
    how = Settings(
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        world_size=2,
        parallelism=Parallelism(parallelism),
        units=tuple(UnitAction(fqn=fqn, action=Action.RECOMPUTE) for fqn in recomputed),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(job, how, device="cpu", show_progress=False, **options)
        return trainer, trainer.fit()


def not_a_number(parallelism: str, folder: str) -> str:
    """The error of a run with a NaN in one rank's share of its third batch."""
    with pytest.raises(NonFiniteError) as told:
        fitted(parallelism, nan=True, run_dir=Path(folder) / parallelism)
    return str(told.value)


def refused_certificate(parallelism: str) -> str:
    with pytest.raises(EquivalenceError) as told:
        fitted(parallelism, Counting(8, 8), recomputed=("layers.1",))
    return str(told.value)


def done_alike(folder: str) -> dict[str, dict[str, Any]]:
    """What happened on this rank, by parallelism."""
    return {name: done_alike_by(name, folder) for name in ("ddp", "fsdp2")}


def done_alike_by(parallelism: str, folder: str) -> dict[str, Any]:
    _trainer, certified = fitted(parallelism, nn.Tanh(), recomputed=("layers",), steps=2)
    _trainer, patient = fitted(parallelism, validates=True, rate=0.0, epochs=9, patience=2)
    trainer, normed = fitted(parallelism, nn.BatchNorm1d(8), steps=4)
    return {
        "nan": not_a_number(parallelism, folder),
        "refused": refused_certificate(parallelism),
        "certified": certified.certificate is not None and certified.certificate.holds,
        "losses": normed.losses,
        "buffers": [buffer.clone() for buffer in trainer.model.buffers()],
        "patient": (patient.stopped_because, len(patient.validations)),
    }
