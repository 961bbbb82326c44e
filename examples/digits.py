"""A small ResNet on scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels, enlarged to 40 × 40.

brimful plan examples/digits.py:job --global-batch-size 128 --budget 50%
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import brimful as bf

PIXELS = 40
CLASSES = 10
VALIDATION_EVERY = 6  # samples
NORM_MOMENTUM = 0.3  # statistics that follow within a few steps: the run has some dozens


class Convolution(nn.Sequential):
    def __init__(self, channels_in: int, channels: int, size: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, size, stride, padding=size // 2, bias=False),
            nn.BatchNorm2d(channels, momentum=NORM_MOMENTUM),
        )


class Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = Convolution(channels_in, channels, 3, stride)
        self.second = Convolution(channels, channels, 3)
        self.shortcut = Convolution(channels_in, channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = Convolution(1, width, 3)
        self.blocks = nn.Sequential(
            Block(width, width, stride=1),
            Block(width, width, stride=1),
            Block(width, width, stride=1),
            Block(width, 2 * width, stride=2),
            Block(2 * width, 2 * width, stride=1),
            Block(2 * width, 4 * width, stride=2),
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(images))).mean(dim=(2, 3)))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["images"]), batch["digits"])


def accuracy(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"accuracy": (model(batch["images"]).argmax(1) == batch["digits"]).float().mean()}


def random_batch(samples: int) -> dict[str, torch.Tensor]:
    return {
        "images": torch.rand(samples, 1, PIXELS, PIXELS),
        "digits": torch.randint(CLASSES, (samples,)),
    }


def data() -> bf.Data:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    samples = {
        "images": F.interpolate(images, size=(PIXELS, PIXELS), mode="bilinear"),
        "digits": torch.tensor(digits.target),
    }
    validation = torch.arange(len(images)) % VALIDATION_EVERY == 0
    return bf.Data(
        train={name: tensor[~validation] for name, tensor in samples.items()},
        validation={name: tensor[validation] for name, tensor in samples.items()},
    )


def job() -> bf.Job:
    return bf.Job(
        name="digits",
        model=ResNet,
        loss=loss,
        batch=random_batch,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        metrics=accuracy,
        data=data,
    )
