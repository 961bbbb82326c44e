"""A job whose functions are at the top level of a module, so that other processes can make it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf

WIDTH = 64


class Normed(nn.Module):
    """Blocks that can be recomputed; BatchNorm where it is asked for."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.GELU()) for _ in range(3))
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(x))
        return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randint(0, 4, (samples,))


def job(**changes: Any) -> bf.Job:
    return bf.Job(**{"model": Normed, "loss": loss, "batch": batch, "optimizer": "adamw", **changes})


def plain_job() -> bf.Job:
    """The job without options, as a command names it: options of the model change it after it is made."""
    return job()


def no_loop(model: nn.Module, batches: Any) -> None:
    """A loop that trains nothing, so that a step shows that it is not used."""
