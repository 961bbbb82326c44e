"""The denoising networks of diffusers, from their `config.json`, with random weights: noise or flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.errors import UsageError
from brimful.job import Batch, Job
from brimful.models.checks import check_multiple, checked_size

# B samples, C channels, H height, W width, T tokens of the text, D its width, P patches of the image

_TEXT_TOKENS = 77
"""Tokens of the text that conditions a U-Net: those of CLIP. Source: transformers, CLIPTextConfig."""
_TEXT_TOKENS_OF_FLUX = 512
"""Tokens of T5 that condition FLUX. Source: diffusers, train_dreambooth_lora_flux.py, max_sequence_length."""
_TIMES = 1000
"""Steps of noise. Source: diffusers, DDPMScheduler."""
_TIME_IDS = 6
"""Sizes and offsets of an image that condition SDXL. Source: diffusers, train_text_to_image_sdxl.py."""
_PIXELS_OF_LATENT = 8
"""Pixels on a side for each latent one. Source: diffusers, AutoencoderKL of Stable Diffusion and FLUX."""
_LATENTS_OF_PATCH = 2
"""Latent pixels on a side of a patch of FLUX. Source: diffusers, FluxPipeline._pack_latents."""
_FLUX_PIXELS = 1024
"""Default side of an image of FLUX. Source: diffusers, FluxPipeline, default_sample_size."""


def diffusion_job(name: str, config: Mapping[str, Any]) -> Callable[..., Job]:
    """What makes the job of a network from its options; UsageError if none is known for its class."""
    kind = str(config["_class_name"])
    if kind not in _KINDS:
        raise UsageError(
            f"{name} is a {kind} of diffusers, and a job is known for {', '.join(_KINDS)}. Give a brimful.Job "
            "with its loss and batch: path/to/file.py:NAME."
        )
    return _KINDS[kind](name, config)


def _unet(name: str, config: Mapping[str, Any]) -> Callable[..., Job]:
    added, labels = config.get("addition_embed_type"), config.get("class_embed_type")
    if labels is not None or added not in (None, "text_time"):
        key, value = ("class_embed_type", labels) if labels is not None else ("addition_embed_type", added)
        raise UsageError(
            f"{name} has conditions besides the text, {key}={value!r}, whose inputs "
            "are not known here. Give a brimful.Job with its loss and batch: path/to/file.py:NAME."
        )

    def make(*, image_size: int | None = None) -> Job:
        size = image_size or _PIXELS_OF_LATENT * _size(name, config, "sample_size", 64)
        check_multiple(name, "image_size", size, 8 * _PIXELS_OF_LATENT)
        side = size // _PIXELS_OF_LATENT
        channels, made = _size(name, config, "in_channels", 4), _size(name, config, "out_channels", 4)
        width = _size(name, config, "cross_attention_dim", 1280)
        pooled = 0
        if added is not None:
            of_times = _TIME_IDS * _size(name, config, "addition_time_embed_dim", 256)
            pooled = _size(name, config, "projection_class_embeddings_input_dim", 2816) - of_times
            checked_size(name, "projection_class_embeddings_input_dim less the width of times", pooled)

        def samples(count: int) -> Batch:
            batch = {
                "sample": torch.randn(count, channels, side, side),  # (B, C, H, W)
                "timestep": torch.randint(0, _TIMES, (count,)),
                "encoder_hidden_states": torch.randn(count, _TEXT_TOKENS, width),  # (B, T, D)
                "noise": torch.randn(count, made, side, side),
            }
            if pooled:
                batch |= {
                    "text_embeds": torch.randn(count, pooled),
                    "time_ids": torch.full((count, _TIME_IDS), float(size)),
                }
            return batch

        return Job(model=_built(name, config), loss=_of_noise, batch=samples, name=name)

    return make


def _of_noise(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of diffusers' train_text_to_image.py, and of its sibling for SDXL."""
    inputs = {key: batch[key] for key in ("sample", "timestep", "encoder_hidden_states")}
    if "time_ids" in batch:
        inputs["added_cond_kwargs"] = {key: batch[key] for key in ("text_embeds", "time_ids")}
    return F.mse_loss(model(**inputs).sample.float(), batch["noise"].float())


def _flux(name: str, config: Mapping[str, Any]) -> Callable[..., Job]:
    def make(*, image_size: int | None = None) -> Job:
        size = _FLUX_PIXELS if image_size is None else image_size
        check_multiple(name, "image_size", size, _LATENTS_OF_PATCH * _PIXELS_OF_LATENT)
        side = size // (_LATENTS_OF_PATCH * _PIXELS_OF_LATENT)
        channels = _size(name, config, "in_channels", 64)
        made = _size(name, config, "out_channels", channels)
        width = _size(name, config, "joint_attention_dim", 4096)
        pooled = _size(name, config, "pooled_projection_dim", 768)

        def samples(count: int) -> Batch:
            batch = {
                "hidden_states": torch.randn(count, side**2, channels),  # (B, P, C)
                "timestep": torch.rand(count),
                "encoder_hidden_states": torch.randn(count, _TEXT_TOKENS_OF_FLUX, width),  # (B, T, D)
                "pooled_projections": torch.randn(count, pooled),
                "flow": torch.randn(count, side**2, made),
            }
            return batch | ({"guidance": torch.ones(count)} if config.get("guidance_embeds") else {})

        return Job(model=_built(name, config), loss=partial(_of_flow, side=side), batch=samples, name=name)

    return make


def _of_flow(model: nn.Module, batch: Batch, *, side: int) -> Tensor:
    """The loss of diffusers' train_dreambooth_lora_flux.py, each time weighted alike."""
    inputs = {key: value for key, value in batch.items() if key != "flow"}
    text = batch["encoder_hidden_states"]
    steps = torch.arange(side, device=text.device, dtype=text.dtype)
    rows, columns = steps[:, None].expand(side, side), steps.expand(side, side)
    places = torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)  # (P, 3)
    predicted = model(**inputs, img_ids=places, txt_ids=text.new_zeros(text.shape[1], 3)).sample
    return F.mse_loss(predicted.float(), batch["flow"].float())


_KINDS: Mapping[str, Callable[[str, Mapping[str, Any]], Callable[..., Job]]] = {
    "UNet2DConditionModel": _unet,
    "FluxTransformer2DModel": _flux,
}
"""By class: what makes jobs of it."""


def _built(name: str, config: Mapping[str, Any]) -> Callable[[], nn.Module]:
    """Builds a model of diffusers from its configuration."""

    def build() -> nn.Module:
        try:
            import diffusers
        except ImportError as error:
            raise UsageError(
                f"{name} is built with diffusers, which is not installed: pip install diffusers."
            ) from error
        given = {key: value for key, value in config.items() if not key.startswith("_")}
        model: nn.Module = getattr(diffusers, config["_class_name"])(**given)
        return model

    return build


def _size(name: str, config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    return checked_size(name, key, default if value is None else value)
