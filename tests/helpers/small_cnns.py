"""Small convolutional networks with BatchNorm, for memory formats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.job import Batch, Data, Job
from brimful.settings import MemoryFormat, Settings
from brimful.trainer import Trainer

CHANNELS, CLASSES, SIZE, SAMPLES = 3, 5, 12, 48


class Images(nn.Module):
    """2-d convolutions of several kinds: of few channels, strided, 1 × 1, depthwise, transposed."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(dropout)),
            nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.Conv2d(32, 48, 1), nn.SiLU()),
            nn.Sequential(nn.ConvTranspose2d(48, 16, 2, 2), nn.GroupNorm(4, 16), nn.ReLU()),
        )
        self.shift = nn.Parameter(torch.zeros(1, 16, SIZE, SIZE))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.max_pool2d(self.norm(self.stem(x)), 3, 1, 1)) + self.shift
        found: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return found


class Volumes(nn.Module):
    """3-d convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(CHANNELS, 16, 3, padding=1),
            nn.BatchNorm3d(16),
            nn.Tanh(),
            nn.Conv3d(16, CLASSES, 3, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x).mean((2, 3, 4))
        return found


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batch(samples: int, *, dims: int = 2, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, CHANNELS, *[SIZE] * dims, generator=generator).to(dtype)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def job(model: Any = Images, *, dims: int = 2, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": model,
        "loss": loss,
        "batch": lambda n: batch(n, dims=dims),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "data": lambda: Data(train=batch(SAMPLES)),
        "name": "small cnn",
    }
    return Job(**values | changes)


def losses_of(memory_format: MemoryFormat | None, **how: Any) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step of a run, and its weights."""
    settings = Settings(micro_batch_size=8, gradient_accumulation_steps=1, memory_format=memory_format, **how)
    trainer = Trainer(job(), settings, steps=4, device="cpu", show_progress=False, verify=False)
    found = trainer.fit().losses
    return list(found), {name: value.clone() for name, value in trainer.model.state_dict().items()}


def planned(settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> bf.execution.PlannedStep:
    return bf.apply(settings, job(), model, optimizer, verify=False)
