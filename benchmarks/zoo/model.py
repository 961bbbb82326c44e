"""What an entry of the zoo is, and the batches and losses that several entries share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Job

# B samples, T tokens, C channels, H height, W width

VOCABULARY = 512
CLASSES = 10
IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """A small version of a real architecture, in training."""

    name: str
    family: str
    job: Callable[[], Job]
    micro_batch_size: int
    needs: str | None = None
    """A package that is no part of the dev extra; see `missing`."""


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def causal_batch(tokens: int, samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def masked_batch(tokens: int, samples: int) -> dict[str, Tensor]:
    """Every fifth token is to be predicted; the last quarter of the first sample is padding."""
    ids = torch.randint(3, VOCABULARY, (samples, tokens))
    labels = torch.full_like(ids, IGNORED_LABEL)
    labels[:, ::5] = ids[:, ::5]
    mask = torch.ones_like(ids)
    mask[0, -(tokens // 4) :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classified_text_batch(tokens: int, samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(samples) % 2}


def translation_batch(tokens: int, samples: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (samples, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, : tokens // 2].clone()}


def image_batch(size: int, samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, size, size), "y": torch.arange(samples) % CLASSES}


def pixel_batch(size: int, samples: int) -> dict[str, Tensor]:
    """Images as models of transformers name them."""
    return {"pixel_values": torch.randn(samples, 3, size, size), "labels": torch.arange(samples) % CLASSES}


def own(
    name: str,
    family: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] = classify,
    micro_batch_size: int = 8,
    needs: str | None = None,
    **job: Any,
) -> ZooModel:
    """An entry whose model is built by a function."""
    return ZooModel(
        name=name,
        family=family,
        job=lambda: Job(model=model, loss=loss, batch=batch, name=name, **job),
        micro_batch_size=micro_batch_size,
        needs=needs,
    )


def pretrained(
    name: str,
    family: str,
    model: str,
    config: str,
    batch: Callable[[int], Any],
    *,
    loss: Callable[[nn.Module, Any], Tensor] = own_loss,
    micro_batch_size: int = 4,
    **sizes: Any,
) -> ZooModel:
    """An entry from two class names of transformers and the sizes of its configuration."""
    return own(
        name,
        family,
        partial(_build, model, config, sizes),
        batch,
        loss=loss,
        micro_batch_size=micro_batch_size,
    )


def _build(model: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers  # here, as it takes seconds

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))
