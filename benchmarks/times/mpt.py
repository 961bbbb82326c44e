"""MPT as llm-foundry's benchmark trains it, in the ops that a GPU runs.

Source: mosaicml/llm-foundry v0.3.0, llmfoundry/models/mpt, and mosaicml/composer v0.16. The published numbers
of parameters are those of learned positions, biases in every linear layer and norm, and one matrix for
embedding and logits, without ALiBi.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 50368
EXPANSION = 4


class Shape(NamedTuple):
    """What distinguishes one size from another."""

    width: int
    heads: int
    layers: int
    vocabulary: int = VOCABULARY


SHAPES = {
    "125m": Shape(768, 12, 12),
    "350m": Shape(1024, 16, 24),
    "760m": Shape(1536, 12, 24),
    "1b": Shape(2048, 16, 24),
    "3b": Shape(2560, 20, 32),
    "7b": Shape(4096, 32, 32),
    "13b": Shape(5120, 40, 40),
    "30b": Shape(7168, 56, 48),
    "70b": Shape(8192, 64, 80),
}


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Computes in autocast's type, where autocast itself takes float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Fused causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inputs = nn.Linear(shape.width, 3 * shape.width)
        self.outputs = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        parts = self.inputs(x).chunk(3, dim=2)
        query, key, value = (
            part.view(samples, tokens, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(samples, tokens, width))


class Block(nn.Module):
    """Attention and an MLP with GELU, each after a norm and beside a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = LowPrecisionLayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = LowPrecisionLayerNorm(shape.width)
        self.up = nn.Linear(shape.width, EXPANSION * shape.width)
        self.down = nn.Linear(EXPANSION * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """The language model, with the logits of the last micro-batch, which composer keeps for its metrics."""

    def __init__(self, shape: Shape, positions: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(positions, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = LowPrecisionLayerNorm(shape.width)

    def forward(self, tokens: Tensor, at_end_of_backward: Callable[[], None]) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.tokens(tokens) + self.positions(positions)
        x = _Then.apply(x, at_end_of_backward)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class FusedCrossEntropy(torch.autograd.Function):
    """The memory traffic of flash-attn's kernel: logits are read once, and once more to write their gradient.

    Source: HazyResearch/flash-attention v1.0.9, flash_attn/losses/cross_entropy.py, inplace_backward=False.
    """

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logarithms = torch.logsumexp(logits, dim=-1)
        context.save_for_backward(logits, logarithms)
        return logarithms - logits.gather(1, labels[:, None])[:, 0]

    @staticmethod
    def backward(context: Any, *_gradients: Tensor) -> tuple[Tensor, None]:
        logits, logarithms = context.saved_tensors
        return logits - logarithms[:, None], None


class _Then(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(context: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        context.call = call
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.call()
        return gradients[0], None


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss. After backward, composer's two metrics compute it again, each in float32."""
    kept: list[Tensor] = []

    def metrics() -> None:
        with torch.no_grad():
            for _ in range(2):
                F.cross_entropy(kept[0].float(), labels, reduction="sum")

    labels = tokens.roll(-1).flatten()
    logits = model(tokens, metrics).flatten(0, 1)
    kept.append(logits.detach())
    mean: Tensor = FusedCrossEntropy.apply(logits, labels).mean()  # type: ignore[no-untyped-call]
    return mean
