"""Losses and loaders of trainers with which a divided batch would train otherwise.

In-batch negatives are the first example: the loss compares each sample with the others of its micro-batch. So
the plan keeps the micro-batch that the trainer's arguments say.

Checked with trl 1.16 and sentence-transformers 6.2.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import Trainer

from brimful.integrations.transformers.kinds import is_of_sentence_transformers, is_of_trl

_MEANS = ("CosineSimilarityLoss", "ContrastiveLoss", "MarginMSELoss", "SoftmaxLoss", "TripletLoss")
"""Losses of sentence-transformers that are means over the samples of a batch, if what computes them is.

A test compares each with the mean of its parts, tests/integrations/test_sentence_transformers.py."""
_OF_ONE_LOSS = ("MatryoshkaLoss",)
"""Losses that are sums of another one, of embeddings cut to several sizes."""
_COUPLED_PREFERENCES = ("aot", "aot_unpaired", "bco_pair", "sft")
"""Losses of `DPOConfig` that sort the samples of a batch, compare them with a mean, or average over tokens."""


def why_not_divided(trainer: Trainer) -> str | None:
    """Why a plan keeps a trainer's micro-batch as it is, and the way out; None if it may be divided."""
    if is_of_sentence_transformers(trainer):
        return next(_of_losses(trainer), None) or _of_loader(trainer)
    if is_of_trl(trainer):
        return _of_trl(trainer)
    return None


def _of_trl(trainer: Trainer) -> str | None:
    kinds = [kind for kind in getattr(trainer, "loss_types", ()) if kind in _COUPLED_PREFERENCES]
    if kinds:
        return f"loss_type={kinds[0]!r} is not a mean over the samples of a batch."
    if getattr(trainer, "aux_loss_enabled", False):
        return (
            "the load-balancing loss of the experts is of all samples of a batch. router_aux_loss_coef=0 "
            "omits it."
        )
    if getattr(trainer, "_is_vision_dataset", False):
        return "its batches have images, whose rows are not those of samples."
    return None


def _of_losses(trainer: Any) -> Iterator[str]:
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    own = {id(module) for module in trainer.model.modules()}
    for loss in losses:
        while type(loss).__name__ in _OF_ONE_LOSS and _is_of_the_library(loss):
            loss = loss.loss
        name = type(loss).__name__
        if name not in _MEANS or not _is_of_the_library(loss):
            compares = "compares" if _is_of_the_library(loss) else "may compare"
            yield f"{name} {compares} samples of a batch, or is not a mean over them.{_way_out(loss)}"
        elif not getattr(loss, "size_average", True):
            yield f"{name}(size_average=False) is a sum over the samples of a batch."
        else:
            parts = (part for part in loss.modules() if id(part) not in own)
            others = [part for part in parts if not _averages(part)]
            if others:
                yield f"{name} computes with {others[0]}, which is not a mean over the samples of a batch."


def _averages(part: nn.Module) -> bool:
    """Whether a part of a loss module is a mean over samples with equal weights, or not a loss of torch."""
    reduction = getattr(part, "reduction", None)
    return reduction is None or (reduction == "mean" and getattr(part, "weight", None) is None)


def _way_out(loss: Any) -> str:
    if getattr(loss, "uses_gradient_cache", False):
        return (
            " Its own mini_batch_size divides the batch without changing the loss: set it smaller for less "
            "memory."
        )
    package = type(loss).__module__.rpartition(".")[0]
    cached = f"Cached{type(loss).__name__}"
    if _is_of_the_library(loss) and hasattr(importlib.import_module(package), cached):
        return f" {cached}(model, mini_batch_size=…) computes the same loss in less memory."
    return ""


def _is_of_the_library(loss: Any) -> bool:
    return type(loss).__module__.partition(".")[0] == "sentence_transformers"


def _of_loader(trainer: Any) -> str | None:
    """Why a smaller batch would have other samples together, if the loader groups them; else None."""
    if isinstance(trainer.train_dataset, dict):
        return "each batch is of one of several datasets, so smaller batches mix them in another way."
    sampler = getattr(trainer.args, "batch_sampler", None)
    name = str(getattr(sampler, "value", sampler))
    if name != "batch_sampler":
        return f"the batch sampler ({name}) puts other samples together if the batch is smaller."
    return None
