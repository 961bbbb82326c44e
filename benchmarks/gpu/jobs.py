"""The jobs that are recorded, each in its published size and in a toy one for runs without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful.job import Job
from brimful.models.huggingface import Published, build_model, own_loss
from brimful.models.vision import ResNet50, UNet

# B samples, T tokens, D width, R rank

Sizes = dict[str, Any]

GPT2: Sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50257}
GPT2_MEDIUM: Sizes = GPT2 | {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_TOY_GPT2: Sizes = GPT2 | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
LLAMA_1B: Sizes = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
LLAMA_FOUR_LAYERS: Sizes = LLAMA_1B | {"num_hidden_layers": 4}
_TOY_LLAMA: Sizes = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
T5_BASE: Sizes = {
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "vocab_size": 32128,
}
_TOY_T5: Sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
VIT_BASE: Sizes = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "image_size": 224,
}
VIT_LARGE: Sizes = VIT_BASE | {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_TOY_VIT: Sizes = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
}
_CLASSES = 1000


def gpt2(sizes: Sizes = GPT2, *, toy: bool = False) -> Job:
    """GPT-2 with its dropout of 0.1 and tied embeddings, 1024 tokens."""
    sizes, tokens = (_TOY_GPT2, 16) if toy else (sizes, 1024)
    fixed = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "use_cache": False}
    published = Published(
        config_class="GPT2Config", model_class="GPT2LMHeadModel", causal=True, config=sizes | fixed
    )
    return _next_token_job("gpt2", published, tokens)


def llama(sizes: Sizes = LLAMA_1B, *, toy: bool = False) -> Job:
    """Llama 3.2 with tied embeddings and shared key heads, 2048 tokens."""
    sizes, tokens = (_TOY_LLAMA, 16) if toy else (sizes, 2048)
    fixed = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "use_cache": False}
    published = Published(
        config_class="LlamaConfig", model_class="LlamaForCausalLM", causal=True, config=sizes | fixed
    )
    return _next_token_job("llama", published, tokens)


def t5(*, toy: bool = False) -> Job:
    """T5 with its dropout of 0.1: 512 tokens in, 128 out; attention adds learned biases."""
    sizes, tokens, targets = (_TOY_T5, 16, 8) if toy else (T5_BASE, 512, 128)
    fixed = {"decoder_start_token_id": 0, "tie_word_embeddings": True, "use_cache": False}
    published = Published(
        config_class="T5Config", model_class="T5ForConditionalGeneration", config=sizes | fixed
    )

    def make_samples(samples: int) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(2, sizes["vocab_size"], (samples, tokens)),
            "labels": torch.randint(2, sizes["vocab_size"], (samples, targets)),
        }

    # T5's attention is written out in Python; "eager" is what every release of transformers has for it.
    build = partial(_with_eager_attention, published)
    return Job(model=build, loss=own_loss, batch=make_samples, count=_label_count, name="t5")


def vit(sizes: Sizes = VIT_BASE, *, toy: bool = False) -> Job:
    """ViT with patches of 16 pixels."""
    sizes = _TOY_VIT if toy else sizes
    fixed = {
        "patch_size": 16,
        "num_channels": 3,
        "num_labels": _CLASSES,
        "problem_type": "single_label_classification",
    }
    published = Published(
        config_class="ViTConfig", model_class="ViTForImageClassification", config=sizes | fixed
    )

    def make_samples(samples: int) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(samples, 3, sizes["image_size"], sizes["image_size"]),
            "labels": torch.randint(0, _CLASSES, (samples,)),
        }

    return Job(model=partial(build_model, "vit", published), loss=own_loss, batch=make_samples, name="vit")


def resnet(*, toy: bool = False) -> Job:
    """ResNet-50 with SGD and momentum."""
    size = 16 if toy else 224

    def make_samples(samples: int) -> dict[str, Tensor]:
        return {"images": torch.randn(samples, 3, size, size), "labels": torch.randint(0, _CLASSES, (samples,))}

    model = _ToyResNet if toy else partial(ResNet50, _CLASSES)
    return Job(model=model, loss=_cross_entropy, batch=make_samples, optimizer="sgd", name="resnet50")


class _ToyResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = _normalised(3, 8, stride=2)
        self.blocks = nn.Sequential(*(_normalised(8, 8) for _ in range(3)))
        self.classifier = nn.Linear(8, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.classifier(x.mean(dim=(2, 3)))


def _normalised(channels: int, width: int, *, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    )


class _ToyUNet(UNet):
    WIDTHS = (4, 8, 16, 32, 64)


def unet(*, toy: bool = False) -> Job:
    """U-Net for two classes of pixels with SGD and momentum."""
    size, network = (32, _ToyUNet) if toy else (256, UNet)

    def make_samples(samples: int) -> dict[str, Tensor]:
        images = torch.randn(samples, 3, size, size)
        return {"images": images, "labels": torch.randint(0, 2, (samples, size, size))}

    model = partial(network, 2)
    return Job(model=model, loss=_cross_entropy, batch=make_samples, optimizer="sgd", name="unet")


def with_lora(job: Job, *, rank: int = 16, names: Collection[str] = ("q_proj", "v_proj")) -> Job:
    """The job with frozen weights and a low-rank sum on some Linear layers (Hu et al. 2021, LoRA)."""
    return replace(job, model=partial(_with_low_rank_sums, job.model, rank, tuple(names)))


def channels_last(job: Job) -> Job:
    """The job with weights and images in NHWC."""

    def build() -> nn.Module:
        return job.model().to(memory_format=torch.channels_last)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        images = batch["images"].contiguous(memory_format=torch.channels_last)
        return job.loss(model, batch | {"images": images})

    return replace(job, model=build, loss=loss)


class LowRankSum(nn.Module):
    """A frozen Linear plus a product of two small matrices, with dropout before it, as in peft."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


def _with_low_rank_sums(build: Callable[[], nn.Module], rank: int, names: tuple[str, ...]) -> nn.Module:
    model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LowRankSum(child, rank))
    return model


def _with_eager_attention(published: Published) -> nn.Module:
    import transformers

    config = getattr(transformers, published.config_class)(**published.config, attn_implementation="eager")
    return getattr(transformers, published.model_class)(config)


def _next_token_job(name: str, published: Published, tokens: int) -> Job:
    def make_samples(samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, published.config["vocab_size"], (samples, tokens))
        return {"input_ids": ids, "labels": ids.clone()}

    build = partial(build_model, name, published)
    return Job(model=build, loss=own_loss, batch=make_samples, count=_label_count, name=name)


def _label_count(batch: dict[str, Tensor]) -> int:
    return batch["labels"].numel()


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])
