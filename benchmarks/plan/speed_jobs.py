"""The jobs whose planning is timed: `brimful plan benchmarks/plan/speed_jobs.py:llama_100`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf


def llama(layers: int = 100) -> bf.Job:
    """Layers of 1024, 1.6 billion parameters if there are 100, sequences of 1024."""

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32_000,
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=layers,
                num_attention_heads=16,
                use_cache=False,
            )
        )

    return bf.Job(
        name=f"llama, {layers} layers",
        model=model,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        batch=lambda n: torch.zeros(n, 1024, dtype=torch.long),
        optimizer="adamw",
    )


def llama_lora(layers: int = 32) -> bf.Job:
    """Llama 3 8B in bfloat16 with adapters of rank 16 on the attention, sequences of 1024."""

    def model() -> nn.Module:
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            use_cache=False,
        )
        adapters = LoraConfig(
            r=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        return get_peft_model(base, adapters)

    return bf.Job(
        name=f"llama 8b lora, {layers} layers",
        model=model,
        loss=lambda model, batch: model(input_ids=batch, labels=batch).loss,
        batch=lambda n: torch.zeros(n, 1024, dtype=torch.long),
        optimizer="adamw",
    )


class Detr(nn.Module):
    """DETR as its authors' notebook has it: ResNet-50, a transformer of 6 and 6 layers, 100 queries.

    Source: Carion et al., "End-to-End Object Detection with Transformers" (2020), appendix A.6.
    """

    def __init__(self, width: int = 256, queries: int = 100, classes: int = 91) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        self.backbone = ResNetModel(ResNetConfig())
        self.project = nn.Conv2d(2048, width, 1)
        self.transformer = nn.Transformer(width, 8, 6, 6, batch_first=True)
        self.classify, self.locate = nn.Linear(width, classes + 1), nn.Linear(width, 4)
        self.queries = nn.Parameter(torch.rand(queries, width))
        self.rows, self.columns = (nn.Parameter(torch.rand(50, width // 2)) for _ in range(2))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.project(self.backbone(images).last_hidden_state)
        samples, _, height, width = features.shape
        positions = torch.cat(
            [
                self.columns[:width].unsqueeze(0).repeat(height, 1, 1),
                self.rows[:height].unsqueeze(1).repeat(1, width, 1),
            ],
            dim=-1,
        ).flatten(0, 1)
        found = self.transformer(
            positions + 0.1 * features.flatten(2).transpose(1, 2), self.queries.expand(samples, -1, -1)
        )
        return self.classify(found), self.locate(found).sigmoid()


def detr() -> bf.Job:
    """DETR on images of 800 by 800 pixels, each query's target given: matching runs on the host."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        classes, boxes = model(batch["images"])
        return F.cross_entropy(classes.flatten(0, 1), batch["labels"].flatten()) + 5 * F.l1_loss(
            boxes, batch["boxes"]
        )

    def batch(samples: int) -> dict[str, Tensor]:
        return {
            "images": torch.zeros(samples, 3, 800, 800),
            "labels": torch.zeros(samples, 100, dtype=torch.long),
            "boxes": torch.zeros(samples, 100, 4),
        }

    return bf.Job(name="detr", model=Detr, loss=loss, batch=batch, optimizer="adamw")


def unet(*, small: bool = False) -> bf.Job:
    """The U-Net of Stable Diffusion 1.5 at 512 by 512 pixels: latents of 64 by 64, text of 77 tokens.

    Its configuration is unet/config.json of stable-diffusion-v1-5, those of the classes elsewhere.
    """
    sizes: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
    if small:
        sizes |= {"block_out_channels": (32, 64, 64, 64), "layers_per_block": 1}

    def model() -> nn.Module:
        from diffusers import UNet2DConditionModel

        return UNet2DConditionModel(**sizes)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        predicted = model(batch["latents"], batch["timesteps"], batch["text"]).sample
        return F.mse_loss(predicted.float(), batch["noise"].float())

    def batch(samples: int) -> dict[str, Tensor]:
        return {
            "latents": torch.zeros(samples, 4, 64, 64),
            "timesteps": torch.zeros(samples, dtype=torch.long),
            "text": torch.zeros(samples, 77, 768),
            "noise": torch.zeros(samples, 4, 64, 64),
        }

    return bf.Job(
        name="unet of stable diffusion 1.5" + (", small" if small else ""),
        model=model,
        loss=loss,
        batch=batch,
        optimizer="adamw",
    )
