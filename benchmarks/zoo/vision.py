"""Vision models of transformers: classifiers, segmentation, detection, image and text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.model import CLASSES, VOCABULARY, ZooModel, pixel_batch, pretrained

SIZE = 64
WIDTH = 128
HEADS = 4
LAYERS = 2

_ENCODER: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
_IMAGES: dict[str, Any] = {"image_size": SIZE, "patch_size": 8, "num_labels": CLASSES}


def _classifier(name: str, model: str, config: str, size: int = SIZE, **sizes: Any) -> ZooModel:
    return pretrained(name, "vision", model, config, partial(pixel_batch, size), **sizes)


def _segmentation_batch(samples: int) -> dict[str, Tensor]:
    labels = torch.randint(0, CLASSES, (samples, SIZE, SIZE))
    return {"pixel_values": torch.randn(samples, 3, SIZE, SIZE), "labels": labels}


def _detection_batch(samples: int) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(samples, 3, SIZE, SIZE),
        "classes": torch.randint(0, CLASSES, (samples, 3)),
        "boxes": torch.rand(samples, 3, 4) / 2 + 0.25,
    }


def _detect(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """DETR's losses with the first queries given to the objects, in place of the assignment."""
    out = model(pixel_values=batch["pixel_values"])
    objects = batch["classes"].shape[1]
    wanted = torch.full(out.logits.shape[:2], CLASSES)
    wanted[:, :objects] = batch["classes"]
    classes = nn.functional.cross_entropy(out.logits.transpose(1, 2), wanted)
    return classes + 5 * (out.pred_boxes[:, :objects] - batch["boxes"]).abs().mean()


def _clip_batch(samples: int) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY - 1, (samples, 16))
    ids[:, -1] = VOCABULARY - 1
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(samples, 3, SIZE, SIZE),
    }


def _contrast(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return model(**batch, return_loss=True).loss


def _reconstruct(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(pixel_values=batch["pixel_values"]).loss


VISION: tuple[ZooModel, ...] = (
    _classifier("vit", "ViTForImageClassification", "ViTConfig", **_IMAGES, **_ENCODER),
    _classifier("deit", "DeiTForImageClassification", "DeiTConfig", **_IMAGES, **_ENCODER),
    _classifier("beit", "BeitForImageClassification", "BeitConfig", **_IMAGES, **_ENCODER),
    _classifier(
        "dinov2", "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=4, drop_path_rate=0.1, **_IMAGES,
        **{k: v for k, v in _ENCODER.items() if k != "intermediate_size"},
    ),
    pretrained(
        "vit-mae", "vision", "ViTMAEForPreTraining", "ViTMAEConfig", partial(pixel_batch, SIZE),
        loss=_reconstruct, image_size=SIZE, patch_size=8, decoder_hidden_size=64, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4, decoder_intermediate_size=256, **_ENCODER,
    ),
    _classifier(
        "swin", "SwinForImageClassification", "SwinConfig",
        image_size=SIZE, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=CLASSES,
    ),
    _classifier(
        "convnext", "ConvNextForImageClassification", "ConvNextConfig",
        hidden_sizes=[32, 64, 128], depths=[1, 1, 2], num_stages=3, num_labels=CLASSES, drop_path_rate=0.1,
    ),
    _classifier(
        "resnet (transformers)", "ResNetForImageClassification", "ResNetConfig",
        embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 2, 1], num_labels=CLASSES,
    ),
    _classifier(
        "regnet", "RegNetForImageClassification", "RegNetConfig",
        embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], groups_width=16, num_labels=CLASSES,
    ),
    _classifier(
        "efficientnet", "EfficientNetForImageClassification", "EfficientNetConfig",
        image_size=SIZE, width_coefficient=0.5, depth_coefficient=0.35, hidden_dim=640, num_labels=CLASSES,
    ),
    _classifier(
        "mobilenet-v2", "MobileNetV2ForImageClassification", "MobileNetV2Config",
        image_size=SIZE, depth_multiplier=0.5, num_labels=CLASSES,
    ),
    _classifier(
        "mobilevit", "MobileViTForImageClassification", "MobileViTConfig",
        image_size=SIZE, hidden_sizes=[32, 48, 64], neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 128],
        num_labels=CLASSES,
    ),
    _classifier(
        "poolformer", "PoolFormerForImageClassification", "PoolFormerConfig",
        hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_labels=CLASSES,
    ),
    pretrained(
        "segformer", "segmentation", "SegformerForSemanticSegmentation", "SegformerConfig", _segmentation_batch,
        hidden_sizes=[16, 32, 64, 96], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=64, num_labels=CLASSES,
    ),
    pretrained(
        "yolos", "detection", "YolosForObjectDetection", "YolosConfig", _detection_batch, loss=_detect,
        image_size=[SIZE, SIZE], patch_size=8, num_detection_tokens=10, num_labels=CLASSES, **_ENCODER,
    ),
    pretrained(
        "clip", "image and text", "CLIPModel", "CLIPConfig", _clip_batch, loss=_contrast,
        text_config={
            "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": VOCABULARY - 1, **_ENCODER,
        },
        vision_config={"image_size": SIZE, "patch_size": 8, **_ENCODER}, projection_dim=64,
    ),
    pretrained(
        "siglip", "image and text", "SiglipModel", "SiglipConfig", _clip_batch, loss=_contrast,
        text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 16, **_ENCODER},
        vision_config={"image_size": SIZE, "patch_size": 8, **_ENCODER},
    ),
)  # fmt: skip
