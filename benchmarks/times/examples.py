"""Models of NVIDIA's DeepLearningExamples as their scripts train them, in the ops that a GPU runs.

Source: NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets (ResNet-50 v1.5), PyTorch/LanguageModeling/
BERT (modeling.py, run_squad.py) and PyTorch/LanguageModeling/Transformer-XL (mem_transformer.py, train.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


class BertShape(NamedTuple):
    """What distinguishes one size of BERT from another."""

    width: int
    heads: int
    layers: int
    vocabulary: int = 30522
    tokens: int = 384


class TransformerXlShape(NamedTuple):
    """What distinguishes one size of Transformer-XL from another."""

    width: int
    heads: int
    layers: int
    inner: int
    dropout: float
    attention_dropout: float
    tokens: int
    """Of a sample, and of the memory before it."""
    vocabulary: int = 267735


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a residual; the second one strides."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2, self.norm3 = (nn.BatchNorm2d(each) for each in (width, width, outputs))
        self.beside = None
        if stride > 1 or inputs != outputs:
            self.beside = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = F.relu(self.norm2(self.conv2(out)), inplace=True)
        out = self.norm3(self.conv3(out))
        out += x if self.beside is None else self.beside(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """ResNet v1.5 for images of 224 × 224."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        layers, inputs = [], 64
        for stage, count in enumerate(blocks):
            for index in range(count):
                layers.append(Bottleneck(inputs, 64 << stage, 2 if stage and not index else 1))
                inputs = 256 << stage
        self.layers = nn.Sequential(*layers)
        self.classes = nn.Linear(inputs, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.conv(images)), inplace=True))
        return self.classes(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


class BertLayer(nn.Module):
    """Attention whose scores are kept, and an MLP with GELU by tanh; tokens are the first dimension."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(shape.width, shape.width) for _ in range(4))
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.norm_1, self.norm_2 = (nn.LayerNorm(shape.width, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        tokens, samples, width = x.shape
        query, key, value = (
            part(x).view(tokens, samples * self.heads, width // self.heads).transpose(0, 1)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.bmm(query, key.transpose(1, 2)).view(samples, self.heads, tokens, tokens)
        scores = scores / math.sqrt(width // self.heads) + mask
        weights = F.dropout(F.softmax(scores, dim=-1), 0.1).view(-1, tokens, tokens)
        mixed = torch.bmm(weights, value).transpose(0, 1).contiguous().view(tokens, samples, width)
        x = self.norm_1(F.dropout(self.mixed(mixed), 0.1) + x)
        return self.norm_2(F.dropout(self.down(F.gelu(self.up(x), approximate="tanh")), 0.1) + x)


class BertForQuestions(nn.Module):
    """BERT that finds the first and the last token of an answer."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(512, shape.width)
        self.kinds = nn.Embedding(2, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(shape) for _ in range(shape.layers))
        self.ends = nn.Linear(shape.width, 2)

    def forward(self, tokens: Tensor, kinds: Tensor, is_text: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.words(tokens) + self.positions(positions) + self.kinds(kinds)
        x = F.dropout(self.norm(x), 0.1).transpose(0, 1)
        mask = (1 - is_text[:, None, None].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return self.ends(x.transpose(0, 1).contiguous())


def bert_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy of both ends."""
    logits = model(batch["tokens"], batch["kinds"], batch["is_text"])
    losses = (
        F.cross_entropy(each.squeeze(-1), batch[end])
        for each, end in zip(logits.split(1, dim=-1), ("first", "last"), strict=True)
    )
    return sum(losses, start=torch.zeros((), device=logits.device)) / 2


class TransformerXlLayer(nn.Module):
    """Relative attention over memory and tokens, and an MLP; tokens are the first dimension."""

    def __init__(self, shape: TransformerXlShape) -> None:
        super().__init__()
        self.shape, self.head = shape, shape.width // shape.heads
        self.inputs = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.distances = nn.Linear(shape.width, shape.width, bias=False)
        self.outputs = nn.Linear(shape.width, shape.width, bias=False)
        self.up, self.down = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)

    def forward(
        self, x: Tensor, memory: Tensor, positions: Tensor, biases: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        (queries, samples, width), heads, dropout = x.shape, self.shape.heads, self.shape.dropout
        parts = self.inputs(torch.cat([memory, x])).chunk(3, dim=-1)
        query, key, value = (part.view(-1, samples, heads, self.head) for part in parts)
        query = query[-queries:]
        distances = self.distances(positions).view(-1, heads, self.head)
        by_content = torch.einsum("ibnd,jbnd->bnij", query + biases[0], key)
        by_distance = _shifted(torch.einsum("ibnd,jnd->bnij", query + biases[1], distances))
        scores = (by_content + by_distance) * (1 / math.sqrt(self.head))
        scores.masked_fill_(mask, -float("inf"))
        weights = F.dropout(F.softmax(scores, dim=3), self.shape.attention_dropout)
        mixed = torch.einsum("bnij,jbnd->ibnd", weights, value).contiguous().view(queries, samples, width)
        x = self.norm_1(x + F.dropout(self.outputs(mixed), dropout))
        inner = F.dropout(F.relu(self.up(x), inplace=True), dropout)
        return self.norm_2(x + F.dropout(self.down(inner), dropout))


def _shifted(scores: Tensor) -> Tensor:
    """Scores by distance, moved to the keys at that distance."""
    samples, heads, queries, keys = scores.shape
    padded = torch.cat([scores.new_zeros(samples, heads, queries, 1), scores], dim=3)
    return padded.view(samples, heads, keys + 1, queries).narrow(2, 1, keys).view_as(scores)


class TransformerXl(nn.Module):
    """The language model with a softmax over all words, which the scripts take without `--adaptive`."""

    def __init__(self, shape: TransformerXlShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.word_biases = nn.Parameter(torch.zeros(shape.vocabulary))
        head = shape.width // shape.heads
        self.biases = nn.ParameterList(torch.zeros(shape.heads, head) for _ in range(2))
        self.layers = nn.ModuleList(TransformerXlLayer(shape) for _ in range(shape.layers))

    def forward(self, tokens: Tensor, memories: Tensor) -> Tensor:
        dropout, width = self.shape.dropout, self.shape.width
        x = F.dropout(self.words(tokens).mul_(math.sqrt(width)), dropout)
        keys = memories.shape[1] + len(tokens)
        mask = torch.triu(x.new_ones(len(tokens), keys), diagonal=1 + memories.shape[1]).bool()[None, None]
        frequencies = 1 / 10000 ** (torch.arange(0, width, 2, device=x.device) / width)
        angles = torch.outer(torch.arange(keys - 1, -1, -1, device=x.device), frequencies)
        positions = torch.cat([angles.sin(), angles.cos()], dim=-1)[:, None].to(x.dtype)
        positions = F.dropout(positions, dropout)
        kept = []
        for layer, memory in zip(self.layers, memories, strict=True):
            kept.append(x.detach())
            x = layer(x, memory, positions, tuple(self.biases), mask)
        torch.stack(kept)  # the memory of the next step
        return F.linear(F.dropout(x, dropout).flatten(0, 1), self.words.weight, self.word_biases)


def transformer_xl_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean cross-entropy, in the type of the logits until the mean."""
    logits = model(batch["tokens"].T.contiguous(), batch["memories"].permute(1, 2, 0, 3))
    labels = batch["labels"].T.flatten()
    return -F.log_softmax(logits, dim=-1).gather(1, labels[:, None]).squeeze(1).float().mean()


class MasterAdam(Optimizer):
    """Adam on float32 copies of half-precision parameters, as apex does with `opt_level="O2"`."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the copies in one kernel, then the parameters."""
        parameters = [each for each in self.param_groups[0]["params"] if each.grad is not None]
        for each in parameters:
            if not self.state[each]:
                master = each.detach().float()
                self.state[each] = {
                    "step": torch.zeros((), device=each.device),
                    "master": master,
                    "mean": torch.zeros_like(master),
                    "square": torch.zeros_like(master),
                }
        states = [self.state[each] for each in parameters]
        master, mean, square, steps = (
            [state[name] for state in states] for name in ("master", "mean", "square", "step")
        )
        gradients = [each.grad.float() for each in parameters]
        torch._fused_adamw_(
            master, gradients, mean, square, [], steps,
            lr=1e-4, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_(parameters, master)
