"""The models, batches and training loops of the public runs that `gpu_truth.py` predicts.

The runs are those of xMem (Middleware 2025; github.com/Stone-ResearchLife/xMem): torch 2.6, transformers 4.48,
fp32, CIFAR-10 resized to 86 × 86 for CNNs, wikitext-2 cut at 128 tokens for transformers. What they do is
written here anew, after their description: the loop keeps the previous outputs and loss until the next forward
returns, steps the optimizer four times and clears gradients where the run's mode says.

Three things that transformers does otherwise since then are done as then: a cache keeps the first states it is
given instead of copying them, attention runs on contiguous copies of query, key and value, and shared heads are
repeated. Their requirements say "~=4.48"; attention through this interface came to GPT-2 with 4.49.
"""

from __future__ import annotations

import torchvision_on_cpu  # noqa: F401  # before transformers, which looks for torchvision

# isort: split
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations import sdpa_attention
from transformers.optimization import Adafactor

import brimful as bf

# B samples, T tokens, V vocabulary

TOKENS = 128
IMAGE_SIZE = 86
CLASSES = 10
STEPS = 4
IGNORED = -100

_GPT2 = {"attn_implementation": "sdpa"}
_TEXT_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: model class, config class, what differs from the class's defaults in the published config.json
    "distilbert/distilgpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "n_layer": 6}),
    "openai-community/gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            **_GPT2,
            "n_layer": 10,
            "n_positions": 2048,
            "n_inner": 3072,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "EleutherAI/gpt-neo-125M": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
            "attn_implementation": "eager",
        },
    ),
    "facebook/opt-125m": (
        "OPTForCausalLM",
        "OPTConfig",
        {"word_embed_proj_dim": 768, "attn_implementation": "sdpa"},
    ),
    "T5-small": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"decoder_start_token_id": 0, "attn_implementation": "eager"},
    ),
    "Qwen/Qwen3-4B": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "attn_implementation": "sdpa",
        },
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
        },
    ),
    "google/gemma-2-2b-it": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "attn_implementation": "eager",
        },
    ),
    "meta-llama/Llama-3.2-3B-Instruct": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "attn_implementation": "sdpa",
        },
    ),
}
_IMAGE_MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "ConvNeXtBase": lambda models: models.convnext_base(),
    "ConvNeXtTiny": lambda models: models.convnext_tiny(),
    "MnasNet": lambda models: models.MNASNet(alpha=1.0, num_classes=CLASSES),
    "MobeNetV3Large": lambda models: models.mobilenet_v3_large(num_classes=CLASSES),
    "MobeNetV3Small": lambda models: models.mobilenet_v3_small(num_classes=CLASSES),
    "RegNetY400MF": lambda models: models.regnet_y_400mf(),
    "RegNetX400MF": lambda models: models.regnet_x_400mf(),
    "ResNet101": lambda models: models.resnet101(),
    "ResNet152": lambda models: models.resnet152(),
    "VGG16": lambda models: models.vgg16(),
    "VGG19": lambda models: models.vgg19(),
    "MobileNetV2": lambda models: models.mobilenet_v2(),
}


def _keep_first_states(layer: Any, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
    """What a layer's cache did with its first states in transformers 4.48: keep them; it copies them today."""
    layer.lazy_initialization(key_states, value_states)
    layer.keys, layer.values = key_states, value_states
    return key_states, value_states


transformers.cache_utils.DynamicLayer.update = _keep_first_states


def _contiguous_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> Any:
    """Attention as the interface of transformers 4.49 to 4.52 called it: on contiguous copies, heads repeated.

    OPT, which did not use the interface yet, made its copies before it cached them.
    """
    if type(module).__name__ == "OPTAttention":
        return sdpa_attention.sdpa_attention_forward(module, query, key, value, mask, **options)
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = (sdpa_attention.repeat_kv(states, groups) for states in (key, value))
    y = F.scaled_dot_product_attention(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        is_causal=mask is None,
    )
    return y.transpose(1, 2).contiguous(), None


transformers.AttentionInterface.register("sdpa", _contiguous_sdpa)


def job_of_run(model: str, optimizer: str, zero_grad_mode: int) -> bf.Job:
    """The job that one run trained, its own loop included."""
    if model in _IMAGE_MODELS:
        return bf.Job(
            model=partial(_image_model, model),
            loss=_unused,
            batch=_images,
            loop=partial(_image_loop, optimizer, zero_grad_mode),
            name=model,
        )
    return bf.Job(
        model=partial(_text_model, model),
        loss=_unused,
        batch=_tokens,
        loop=partial(_text_loop, optimizer, zero_grad_mode),
        name=model,
    )


def is_image_model(model: str) -> bool:
    """Whether a run trains on images; else on text."""
    return model in _IMAGE_MODELS


def _unused(_model: nn.Module, _batch: Any) -> Tensor:
    raise AssertionError("these jobs bring their own loop")


def _image_model(name: str) -> nn.Module:
    import torchvision.models

    return _IMAGE_MODELS[name](torchvision.models)


def _images(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, IMAGE_SIZE, IMAGE_SIZE), torch.randint(0, CLASSES, (samples,))


def _text_model(name: str) -> nn.Module:
    model_class, config_class, changes = _TEXT_MODELS[name]
    changes = dict(changes)
    attention = changes.pop("attn_implementation")
    config = getattr(transformers, config_class)(**changes, attn_implementation=attention)
    model: nn.Module = getattr(transformers, model_class)(config)
    return model


def _tokens(samples: int) -> dict[str, Tensor]:
    """A batch padded to its longest text, which is cut at 128 tokens; all but the first are shorter."""
    input_ids = torch.randint(10, 30000, (samples, TOKENS))
    attention_mask = torch.ones_like(input_ids)
    labels = input_ids.clone()
    if samples > 1:
        attention_mask[1:, TOKENS // 2 :] = 0
        labels[1:, TOKENS // 2 :] = IGNORED
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def _make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "Adafactor":
        return Adafactor(model.parameters(), lr=1e-3, relative_step=False)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    return made


def _image_loop(
    optimizer_name: str, zero_grad_mode: int, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> None:
    optimizer = _make_optimizer(optimizer_name, model)
    for inputs, labels in batches:
        if zero_grad_mode == 0:
            optimizer.zero_grad()
        inputs, labels = inputs.to("cuda"), labels.to("cuda")
        outputs = model(inputs)
        loss = F.cross_entropy(outputs, labels)
        if zero_grad_mode == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _, _predicted = torch.max(outputs, 1)
        if zero_grad_mode == 2:
            optimizer.zero_grad()


def _text_loop(
    optimizer_name: str, zero_grad_mode: int, model: nn.Module, batches: Iterable[dict[str, Tensor]]
) -> None:
    optimizer = _make_optimizer(optimizer_name, model)
    for batch in batches:
        if zero_grad_mode == 0:
            optimizer.zero_grad()
        batch = {key: value.to("cuda") for key, value in batch.items()}
        outputs = model(**batch)
        loss = outputs.loss
        if zero_grad_mode == 1:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if zero_grad_mode == 2:
            optimizer.zero_grad()
