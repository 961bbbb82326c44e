"""Jobs small enough to train on a CPU, with more activations than weights, so that budgets bind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful import Job, find_architecture
from plan.jobs import lstm_language_model

VOCABULARY, LENGTH = 1000, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallJob:
    """One job and its global batch."""

    name: str
    make: Callable[[], Job]
    global_batch_size: int


def _text(name: str, model: Callable[[], nn.Module]) -> Job:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())

    def batch(n: int) -> Tensor:
        return torch.randint(VOCABULARY, (n, LENGTH))

    return Job(name=name, model=model, loss=loss, batch=batch, optimizer="adamw")


def bert() -> Job:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    return _text("bert, 6 × 256", lambda: BertForMaskedLM(config))


def gpt2() -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=256, n_layer=6, n_head=4, use_cache=False)
    return _text("gpt2, 6 × 256", lambda: GPT2LMHeadModel(config))


def llama() -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return _text("llama, 6 × 256", lambda: LlamaForCausalLM(config))


def vit() -> Job:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
        num_labels=10,
    )
    return _images("vit, 6 × 256", lambda: ViTForImageClassification(config), 64, lambda out: out.logits)


def _images(name: str, model: Callable[[], nn.Module], size: int, logits: Callable[[Any], Tensor]) -> Job:
    return Job(
        name=name,
        model=model,
        loss=lambda model, batch: F.cross_entropy(logits(model(batch["x"])), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, 3, size, size), "y": torch.randint(10, (n,))},
        optimizer="adamw",
    )


SMALL_JOBS = (
    SmallJob(name="bert", make=bert, global_batch_size=32),
    SmallJob(name="gpt2", make=gpt2, global_batch_size=32),
    SmallJob(name="llama", make=llama, global_batch_size=32),
    SmallJob(name="vit", make=vit, global_batch_size=64),
    SmallJob(name="resnet50", make=lambda: find_architecture("resnet50", image_size=64), global_batch_size=64),
    SmallJob(name="unet", make=lambda: find_architecture("unet", image_size=64), global_batch_size=8),
    SmallJob(
        name="lstm", make=lambda: lstm_language_model(length=64, vocabulary=VOCABULARY), global_batch_size=32
    ),
)
