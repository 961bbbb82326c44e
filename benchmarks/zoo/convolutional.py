"""Convolutional networks in plain torch: classifiers, encoders and decoders, generators."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.model import CLASSES, ZooModel, image_batch, own

# B samples, C channels, H height, W width, T time, Z code

SIZE = 32


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which strides and widens where the block does."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if (channels, stride) == (width, 1)
            else nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def resnet18() -> nn.Module:
    widths = (16, 16, 32, 64)
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    blocks = [
        block
        for stage, (channels, width) in enumerate(pairwise(widths))
        for block in (Residual(channels, width, 2 if stage else 1), Residual(width, width, 1))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in pairwise((3, 16, 32, 64)):
        for each in (channels, width):
            layers += [nn.Conv2d(each, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(64 * 16, 128), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(128, CLASSES)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


class InvertedBottleneck(nn.Module):
    """MobileNetV3's block: widen, filter each channel by itself, weigh the channels, narrow."""

    def __init__(self, channels: int, expansion: int = 4) -> None:
        super().__init__()
        wide = channels * expansion
        self.filter = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(),
        )
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, channels, 1), nn.ReLU(), nn.Conv2d(channels, wide, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.filter(x)
        return x + self.narrow(y * self.weigh(y))


def mobilenet() -> nn.Module:
    blocks = [InvertedBottleneck(16), nn.Conv2d(16, 32, 3, 2, 1), InvertedBottleneck(32)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), *blocks, *head)


class DenseLayer(nn.Module):
    """Adds its channels to those it was given."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


def densenet() -> nn.Module:
    layers = [DenseLayer(16 + 8 * i, 8) for i in range(6)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, *head)


class Inception(nn.Module):
    """Branches of several kernels from one input, side by side."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.branches = nn.ModuleList(
            [
                nn.Conv2d(channels, quarter, 1),
                nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.Conv2d(quarter, quarter, 3, padding=1)),
                nn.Sequential(nn.Conv2d(channels, quarter, 1), nn.Conv2d(quarter, quarter, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(channels, quarter, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([branch(x) for branch in self.branches], 1))


def inception() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), Inception(64), Inception(64), *head)


def normed(norm: str) -> nn.Module:
    """The same convolutions with group or with instance norm."""
    layers: list[nn.Module] = []
    for channels, width in pairwise((3, 16, 32, 32)):
        made = nn.GroupNorm(4, width) if norm == "group" else nn.InstanceNorm2d(width, affine=True)
        layers += [nn.Conv2d(channels, width, 3, padding=1), made, nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES))


class UNet(nn.Module):
    """Images (B, 3, H, W) → a class for each pixel, through skips by concatenation."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = self._double(3, widths[0])
        self.down = nn.ModuleList(self._double(a, b) for a, b in pairwise(widths))
        inner = widths[:0:-1]
        self.widen = nn.ModuleList(nn.ConvTranspose2d(width, width // 2, 2, stride=2) for width in inner)
        self.up = nn.ModuleList(self._double(width, width // 2) for width in inner)
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    @staticmethod
    def _double(channels: int, width: int) -> nn.Sequential:
        return nn.Sequential(
            *(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        )

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.stem(images), []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([skips.pop(), widen(x)], 1))
        return self.head(x)


def masks(samples: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(samples, 3, SIZE, SIZE),
        "y": torch.randint(0, CLASSES, (samples, SIZE, SIZE)),
    }


class Denoiser(nn.Module):
    """Noisy images (B, 3, H, W) and their times (B,) → the noise."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.inputs = nn.Conv2d(3, width, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.outputs = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.width // 2) / (self.width // 2) * 9.2)
        angles = times[:, None].float() * rates
        when = self.time(torch.cat([angles.sin(), angles.cos()], -1))[:, :, None, None]
        x = self.inputs(x)
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            x = x + convolution(F.silu(norm(x) + when))
        small = F.avg_pool2d(x, 4)
        rows = small.flatten(2).transpose(1, 2)
        mixed, _ = self.attention(rows, rows, rows, need_weights=False)
        mixed = mixed.transpose(1, 2).reshape(small.shape)
        return self.outputs(x + F.interpolate(mixed, scale_factor=4))


def predict_noise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    images = batch["x"]
    times = torch.randint(0, 1000, (len(images),))
    noise = torch.randn_like(images)
    kept = torch.linspace(0.99, 0.01, 1000)[times][:, None, None, None]
    return F.mse_loss(model(images * kept.sqrt() + noise * (1 - kept).sqrt(), times), noise)


class Gan(nn.Module):
    """A generator and a discriminator, both trained in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(64, 64, 4, 1, 0, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True)),
            *(nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
            *(nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(16, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.LeakyReLU(0.2, True)),
            *(nn.Conv2d(32, 64, 4, 2, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2, True)),
            nn.Conv2d(64, 1, 4),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.generator(torch.randn(len(images), 64, 1, 1))
        return self.discriminator(images), self.discriminator(made.detach()), self.discriminator(made)


def gan_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The discriminator's and the generator's, whose gradients meet in the discriminator."""
    real, detached, made = model(batch["x"])
    judge = F.binary_cross_entropy_with_logits
    ones, zeros = torch.ones_like(real), torch.zeros_like(real)
    return judge(real, ones) + judge(detached, zeros) + judge(made, ones)


class Autoencoder(nn.Module):
    """Images through a code and back; the code is drawn if `is_variational`."""

    def __init__(self, *, is_variational: bool) -> None:
        super().__init__()
        self.is_variational = is_variational
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 64, 64)),
        )
        self.decoder = nn.Sequential(
            *(nn.Linear(32 if is_variational else 64, 32 * 64), nn.ReLU(), nn.Unflatten(1, (32, 8, 8))),
            *(nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 3, 2, 1, 1)),
            nn.Sigmoid(),
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(images)
        if not self.is_variational:
            return self.decoder(code), code.new_zeros(())
        mean, log_variance = code.chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return self.decoder(drawn), divergence


def reconstruct(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made, divergence = model(batch["x"])
    return F.mse_loss(made, batch["x"]) + 0.1 * divergence


class VectorQuantizer(nn.Module):
    """A VQ-VAE: the nearest entry of a code book, past which the gradient goes straight."""

    def __init__(self, entries: int = 64, width: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1))
        self.book = nn.Embedding(entries, width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(images).permute(0, 2, 3, 1)
        nearest = torch.cdist(code.flatten(0, 2), self.book.weight).argmin(-1)
        entries = self.book(nearest).view(code.shape)
        distance = F.mse_loss(entries, code.detach()) + 0.25 * F.mse_loss(entries.detach(), code)
        passed = code + (entries - code).detach()
        return self.decoder(passed.permute(0, 3, 1, 2)), distance


class WaveNet(nn.Module):
    """Samples (B, 1, T) → the class of the next, by gated dilated convolutions."""

    def __init__(self, width: int = 32, layers: int = 6) -> None:
        super().__init__()
        self.inputs = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        total: Any = 0
        for gate, skip in zip(self.gates, self.skips, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            y = skip(a.tanh() * b.sigmoid())
            total = total + y
            x = x + y
        return self.head(total)


def wave_batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 1, 512), "y": torch.randint(0, 64, (samples, 512))}


def video_net() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in pairwise((3, 16, 32)):
        layers += [nn.Conv3d(channels, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, CLASSES))


def video_batch(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 8, 24, 24), "y": torch.arange(samples) % CLASSES}


def parametrised() -> nn.Module:
    """Convolutions whose weights are computed from others: by weight norm and by spectral norm."""
    weight_norm = nn.utils.parametrizations.weight_norm
    spectral_norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        *(
            weight_norm(nn.Conv2d(3, 32, 3, 2, 1)),
            nn.ReLU(),
            spectral_norm(nn.Conv2d(32, 32, 3, 2, 1)),
            nn.ReLU(),
        ),
        *(nn.Flatten(), spectral_norm(nn.Linear(32 * 64, 64)), nn.ReLU(), weight_norm(nn.Linear(64, CLASSES))),
    )


def old_parametrised() -> nn.Module:
    """The same by the hooks that the parametrisations replaced."""
    return nn.Sequential(
        *(nn.utils.spectral_norm(nn.Conv2d(3, 16, 3, 2, 1)), nn.ReLU(), nn.Flatten()),
        nn.utils.spectral_norm(nn.Linear(16 * 256, CLASSES)),
    )


_IMAGES = partial(image_batch, SIZE)

CONVOLUTIONAL: tuple[ZooModel, ...] = (
    own("resnet-18", "convolutional", resnet18, _IMAGES),
    own("vgg", "convolutional", vgg, _IMAGES),
    own("mobilenet-v3", "convolutional", mobilenet, _IMAGES),
    own("densenet", "convolutional", densenet, _IMAGES),
    own("inception", "convolutional", inception, _IMAGES),
    own("group norm", "convolutional", partial(normed, "group"), _IMAGES),
    own("instance norm", "convolutional", partial(normed, "instance"), _IMAGES),
    own("unet", "segmentation", UNet, masks),
    own("diffusion", "generative", Denoiser, _IMAGES, loss=predict_noise),
    own("dcgan", "generative", Gan, _IMAGES, loss=gan_losses),
    own("autoencoder", "generative", partial(Autoencoder, is_variational=False), _IMAGES, loss=reconstruct),
    own("vae", "generative", partial(Autoencoder, is_variational=True), _IMAGES, loss=reconstruct),
    own("vq-vae", "generative", VectorQuantizer, _IMAGES, loss=reconstruct),
    own("wavenet", "convolutional", WaveNet, wave_batch),
    own("video, 3-d", "convolutional", video_net, video_batch, micro_batch_size=4),
    own("weight and spectral norm", "convolutional", parametrised, _IMAGES),
    own("spectral norm by hooks", "convolutional", old_parametrised, _IMAGES),
)
