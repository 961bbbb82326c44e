"""Models of packages that are no part of the dev extra, and whether they can be imported here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchvision_on_cpu import why_not_imported
from zoo.model import CLASSES, ZooModel, image_batch, own

SIZE = 64


missing = cache(why_not_imported)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    model = getattr(torchvision.models, name)(weights=None, num_classes=CLASSES)
    if name.startswith("vgg"):  # three wide layers, 480 MB of weights
        model.classifier = nn.Linear(512 * 7 * 7, CLASSES)
    return model


def _timm(name: str, **sizes: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **sizes)


def _diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def _predict_noise(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(batch["x"])
    return F.mse_loss(model(batch["x"] + noise, batch["y"]).sample, noise)


_IMAGES = partial(image_batch, SIZE)


def _vision(package: str, name: str, build: Callable[[], nn.Module]) -> ZooModel:
    return own(f"{name} ({package})", "vision", build, _IMAGES, micro_batch_size=4, needs=package)


PACKAGES: tuple[ZooModel, ...] = (
    *(
        _vision("torchvision", name, partial(_torchvision, name))
        for name in (
            "resnet50", "mobilenet_v3_small", "efficientnet_b0", "vgg11", "densenet121", "convnext_tiny",
            "regnet_y_400mf", "mnasnet1_0", "swin_t", "shufflenet_v2_x1_0", "squeezenet1_1",
        )
    ),
    *(
        _vision("timm", name, partial(_timm, name, **sizes))
        for name, sizes in (
            ("resnet18", {}),
            ("vit_tiny_patch16_224", {"img_size": SIZE}),
            ("mixer_s32_224", {"img_size": SIZE}),
            ("convnextv2_atto", {}),
        )
    ),
    own(
        "unet (diffusers)", "generative", _diffusers_unet, partial(image_batch, 16), loss=_predict_noise,
        micro_batch_size=4, needs="diffusers",
    ),
)  # fmt: skip
