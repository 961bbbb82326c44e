"""Small models, each with something that recomputation could get wrong."""

# B batch, T sequence, D width, C channels, H × W image

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention with dropout, (B, T, D)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        p = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True, dropout_p=p)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder whose embedding and head share their weight."""

    def __init__(self, layers: int = 4, width: int = 16, vocabulary: int = 40, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with batch norm; ReLU and the residual sum work in place."""

    def __init__(self, channels: int, out_channels: int | None = None, stride: int = 1) -> None:
        super().__init__()
        out = out_channels or channels
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or out != channels:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Stem, three stages, head."""

    def __init__(self, channels: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        widths = (channels, 2 * channels, 4 * channels)
        before = (channels, *widths)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                Residual(before[i], width, stride=2 if i else 1),
                *(Residual(width) for _ in range(blocks - 1)),
            )
            for i, width in enumerate(widths)
        )
        self.head = nn.Linear(4 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.head(x.mean((2, 3)))


def double_convolution(channels: int, out_channels: int) -> nn.Sequential:
    """(B, C, H, W) → (B, C', H, W)."""
    layers: list[nn.Module] = []
    for i, o in ((channels, out_channels), (out_channels, out_channels)):
        layers += [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three levels with skips."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        c = channels
        self.down1, self.down2, self.bottom = (
            double_convolution(3, c),
            double_convolution(c, 2 * c),
            double_convolution(2 * c, 4 * c),
        )
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), nn.ConvTranspose2d(2 * c, c, 2, 2)
        self.merge2, self.merge1 = double_convolution(4 * c, 2 * c), double_convolution(2 * c, c)
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        x = self.bottom(self.pool(two))
        x = self.merge2(torch.cat([self.up2(x), two], dim=1))
        x = self.merge1(torch.cat([self.up1(x), one], dim=1))
        return self.head(x)


def vgg(channels: int = 8) -> nn.Sequential:
    """A Sequential of Sequentials of leaves, for images of 16 × 16."""
    c = channels
    features = nn.Sequential(
        *(nn.Conv2d(3, c, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    )
    classifier = nn.Sequential(
        nn.Flatten(), nn.Linear(2 * c * 16, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, 10)
    )
    return nn.Sequential(features, classifier)
