"""Optimizers, and a job whose weights are most of what a step takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import brimful as bf
from brimful.optimizers import named_optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adamw foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "muon": named_optimizer("muon", learning_rate=1e-2),
    "no decay on vectors": named_optimizer("adamw", learning_rate=1e-2, weight_decay=0.1),
}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


class Deep(nn.Module):
    """So many weights that they are most of what a step takes."""

    def __init__(self, *, has_unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.unused = nn.Linear(64, 64) if has_unused else None

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        return made


def deep_job(**changes: Any) -> bf.Job:
    values: dict[str, Any] = {
        "model": Deep,
        "loss": lambda model, x: model(x).square().mean(),
        "batch": lambda n: torch.randn(n, 64),
        "optimizer": "adamw",
    }
    return bf.Job(**values | changes)
