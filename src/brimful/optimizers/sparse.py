"""Refuse sparse gradients, such as those of `nn.Embedding(sparse=True)`, everywhere with one message."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from brimful.errors import UsageError

SPARSE_ARGUMENT = {torch.ops.aten.embedding.default: 4, torch.ops.aten._embedding_bag.default: 5}
"""By op: position of the argument that requests a sparse gradient (native_functions.yaml, torch 2.13)."""


def check_dense_gradients(optimizer: Optimizer, model: nn.Module | None = None) -> None:
    """Raise `UsageError` if an optimizer or a model's embeddings require sparse gradients.

    `model` is None if only its parameters are known.
    """
    modules = () if model is None else model.modules()
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    if isinstance(optimizer, SparseAdam) or any(e.sparse and e.weight.requires_grad for e in embeddings):
        raise _sparse_gradients()


def check_gradients_are_dense(gradients: Iterable[Tensor]) -> None:
    """Raise `UsageError` if a gradient that backward made is sparse."""
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise _sparse_gradients()


def check_op_makes_dense_gradient(op: Any, args: tuple[Any, ...], **_others: Any) -> None:
    """Raise `UsageError` if an op is an embedding with a sparse gradient.

    Ops are checked before capture, because backward on fake tensors always makes dense gradients.
    """
    position = SPARSE_ARGUMENT.get(op, len(args))
    if position < len(args) and args[position] and args[0].requires_grad:
        raise _sparse_gradients()


def _sparse_gradients() -> UsageError:
    return UsageError(
        "sparse gradients are not supported: brimful predicts, clips and saves dense ones. Set sparse=False "
        "for embeddings, and take adamw in place of SparseAdam."
    )
