"""Built-in vision models: ViT, ResNet, VGG and U-Net, with random weights.

| names | task and batch | options | optimizer |
|---|---|---|---|
| `vit-base`, `vit-large` | classification; `pixel_values`, `labels` | `image_size` 224, `num_classes` 1000, \
`num_hidden_layers`, `hidden_size` | AdamW |
| `resnet18`, `resnet34`, `resnet50`, `resnet101`, `resnet152`, `vgg16` | classification; `images`, `labels` | \
`image_size` 224, `num_classes` 1000 | SGD |
| `unet` | segmentation; `images`, `labels` by pixel | `image_size` 256, `num_classes` 2 | SGD |

Images are square, float32, with 3 channels. The loss is the cross-entropy, a mean over images or pixels. The
convolutional networks are trained with SGD and momentum, as in their papers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brimful.job import Batch, Job
from brimful.models.checks import check_multiple, check_range
from brimful.models.huggingface import Published, build_model, own_loss

# B images, C channels, H height, W width

_IMAGE_CHANNELS = 3


def _vit(layers: int, width: int, heads: int) -> Published:
    """Dosovitskiy et al. 2020, ViT, table 1; config.json of google/vit-{base,large}-patch16-224."""
    return Published(
        config_class="ViTConfig",
        model_class="ViTForImageClassification",
        config={
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "patch_size": 16,
            "num_channels": _IMAGE_CHANNELS,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "layer_norm_eps": 1e-12,
            "qkv_bias": True,
        },
    )


class ResNet(nn.Module):
    """He et al. 2015, "Deep Residual Learning for Image Recognition", table 1.

    The stride of a bottleneck sits on the 3×3 convolution, as in torchvision ("v1.5"), not on the first 1×1.
    """

    def __init__(
        self, block: type[_Block], blocks_of_stages: tuple[int, int, int, int], num_classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(_IMAGE_CHANNELS, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages = []
        in_channels = 64
        for blocks, width, stride in zip(blocks_of_stages, (64, 128, 256, 512), (1, 2, 2, 2), strict=True):
            stage = [block(in_channels, width, stride)]
            in_channels = block.EXPANSION * width
            stage += [block(in_channels, width, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(in_channels, num_classes)
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        features = self.stages(self.stem(images))
        return self.classifier(features.mean(dim=(2, 3)))


class _Block(nn.Module):
    """A residual block, of which each kind has its own `residual`."""

    EXPANSION: int
    """Output channels for each of the block's width."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = self.EXPANSION * width
        self.residual = self._make_residual(in_channels, width, stride)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: Tensor) -> Tensor:
        out = self.residual(features)
        out += self.shortcut(features)
        return self.relu(out)

    @classmethod
    def _make_residual(cls, in_channels: int, width: int, stride: int) -> nn.Sequential:
        raise NotImplementedError


class _BasicBlock(_Block):
    """3×3 to `width` channels, then 3×3."""

    EXPANSION = 1

    @classmethod
    def _make_residual(cls, in_channels: int, width: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )


class _Bottleneck(_Block):
    """1×1 to `width` channels, 3×3, 1×1 to `4 * width` channels."""

    EXPANSION = 4

    @classmethod
    def _make_residual(cls, in_channels: int, width: int, stride: int) -> nn.Sequential:
        out_channels = cls.EXPANSION * width
        return nn.Sequential(
            nn.Conv2d(in_channels, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, out_channels, 1, bias=False),
            nn.BatchNorm2d(out_channels),
        )


ResNet18 = partial(ResNet, _BasicBlock, (2, 2, 2, 2))
ResNet34 = partial(ResNet, _BasicBlock, (3, 4, 6, 3))
ResNet50 = partial(ResNet, _Bottleneck, (3, 4, 6, 3))
ResNet101 = partial(ResNet, _Bottleneck, (3, 4, 23, 3))
ResNet152 = partial(ResNet, _Bottleneck, (3, 8, 36, 3))


class VGG16(nn.Module):
    """Simonyan & Zisserman 2014, "Very Deep Convolutional Networks", table 1, configuration D.

    The pooling to 7×7 ahead of the classifier, as in torchvision, changes nothing at 224 pixels and admits
    other sizes.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        stages = []
        in_channels = _IMAGE_CHANNELS
        for convolutions, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
            stage: list[nn.Module] = []
            for _ in range(convolutions):
                stage += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
                in_channels = channels
            stages.append(nn.Sequential(*stage, nn.MaxPool2d(2)))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, num_classes),
        )
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        features = self.pool(self.stages(images))
        return self.classifier(features.flatten(start_dim=1))


class UNet(nn.Module):
    """Ronneberger, Fischer & Brox 2015, "U-Net", figure 1, with padding and BatchNorm.

    Padded convolutions keep the size, so that skips need no cropping and there is one logit per pixel;
    BatchNorm follows every 3×3 convolution. Both are what implementations have settled on.
    """

    WIDTHS = (64, 128, 256, 512, 1024)

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        outer, *inner = self.WIDTHS
        self.stem = _double_convolution(_IMAGE_CHANNELS, outer)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), _double_convolution(width // 2, width)) for width in inner
        )
        self.up = nn.ModuleList(_UpBlock(width) for width in reversed(inner))
        self.head = nn.Conv2d(outer, num_classes, 1)
        _initialize(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of images (B, 3, H, W); 16 must divide H and W."""
        features = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(features)
            features = down(features)
        for up in self.up:
            features = up(features, skips.pop())
        return self.head(features)


class _UpBlock(nn.Module):
    """Twice the size at half the channels, then joined with the skip of that size."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, 2, stride=2)
        self.convolutions = _double_convolution(in_channels, in_channels // 2)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        return self.convolutions(torch.cat([skip, self.up(features)], dim=1))


def _double_convolution(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _initialize(model: nn.Module) -> None:
    """He et al. 2015, "Delving Deep into Rectifiers": convolutions that keep the variance under ReLU."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _vit_job(
    name: str,
    published: Published,
    *,
    image_size: int = 224,
    num_classes: int = 1000,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
) -> Job:
    check_multiple(name, "image_size", image_size, published.config["patch_size"])
    check_range(name, "num_classes", num_classes, 2)
    resizing = published.resized(name, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size)

    def build() -> nn.Module:
        return build_model(
            name,
            published,
            image_size=image_size,
            num_labels=num_classes,
            **resizing,
            problem_type="single_label_classification",  # else the first forward writes it into the config
        )

    def make_samples(samples: int) -> Batch:
        return {
            "pixel_values": _random_images(samples, image_size),
            "labels": torch.randint(0, num_classes, (samples,)),  # (B,)
        }

    return Job(model=build, loss=own_loss, batch=make_samples, name=name)


def _image_classifier_job(
    name: str,
    network: Callable[[int], nn.Module],
    least_image_size: int,
    *,
    image_size: int = 224,
    num_classes: int = 1000,
) -> Job:
    check_range(name, "image_size", image_size, least_image_size)
    check_range(name, "num_classes", num_classes, 2)

    def make_samples(samples: int) -> Batch:
        return {
            "images": _random_images(samples, image_size),
            "labels": torch.randint(0, num_classes, (samples,)),  # (B,)
        }

    return Job(
        model=partial(network, num_classes),
        loss=_cross_entropy,
        batch=make_samples,
        optimizer="sgd",
        name=name,
    )


def _unet_job(name: str, *, image_size: int = 256, num_classes: int = 2) -> Job:
    check_range(name, "image_size", image_size, 32)  # at 16 the innermost BatchNorm of one image sees one pixel
    check_multiple(name, "image_size", image_size, 2 ** (len(UNet.WIDTHS) - 1))
    check_range(name, "num_classes", num_classes, 2)

    def make_samples(samples: int) -> Batch:
        return {
            "images": _random_images(samples, image_size),
            "labels": torch.randint(0, num_classes, (samples, image_size, image_size)),  # (B, H, W)
        }

    return Job(
        model=partial(UNet, num_classes),
        loss=_cross_entropy,
        batch=make_samples,
        optimizer="sgd",
        name=name,
    )


def _random_images(samples: int, image_size: int) -> Tensor:
    return torch.randn(samples, _IMAGE_CHANNELS, image_size, image_size)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


VISION_ARCHITECTURES: dict[str, Callable[..., Job]] = {
    "vit-base": partial(_vit_job, "vit-base", _vit(12, 768, 12)),
    "vit-large": partial(_vit_job, "vit-large", _vit(24, 1024, 16)),
    # all of these halve the image five times; at 32 pixels the last BatchNorm of one image would see one pixel
    "resnet18": partial(_image_classifier_job, "resnet18", ResNet18, 33),
    "resnet34": partial(_image_classifier_job, "resnet34", ResNet34, 33),
    "resnet50": partial(_image_classifier_job, "resnet50", ResNet50, 33),
    "resnet101": partial(_image_classifier_job, "resnet101", ResNet101, 33),
    "resnet152": partial(_image_classifier_job, "resnet152", ResNet152, 33),
    "vgg16": partial(_image_classifier_job, "vgg16", VGG16, 32),
    "unet": partial(_unet_job, "unet"),
}
"""Makes the job of each vision model, by name."""
