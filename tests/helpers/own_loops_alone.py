"""The loops of docs/howto/own-loop.md without brimful, on whole batches and in one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from helpers.own_loops import in_folder


def losses_alone(folder: Path, name: str) -> list[float]:
    """What `own_loops.run` finds as losses, of the same loop without brimful.

    Args:
        folder: Has the shared files.
        name: Of the script; of one for ranks, the mean over the ranks.

    Returns:
        The losses.
    """
    with in_folder(folder):
        if name == "train_gan":
            return _adversarial(importlib.import_module("gan"))
        job = importlib.import_module("job")
        if name == "lbfgs":
            return _lbfgs(job)
        batches = list(job.batches(1024))
        if name in ("ddp", "fsdp2"):
            ranks = [list(job.batches(512, rank)) for rank in range(2)]
            batches = [tuple(map(torch.cat, zip(*both, strict=True))) for both in zip(*ranks, strict=True)]
        return _trained(job, batches)


def _trained(job: ModuleType, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    model = job.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return [_step(model, optimizer, job.loss_of, batch) for batch in batches]


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor], batch: Any
) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _lbfgs(job: ModuleType) -> list[float]:
    model = job.network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=4)
    losses = []
    for batch in job.batches(1024):

        def closure(batch: Any = batch) -> Tensor:
            optimizer.zero_grad()
            loss = job.loss_of(model, batch)
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    return losses


def _adversarial(gan: ModuleType) -> list[float]:
    pairs = [(gan.critic, gan.critic_loss), (gan.generator, gan.generator_loss)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model, _loss in pairs]
    losses: list[float] = []
    for batch in gan.batches(1024):
        losses = [
            _step(model, optimizer, loss_of, batch)
            for (model, loss_of), optimizer in zip(pairs, optimizers, strict=True)
        ]
    return losses
