"""The denoising networks of diffusers, from their `config.json`, with random weights: predicting the noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.models.checks import check_multiple, checked_size

# B samples, C channels, H height, W width, T tokens of the text, D its width

_TEXT_TOKENS = 77
"""Tokens of the text that conditions: those of CLIP. Source: transformers, CLIPTextConfig."""
_TIMES = 1000
"""Steps of noise. Source: diffusers, DDPMScheduler."""
_PIXELS_OF_LATENT = 8
"""Pixels on a side for each latent one. Source: diffusers, AutoencoderKL of Stable Diffusion."""


def diffusion_job(name: str, config: Mapping[str, Any]) -> Callable[..., Job]:
    """What makes the job of a network from its options; UsageError if none is known for its class."""
    kind = str(config["_class_name"])
    if kind not in _KINDS:
        raise UsageError(
            f"{name} is a {kind} of diffusers, and a job is known for {', '.join(_KINDS)}. Give a brimful.Job "
            "with its loss and batch: path/to/file.py:NAME."
        )

    conditions = [key for key in ("addition_embed_type", "class_embed_type") if config.get(key) is not None]
    if conditions:
        raise UsageError(
            f"{name} has conditions besides the text, {conditions[0]}={config[conditions[0]]!r}, whose inputs "
            "are not known here. Give a brimful.Job with its loss and batch: path/to/file.py:NAME."
        )

    def make(*, image_size: int | None = None) -> Job:
        size = image_size or _PIXELS_OF_LATENT * _size(name, config, "sample_size", 64)
        channels, width = (
            _size(name, config, "in_channels", 4),
            _size(name, config, "cross_attention_dim", 1280),
        )
        made = _size(name, config, "out_channels", 4)
        check_multiple(name, "image_size", size, 8 * _PIXELS_OF_LATENT)

        def build() -> nn.Module:
            try:
                import diffusers
            except ImportError as error:
                raise UsageError(
                    f"{name} is built with diffusers, which is not installed: pip install diffusers."
                ) from error
            given = {key: value for key, value in config.items() if not key.startswith("_")}
            model: nn.Module = getattr(diffusers, kind)(**given)
            return model

        def samples(count: int) -> Batch:
            side = size // _PIXELS_OF_LATENT
            return {
                "sample": torch.randn(count, channels, side, side),  # (B, C, H, W)
                "timestep": torch.randint(0, _TIMES, (count,)),
                "encoder_hidden_states": torch.randn(count, _TEXT_TOKENS, width),  # (B, T, D)
                "noise": torch.randn(count, made, side, side),
            }

        return Job(model=build, loss=_of_noise, batch=samples, name=name)

    return make


def _of_noise(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "noise"}
    loss: Tensor = F.mse_loss(model(**inputs).sample, batch["noise"])
    return loss


_KINDS = ("UNet2DConditionModel",)
"""Classes whose inputs are known."""


def _size(name: str, config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return checked_size(name, key, default if value is None else value)
