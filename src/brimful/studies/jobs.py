"""Models and data of the studies: those of the articles with random data, and small ones that learn on a CPU.

The small data are scikit-learn's handwritten digits, 1797 images of 8 × 8 pixels, and the help topics of Python
(`pydoc_data`, 460 KB of English) as windows of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.models import find_architecture
from brimful.optimizers import named_optimizer

# B samples, T bytes of a window

VALIDATION_EVERY = 6
"""One of this many samples is for validation."""
_CLASSES = 10
_WHOLE = 256
"""Training samples are a multiple of this."""
_LEARNING_RATE = 1e-3


def _split(samples: dict[str, Tensor]) -> Data:
    """The samples, of which some are for validation, the others in whole batches."""
    first = next(iter(samples.values()))
    held_out = torch.arange(len(first)) % VALIDATION_EVERY == 0
    whole = int((~held_out).sum()) // _WHOLE * _WHOLE
    return Data(
        train={name: tensor[~held_out][:whole] for name, tensor in samples.items()},
        validation={name: tensor[held_out] for name, tensor in samples.items()},
    )


@cache
def _digits() -> dict[str, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            f"the small scale trains on scikit-learn's digits, and it cannot be imported: {error}. "
            "pip install 'brimful[demo]'"
        ) from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    return {"x": images, "y": torch.tensor(digits.target)}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).float().mean()}


def digits_job(network: Callable[[], nn.Module]) -> Job:
    """A network that classifies the digits: (B, 1, 8, 8) → (B, 10)."""
    return Job(
        model=network,
        loss=_loss,
        batch=lambda samples: {name: tensor[:samples] for name, tensor in _digits().items()},
        optimizer=named_optimizer("adamw", learning_rate=_LEARNING_RATE),
        metrics=_accuracy,
        data=lambda: _split(_digits()),
        name="digits",
    )


def convolutions(width: int = 16, layers: int = 8) -> nn.Sequential:
    """Convolutions that keep the size of the image, its mean over 2 × 2 parts, dropout and a linear layer."""
    blocks: list[nn.Module] = []
    for inputs in (1, *[width] * (layers - 1)):
        blocks += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width, _CLASSES)
    )


def normed_mlp(norm: Callable[[int], nn.Module], width: int = 128) -> nn.Module:
    """Three linear layers with a norm each, whose statistics are of a micro-batch under BatchNorm."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (64, width, width):
        layers += [nn.Linear(inputs, width), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def group_norm(channels: int) -> nn.Module:
    """GroupNorm in eight groups."""
    return nn.GroupNorm(8, channels)


class Segmented(nn.Module):
    """A Sequential that is checkpointed in segments by `checkpoint_sequential`; with 0 it is not."""

    def __init__(self, layers: nn.Sequential, segments: int) -> None:
        super().__init__()
        self.layers, self.segments = layers, segments

    def forward(self, x: Tensor) -> Tensor:
        """The output of the layers."""
        if self.segments == 0 or not self.training:
            found: Tensor = self.layers(x)
            return found
        return checkpoint_sequential(self.layers, self.segments, x, use_reentrant=False)  # type: ignore


def vgg16(segments: int) -> nn.Module:
    """VGG16 for two classes, all of its layers in one Sequential."""
    layers: list[nn.Module] = []
    channels = 3
    for convolutions_, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(convolutions_):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU()]
    return Segmented(nn.Sequential(*layers, nn.Dropout(), nn.Linear(4096, 2)), segments)


def vgg16_job(segments: int) -> Job:
    """Batches of random images; SGD with momentum."""
    return Job(
        model=partial(vgg16, segments),
        loss=_loss,
        batch=lambda samples: {"x": torch.randn(samples, 3, 224, 224), "y": torch.randint(0, 2, (samples,))},
        optimizer="sgd",
        name="vgg16",
    )


def small_vgg(segments: int) -> nn.Module:
    """The layers of `convolutions` in segments."""
    return Segmented(convolutions(), segments)


def deep_mlp(layers: int, width: int, segments: int, inputs: int = 64, classes: int = 10) -> nn.Module:
    """Residual linear layers, one after another in one Sequential."""
    inner = [_Residual(width, 1 / layers) for _ in range(layers)]
    return Segmented(
        nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), *inner, nn.Linear(width, classes)), segments
    )


class _Residual(nn.Module):
    """A linear layer that begins near the identity, so that depth trains."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        """The input plus a little of what the layer makes of it."""
        return x + self.scale * F.relu(self.linear(x))


def deep_mlp_job(layers: int, width: int, segments: int) -> Job:
    """Random inputs of 64 numbers; SGD with momentum."""
    return Job(
        model=partial(deep_mlp, layers, width, segments),
        loss=_loss,
        batch=lambda samples: {"x": torch.randn(samples, 64), "y": torch.randint(0, 10, (samples,))},
        optimizer="sgd",
        name="deep-mlp",
    )


def text_job(name: str) -> Job:
    """A built-in text classifier over 512 tokens."""
    return find_architecture(name, sequence_length=512)


_TOPICS = 8
_WINDOW = 64


@cache
def _topics() -> dict[str, Tensor]:
    """Windows of 64 bytes of the longest help topics, (N, 64), and the number of the topic of each."""
    from pydoc_data.topics import topics

    longest = sorted(topics.values(), key=len, reverse=True)[:_TOPICS]
    shortest = min(map(len, longest)) // _WINDOW
    windows, labels = [], []
    for label, text in enumerate(longest):
        encoded = text.encode("ascii", "replace")[: shortest * _WINDOW]
        windows.append(torch.tensor(list(encoded)).reshape(-1, _WINDOW))
        labels.append(torch.full((shortest,), label))
    return {"input_ids": torch.cat(windows), "labels": torch.cat(labels)}


def _text_accuracy(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    guessed = model(input_ids=batch["input_ids"]).logits.argmax(1)
    return {"accuracy": (guessed == batch["labels"]).float().mean()}


def topics_job(layers: int = 2) -> Job:
    """A small BERT that says which help topic 64 bytes are from."""

    def build() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
        config = BertConfig(
            **sizes, intermediate_size=256, vocab_size=128, max_position_embeddings=_WINDOW, num_labels=_TOPICS
        )
        model: nn.Module = BertForSequenceClassification(config)
        return model

    return Job(
        model=build,
        loss=lambda model, batch: model(**batch).loss,
        batch=lambda samples: {name: tensor[:samples] for name, tensor in _topics().items()},
        optimizer=named_optimizer("adamw", learning_rate=_LEARNING_RATE),
        metrics=_text_accuracy,
        data=lambda: _split(_topics()),
        name="topics",
    )
