"""The jobs that plans are compared on: nine architectures at the sizes people train them at, and small ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from brimful import Job, find_architecture
from brimful.settings import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """One job and how it would be trained if memory were no matter."""

    name: str
    make: Callable[[], Job]
    global_batch_size: int
    precision: Precision = Precision.BF16


class LanguageModel(nn.Module):
    """Embedding, LSTM layers one by one, head; (B, T) tokens in, (B, T, V) logits out."""

    def __init__(self, vocabulary: int = 33_000, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        return self.head(x)


def lstm_language_model(length: int = 256, vocabulary: int = 33_000) -> Job:
    """Next-token prediction with an LSTM."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return Job(
        name="lstm-lm",
        model=lambda: LanguageModel(vocabulary),
        loss=loss,
        batch=lambda n: torch.zeros(n, length, dtype=torch.long),
        optimizer="adamw",
    )


def t5(length: int = 512) -> Job:
    """T5-base, an encoder and a decoder."""

    def model() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            d_model=768,
            d_kv=64,
            d_ff=3072,
            num_layers=12,
            num_heads=12,
            use_cache=False,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
        return T5ForConditionalGeneration(config)

    def batch(n: int) -> dict[str, Tensor]:
        tokens = torch.ones(n, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return Job(
        name="t5-base",
        model=model,
        loss=lambda model, batch: model(**batch).loss,
        batch=batch,
        optimizer="adamw",
    )


JOBS = (
    PlannedJob(name="bert-large", make=lambda: find_architecture("bert-large"), global_batch_size=32),
    PlannedJob(name="gpt2-medium", make=lambda: find_architecture("gpt2-medium"), global_batch_size=16),
    PlannedJob(name="llama-3.2-1b", make=lambda: find_architecture("llama-3.2-1b"), global_batch_size=8),
    PlannedJob(name="vit-large", make=lambda: find_architecture("vit-large"), global_batch_size=128),
    PlannedJob(name="resnet50", make=lambda: find_architecture("resnet50"), global_batch_size=256),
    PlannedJob(name="resnet152", make=lambda: find_architecture("resnet152"), global_batch_size=128),
    PlannedJob(name="unet", make=lambda: find_architecture("unet"), global_batch_size=16),
    PlannedJob(name="t5-base", make=t5, global_batch_size=32),
    PlannedJob(name="lstm-lm", make=lstm_language_model, global_batch_size=64),
)

VOCABULARY, LENGTH = 1000, 128


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


def _small(name: str, make: Callable[[], Job], global_batch_size: int) -> PlannedJob:
    return PlannedJob(name=name, make=make, global_batch_size=global_batch_size, precision=Precision.FP32)


SMALL_JOBS = (
    _small("bert", bert, 32),
    _small("gpt2", gpt2, 32),
    _small("llama", llama, 32),
    _small("vit", vit, 64),
    _small("resnet50", lambda: find_architecture("resnet50", image_size=64), 64),
    _small("unet", lambda: find_architecture("unet", image_size=64), 8),
    _small("lstm", lambda: lstm_language_model(length=64, vocabulary=VOCABULARY), 32),
)
"""Small enough to train on a CPU, with more activations than weights, so that budgets bind."""
