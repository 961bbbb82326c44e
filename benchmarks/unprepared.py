"""Models that nobody prepared for: written by users who followed the documentation, kept as they wrote them.

Nothing is fitted or tuned on them. `step_time.py --unprepared` times them on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful import Job

MELS, VOCABULARY, FRAMES, CHARACTERS = 40, 32, 320, 40
LEADS, SAMPLES, FINDINGS = 12, 1000, 26


class Recogniser(nn.Module):
    """Speech: two convolutions, a bidirectional GRU, characters for CTC."""

    def __init__(self, width: int = 192, layers: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, width, 5, stride=2, padding=2)
        self.conv2 = nn.Conv1d(width, width, 5, stride=2, padding=2)
        self.norm = nn.LayerNorm(width)
        self.gru = nn.GRU(width, width, layers, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(2 * width, VOCABULARY)

    def forward(self, mel: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T / 4, V) of spectra (B, T, MELS), and their lengths."""
        x = F.relu(self.conv2(F.relu(self.conv1(mel.transpose(1, 2))))).transpose(1, 2)
        lengths = ((lengths + 1) // 2 + 1) // 2
        x = self.norm(x)
        mask = torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]
        x, _ = self.gru(x * mask[..., None])
        return self.head(x).log_softmax(-1), lengths


def speech() -> Job:
    """CTC on utterances of the full length."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_probabilities, lengths = model(batch["mel"], batch["mel_lengths"])
        return F.ctc_loss(
            log_probabilities.transpose(0, 1),
            batch["text"],
            lengths,
            batch["text_lengths"],
            zero_infinity=True,
        )

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "mel": torch.randn(n, FRAMES, MELS),
            "mel_lengths": torch.full((n,), FRAMES),
            "text": torch.randint(1, VOCABULARY, (n, CHARACTERS)),
            "text_lengths": torch.full((n,), CHARACTERS),
        }

    return Job(model=Recogniser, loss=loss, batch=batch, optimizer="adamw", name="speech")


class Block(nn.Module):
    """A dilated depthwise convolution and a gated pointwise one."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.depth = nn.Conv1d(channels, channels, 7, padding=3 * dilation, dilation=dilation, groups=channels)
        self.norm = nn.GroupNorm(8, channels)
        self.wide = nn.Conv1d(channels, 4 * channels, 1)
        self.narrow = nn.Conv1d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, T) of (B, C, T)."""
        a, b = self.wide(self.norm(self.depth(x))).chunk(2, 1)
        added: Tensor = x + self.narrow(a * F.silu(b))
        return added


class Electrocardiogram(nn.Module):
    """Findings from twelve leads: dilated convolutions, pooled by attention."""

    def __init__(self, channels: int = 128, layers: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv1d(LEADS, channels, 5, padding=2)
        self.blocks = nn.ModuleList(Block(channels, 2 ** (i % 5)) for i in range(layers))
        self.pool = nn.MultiheadAttention(channels, 4, batch_first=True)
        self.query = nn.Parameter(torch.randn(1, 4, channels))
        self.head = nn.Linear(4 * channels, FINDINGS)

    def forward(self, signal: Tensor) -> Tensor:
        """Logits (B, FINDINGS) of signals (B, LEADS, SAMPLES)."""
        x = self.stem(signal)
        for block in self.blocks:
            x = block(x)
        x = x.transpose(1, 2)
        pooled, _ = self.pool(self.query.expand(len(x), -1, -1), x, x)
        logits: Tensor = self.head(pooled.flatten(1))
        return logits


def electrocardiogram() -> Job:
    """Several labels for each recording."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["signal"]), batch["labels"])

    def batch(n: int) -> dict[str, Tensor]:
        return {
            "signal": torch.randn(n, LEADS, SAMPLES),
            "labels": torch.randint(0, 2, (n, FINDINGS)).float(),
        }

    return Job(model=Electrocardiogram, loss=loss, batch=batch, optimizer="adamw", name="electrocardiogram")
