"""Tiny jobs that train in milliseconds."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Data, Job
from brimful.results import StepRecord
from brimful.settings import Action, Settings, UnitAction
from brimful.trainer import Callback, Trainer

SAMPLES = 50
FEATURES = 8
CLASSES = 3


class Net(nn.Module):
    """Blocks to recompute, dropout to repeat, no BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(2)))
        self.head = nn.Linear(FEATURES, CLASSES)

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


class StopAfter(Callback):
    """Ends a run as a user would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, record: StepRecord) -> None:
        if record.step == self.step:
            trainer.stop()


RECOMPUTE = tuple(UnitAction(fqn=f"blocks.{i}", action=Action.RECOMPUTE) for i in range(2))


def all_samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return {"x": x, "y": x[:, :CLASSES].argmax(1)}


def make_job(**changes: Any) -> Job:
    samples = all_samples()
    values: dict[str, Any] = {
        "model": Net,
        "loss": lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        "batch": samples,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "data": lambda: Data(train=samples),
        "name": "tiny",
    }
    return Job(**values | changes)


def train(job: Job, micro_batch_size: int = 16, accumulation: int = 1, **options: Any) -> tuple[Trainer, Any]:
    """A trainer after `fit`, and its result."""
    units = options.pop("units", ())
    settings = Settings(
        micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation, units=units
    )
    trainer = Trainer(job, settings, device="cpu", **{"show_progress": False} | options)
    return trainer, trainer.fit()


@pytest.fixture
def recompute() -> tuple[UnitAction, ...]:
    return RECOMPUTE


@pytest.fixture
def samples() -> dict[str, Tensor]:
    return all_samples()


@pytest.fixture
def job_with() -> Callable[..., Job]:
    return make_job


@pytest.fixture
def trained() -> Callable[..., tuple[Trainer, Any]]:
    return train


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny ops gain nothing from threads; one also keeps sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
