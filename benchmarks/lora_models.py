"""Small language models with adapters over frozen, possibly quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import brimful as bf
from brimful.models.adapters import quantise_linear_layers

VOCABULARY = 512
_SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
_FEW_KEYS = {"num_key_value_heads": 2}
_SCALES = 32
"""Scales that share one of their own; their number must be a multiple of it."""
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CAUSAL_LM", _SHAPE | _FEW_KEYS),
    "mistral": ("CAUSAL_LM", _SHAPE | _FEW_KEYS),
    "qwen2": ("CAUSAL_LM", _SHAPE | _FEW_KEYS),
    "gemma": ("CAUSAL_LM", _SHAPE | _FEW_KEYS | {"head_dim": 32}),
    "phi": ("CAUSAL_LM", _SHAPE),
    "stablelm": ("CAUSAL_LM", _SHAPE | {"num_key_value_heads": 4}),
    "gpt_neox": ("CAUSAL_LM", _SHAPE),
    "falcon": ("CAUSAL_LM", _SHAPE),
    "opt": (
        "CAUSAL_LM",
        {"hidden_size": 128, "word_embed_proj_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "ffn_dim": 256},
    ),
    "bloom": ("CAUSAL_LM", {"hidden_size": 128, "n_layer": 2, "n_head": 4}),
    "gpt2": ("CAUSAL_LM", {"n_embd": 128, "n_layer": 2, "n_head": 4}),
    "bert": ("TOKEN_CLS", _SHAPE),
    "t5": ("SEQ_2_SEQ_LM", {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 2, "num_heads": 4}),
}  # fmt: skip
"""By the name that transformers has for a family: peft's task, and what makes its configuration small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How the frozen weights are kept."""

    dtype: torch.dtype = torch.float32
    quantised: str | None = None
    """nf4, fp4 or int8 by bitsandbytes, or a format of torchao; None as they are."""
    is_double: bool = False
    """Whether the scales of 4-bit weights are quantised too."""
    is_prepared: bool = False
    """By `peft.prepare_model_for_kbit_training`, with gradient checkpointing."""


WEIGHTS = {
    "fp32": Weights(),
    "fp32, inputs require gradients, checkpointed": Weights(is_prepared=True),
    "bf16": Weights(dtype=torch.bfloat16),
    "nf4": Weights(quantised="nf4"),
    "nf4, double": Weights(quantised="nf4", is_double=True),
    "nf4, double, checkpointed": Weights(quantised="nf4", is_double=True, is_prepared=True),
    "nf4, double, bf16": Weights(dtype=torch.bfloat16, quantised="nf4", is_double=True),
    "fp4": Weights(quantised="fp4"),
    "int8": Weights(quantised="int8"),
    "int8, checkpointed": Weights(quantised="int8", is_prepared=True),
}

TORCHAO = {
    "int8": Weights(quantised="torchao int8"),
    "int8, checkpointed": Weights(quantised="torchao int8", is_prepared=True),
    "int8, bf16": Weights(dtype=torch.bfloat16, quantised="torchao int8"),
    "int8, groups": Weights(quantised="torchao int8, groups"),
    "int4 in bytes": Weights(quantised="torchao int4 in bytes"),
    "nf4": Weights(quantised="torchao nf4"),
}
"""Formats of torchao that have a gradient: 8 bits with a scale for each row or for groups of 32, 4 bits that
are kept in 8, 4-bit normal floats. Its packed int4 has none; see docs/howto/lora.md."""


def base_model(family: str) -> nn.Module:
    """Random weights, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
    from transformers import AutoModelForTokenClassification as AutoModelForTokens

    task, options = FAMILIES[family]
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, use_cache=False, **_IDS, **options)
    config.decoder_start_token_id = 2
    kinds = {"CAUSAL_LM": AutoModelForCausalLM, "TOKEN_CLS": AutoModelForTokens}
    model: nn.Module = kinds.get(task, AutoModelForSeq2SeqLM).from_config(config)
    return model


def quantise(model: nn.Module, weights: Weights) -> nn.Module:
    """Linear layers but the head become quantised ones."""
    assert weights.quantised is not None
    if weights.quantised.startswith("torchao "):
        _quantise_by_torchao(model, weights.quantised.removeprefix("torchao "))
        return model
    quantise_linear_layers(model, f"{weights.quantised}-dq" if weights.is_double else weights.quantised)
    return model


def _quantise_by_torchao(model: Any, name: str) -> None:
    """Linear layers but the head get weights of one of torchao's classes."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_, to_nf4

    if name == "nf4":
        for layer in model.base_model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, _SCALES), requires_grad=False)
        return
    config = {
        "int8": Int8WeightOnlyConfig(),
        "int8, groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int4 in bytes": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    }[name]
    quantize_(model.base_model, config)


def adapted_model(family: str, weights: Weights, adapter: str = "lora") -> nn.Module:
    """A model with the adapter, whose weights alone are trained."""
    from peft import IA3Config, LoraConfig, get_peft_model, prepare_model_for_kbit_training

    torch.manual_seed(0)
    model = base_model(family).to(weights.dtype)
    if weights.quantised is not None:
        model = quantise(model, weights)
    if weights.is_prepared:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    task = FAMILIES[family][0]
    targets = ["query", "key", "value", "dense"] if task == "TOKEN_CLS" else "all-linear"
    config = (
        IA3Config(task_type=task)
        if adapter == "ia3"
        else LoraConfig(r=8, target_modules=targets, task_type=task, use_dora=adapter == "dora")
    )
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def tokens(count: int) -> Tensor:
    """(B, T) token ids."""
    return torch.randint(3, VOCABULARY, (count, 32))


def adapted_job(family: str, weights: Weights, adapter: str = "lora", *, is_built: bool = False) -> bf.Job:
    """A job that trains the adapter; the model is there already, or made by a function."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        labels = batch % 2 if FAMILIES[family][0] == "TOKEN_CLS" else batch
        result: Tensor = model(input_ids=batch, labels=labels).loss
        return result

    def build() -> nn.Module:
        return adapted_model(family, weights, adapter)

    model: nn.Module | Callable[[], nn.Module] = build() if is_built else build
    return bf.Job(model=model, loss=loss, batch=tokens, name=f"{family} {adapter}")
