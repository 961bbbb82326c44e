"""Jobs of the small models, and captures of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.job import Job
from brimful.options import PlanOptions
from brimful.settings import Action, Settings, UnitAction
from brimful.trace import Trace
from helpers.models import GPT, Block, ResNet, UNet, vgg

SAMPLES = 8


FASTEST = PlanOptions(effort="max", max_exceedance=1.0, offload_optimizer=False)
"""Asks for the fastest plan within a budget, however uncertain that is, with the optimizer on the device."""


def vector_job(model: Callable[[], nn.Module], *shape: int) -> Job:
    """Vectors or sequences in, the mean square of what comes out as loss."""
    return Job(
        model=model,
        loss=lambda model, batch: model(batch["x"]).float().square().mean(),
        batch=lambda n: {"x": torch.zeros(n, *shape)},
    )


def image_job(model: Callable[[], nn.Module], size: int = 16) -> Job:
    """Images in, a class out; a class per pixel if the model keeps the image's size."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["x"])
        return F.cross_entropy(logits, logits.new_zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.long))

    return Job(model=model, loss=loss, batch=lambda n: {"x": torch.zeros(n, 3, size, size)})


def language_job(model: Callable[[], nn.Module], length: int = 32) -> Job:
    """Tokens in, the next token out."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["x"].flatten())

    return Job(model=model, loss=loss, batch=lambda n: {"x": torch.zeros(n, length, dtype=torch.long)})


class PostNormBlock(Block):
    """As in BERT: what a block hands on is not always saved by the next one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Post(GPT):
    """A GPT of post-norm blocks."""

    def __init__(self) -> None:
        super().__init__(layers=5, width=32)
        self.blocks = nn.ModuleList(PostNormBlock(32) for _ in range(5))


class Branch(nn.Module):
    """Three ways from one input, joined again."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(c, c // 2, 1), nn.BatchNorm2d(c // 2), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(c, c // 4, 1), nn.ReLU(), nn.Conv2d(c // 4, c // 4, 3, padding=1))
        self.three = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(c, c // 4, 1), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(x), self.two(x), self.three(x)], dim=1)


class Inception(nn.Module):
    """Four modules of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.a, self.b, self.c, self.d = (Branch(16) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.d(self.c(self.b(self.a(self.stem(x))))).mean((2, 3)))


class Returning(nn.Module):
    """Blocks of which one runs three times, the others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (Block(32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.three(self.one(self.two(self.one(x)))))


JOBS = {
    "gpt": language_job(lambda: GPT(layers=5, width=32)),
    "post-norm": language_job(Post),
    "resnet": image_job(ResNet),
    "unet": image_job(UNet),
    "vgg": image_job(vgg),
    "inception": image_job(Inception),
    "returning": vector_job(Returning, 16, 32),
}


@cache
def capture(name: str, settings: Settings, device: str = "cpu") -> Trace:
    """One step of a job above."""
    return capture_step(JOBS[name], settings, find_device(device), steps=1)


def kept(job: Job) -> Trace:
    """One step of any job with everything kept."""
    return capture_step(job, Settings(micro_batch_size=SAMPLES), find_device("cpu"), steps=1)


def with_action(settings: Settings, units: tuple[str, ...], action: Action) -> Settings:
    """Settings with one action for all units."""
    return replace(settings, units=tuple(UnitAction(fqn=unit, action=action) for unit in units))
