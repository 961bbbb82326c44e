"""Blocks that several jobs are made of."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B samples, T tokens, D width


class Block(nn.Module):
    """A transformer's block, (B, T, D) → (B, T, D)."""

    def __init__(self, width: int, heads: int = 4, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """Images (B, 3, 32, 32) → features (B, D) or, with classes, logits."""

    def __init__(
        self, width: int = 64, depth: int = 3, classes: int | None = 10, patch: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (32 // patch) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Identity() if classes is None else nn.Linear(width, classes)

    def tokens(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.tokens(images).mean(1))


class TinyGPT(nn.Module):
    """Token ids (B, T) → logits (B, T, V); input and output share their embedding."""

    def __init__(
        self, vocabulary: int = 256, width: int = 64, depth: int = 3, length: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal=True, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def conv(a: int, b: int, stride: int = 1, norm: str = "group") -> nn.Sequential:
    """Convolution, norm, SiLU."""
    normed = {"group": lambda: nn.GroupNorm(4, b), "batch": lambda: nn.BatchNorm2d(b), "none": nn.Identity}
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), normed[norm](), nn.SiLU())


def convnet(classes: int = 10, norm: str = "group", width: int = 16) -> nn.Sequential:
    """Images (B, 3, 32, 32) → logits."""
    return nn.Sequential(
        conv(3, width, norm=norm),
        conv(width, width, norm=norm),
        conv(width, 2 * width, stride=2, norm=norm),
        conv(2 * width, 2 * width, norm=norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, classes),
    )


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class TinyUNet(nn.Module):
    """Images (B, C, 16, 16) and times (B,) → images, as in diffusion."""

    def __init__(self, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 2 * width), nn.SiLU(), nn.Linear(2 * width, 2 * width))
        self.enter = conv(channels, width)
        self.down = conv(width, 2 * width, stride=2)
        self.middle = nn.Sequential(conv(2 * width, 2 * width), conv(2 * width, 2 * width))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Sequential(conv(2 * width, width), nn.Conv2d(width, channels, 1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = self.enter(x)
        y = self.down(skip) + self.time(t[:, None].float())[:, :, None, None]
        return self.leave(torch.cat([skip, self.up(self.middle(y))], 1))


def images(n: int, size: int = 32) -> dict[str, Tensor]:
    """Images and their classes."""
    return {"x": torch.randn(n, 3, size, size), "y": torch.randint(0, 10, (n,))}


def vectors(n: int, width: int = 64) -> dict[str, Tensor]:
    """Vectors and their classes."""
    return {"x": torch.randn(n, width), "y": torch.randint(0, 10, (n,))}


def texts(n: int, length: int = 64, vocabulary: int = 256) -> dict[str, Tensor]:
    """Token ids and what comes after each."""
    ids = torch.randint(0, vocabulary, (n, length + 1))
    return {"x": ids[:, :-1].clone(), "y": ids[:, 1:].clone()}


def classify(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of `model(x)` and `y`."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each token's successor."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
