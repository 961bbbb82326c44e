"""A small model of the kind that contrastive losses train: two towers and a temperature."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Data, Job

IMAGE, TEXT, WIDTH, EMBEDDING = 12, 10, 16, 6


class Tower(nn.Module):
    """(B, inputs) → (B, EMBEDDING), with dropout."""

    def __init__(self, inputs: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.Sequential(*(self.block(dropout) for _ in range(2)))
        self.last = nn.Linear(WIDTH, EMBEDDING)

    @staticmethod
    def block(dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor = self.last(self.blocks(self.first(x)))
        return embedding


class TwoTowers(nn.Module):
    """Images and texts, and a temperature that is learned."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.image, self.text = Tower(IMAGE, dropout), Tower(TEXT, dropout)
        self.temperature = nn.Parameter(torch.tensor(1.5))


def embed(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the loss needs of each sample; the temperature is of no sample."""
    return {
        "image": F.normalize(model.image(batch["image"]).float(), dim=-1),
        "text": F.normalize(model.text(batch["text"]).float(), dim=-1),
        "temperature": model.temperature.exp(),
    }


def contrast(embeddings: dict[str, Tensor]) -> Tensor:
    """As CLIP: each image against all texts, each text against all images."""
    logits = embeddings["temperature"] * embeddings["image"] @ embeddings["text"].T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def contrast_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The same as a loss that does not say how it couples the samples."""
    return contrast(embed(model, batch))


def pairs(samples: int, seed: int | None = None) -> dict[str, Tensor]:
    """Images and texts that belong together."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    image = torch.randn(samples, IMAGE, generator=generator)
    return {"image": image, "text": image[:, :TEXT] + 0.1}


def coupled_job(dropout: float = 0.1, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": lambda: TwoTowers(dropout),
        "embed": embed,
        "loss": contrast,
        "batch": pairs,
        "optimizer": "adamw",
        "data": lambda: Data(train=pairs(40, seed=2), validation=pairs(20, seed=3)),
        "name": "two towers",
    }
    return Job(**values | changes)
