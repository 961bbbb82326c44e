"""Built-in text models: BERT, XLM-RoBERTa, GPT-2 and Llama 3, with random weights.

| names | task | options |
|---|---|---|
| `bert-base`, `bert-large`, `xlm-roberta-base`, `xlm-roberta-large` | sequence classification | \
`sequence_length` 512, `num_labels` 2, `num_hidden_layers`, `hidden_size`, `vocab_size`, `pad_token_id` |
| `gpt2`, `gpt2-medium`, `gpt2-large`, `gpt2-xl` | next token | `sequence_length` 1024, `num_hidden_layers`, \
`hidden_size`, `vocab_size` |
| `llama-3.2-1b`, `llama-3-8b` | next token | `sequence_length` 2048, `num_hidden_layers`, \
`hidden_size`, `vocab_size` |

A batch is `input_ids` and `labels`; its sequences are full, without padding or a mask. The loss is the
model's own and the optimizer AdamW. All others are as published unless given.

The classes are those of transformers. Below is every hyper-parameter that sizes a tensor or changes an
operation, with its source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from brimful.job import Batch, Job
from brimful.models.checks import check_range
from brimful.models.huggingface import Published, build_model, own_loss

if TYPE_CHECKING:
    from torch import Tensor, nn

# B samples, T tokens (`sequence_length`)

_MOST_TOKENS = 512  # positions of every classifier
_IGNORED_LABEL = -100  # transformers' and F.cross_entropy's ignore_index

_BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def _bert(sizes: dict[str, Any]) -> Published:
    """Devlin et al. 2018, BERT, section 3; config.json of google-bert/bert-{base,large}-uncased."""
    return Published(
        config_class="BertConfig",
        model_class="BertForSequenceClassification",
        config=sizes
        | {
            "vocab_size": 30522,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
        },
    )


def _xlm_roberta(sizes: dict[str, Any]) -> Published:
    """Conneau et al. 2019, XLM-R, section 3; config.json of FacebookAI/xlm-roberta-{base,large}."""
    return Published(
        config_class="XLMRobertaConfig",
        model_class="XLMRobertaForSequenceClassification",
        config=sizes
        | {
            "vocab_size": 250002,
            "max_position_embeddings": 514,  # positions are counted from pad_token_id + 1: 512 are usable
            "type_vocab_size": 1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
            "layer_norm_eps": 1e-5,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
    )


def _gpt2(layers: int, width: int, heads: int) -> Published:
    """Radford et al. 2019, GPT-2, table 2; heads and dropout: config.json of openai-community/gpt2*."""
    return Published(
        config_class="GPT2Config",
        model_class="GPT2LMHeadModel",
        causal=True,
        config={
            "num_hidden_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
            "activation_function": "gelu_new",
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
    )


def _llama3(**sizes: Any) -> Published:
    """Grattafiori et al. 2024, The Llama 3 Herd of Models, table 3; config.json of meta-llama/*."""
    return Published(
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        causal=True,
        config=sizes
        | {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "use_cache": False,
        },
    )


# config.json of meta-llama/Llama-3.2-1B
_LLAMA_3_2_1B = _llama3(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
)
# config.json of meta-llama/Meta-Llama-3-8B
_LLAMA_3_8B = _llama3(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)


def _classifier_job(
    name: str,
    published: Published,
    *,
    sequence_length: int = 512,
    num_labels: int = 2,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    pad_token_id: int | None = None,
) -> Job:
    check_range(name, "sequence_length", sequence_length, 1, _MOST_TOKENS)
    check_range(name, "num_labels", num_labels, 2)
    # ids from behind the padding id, which would say that a sequence is padded
    padding = published.config["pad_token_id"] if pad_token_id is None else pad_token_id
    check_range(name, "pad_token_id", padding, 0)
    tokens = range(padding + 1, _vocabulary(name, published, vocab_size, least=padding + 2))

    resizing = published.resized(name, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size)

    def build() -> nn.Module:
        return build_model(
            name,
            published,
            num_labels=num_labels,
            **resizing,
            vocab_size=tokens.stop,
            pad_token_id=padding,
            problem_type="single_label_classification",  # else the first forward writes it into the config
        )

    def make_samples(samples: int) -> Batch:
        return {
            "input_ids": torch.randint(tokens.start, tokens.stop, (samples, sequence_length)),  # (B, T)
            "labels": torch.randint(0, num_labels, (samples,)),  # (B,)
        }

    return Job(model=build, loss=own_loss, batch=make_samples, name=name)


def _language_model_job(
    name: str,
    published: Published,
    *,
    sequence_length: int,
    num_hidden_layers: int | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
) -> Job:
    # at least 2 tokens: the first one is never a label
    check_range(name, "sequence_length", sequence_length, 2, published.config["max_position_embeddings"])
    tokens = _vocabulary(name, published, vocab_size, least=2)

    resizing = published.resized(name, num_hidden_layers=num_hidden_layers, hidden_size=hidden_size)

    def build() -> nn.Module:
        return build_model(
            name,
            published,
            without=()
            if vocab_size is None
            else ("bos_token_id", "eos_token_id"),  # they name tokens of its own
            **resizing,
            vocab_size=tokens,
        )

    def make_samples(samples: int) -> Batch:
        input_ids = torch.randint(0, tokens, (samples, sequence_length))  # (B, T)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    return Job(
        model=build,
        loss=own_loss,
        batch=make_samples,
        count=_count_predicted_tokens,
        counted="tokens",
        name=name,
    )


def _vocabulary(name: str, published: Published, asked: int | None, *, least: int) -> int:
    """Number of tokens that the model has embeddings of."""
    if asked is None:
        as_published: int = published.config["vocab_size"]
        return as_published
    check_range(name, "vocab_size", asked, least)
    return asked


def _count_predicted_tokens(batch: Batch) -> Tensor:
    """Label tokens that the next-token loss is a mean over: all but each sequence's first one."""
    predicted: Tensor = batch["labels"][:, 1:] != _IGNORED_LABEL  # (B, T - 1)
    return predicted.sum()


TEXT_CLASSIFIERS: dict[str, Callable[..., Job]] = {
    "bert-base": partial(_classifier_job, "bert-base", _bert(_BASE)),
    "bert-large": partial(_classifier_job, "bert-large", _bert(_LARGE)),
    "xlm-roberta-base": partial(_classifier_job, "xlm-roberta-base", _xlm_roberta(_BASE)),
    "xlm-roberta-large": partial(_classifier_job, "xlm-roberta-large", _xlm_roberta(_LARGE)),
}
"""Makes the job of each text classifier, by name."""

LANGUAGE_MODELS: dict[str, Callable[..., Job]] = {
    "gpt2": partial(_language_model_job, "gpt2", _gpt2(12, 768, 12), sequence_length=1024),
    "gpt2-medium": partial(_language_model_job, "gpt2-medium", _gpt2(24, 1024, 16), sequence_length=1024),
    "gpt2-large": partial(_language_model_job, "gpt2-large", _gpt2(36, 1280, 20), sequence_length=1024),
    "gpt2-xl": partial(_language_model_job, "gpt2-xl", _gpt2(48, 1600, 25), sequence_length=1024),
    "llama-3.2-1b": partial(_language_model_job, "llama-3.2-1b", _LLAMA_3_2_1B, sequence_length=2048),
    "llama-3-8b": partial(_language_model_job, "llama-3-8b", _LLAMA_3_8B, sequence_length=2048),
}
"""Makes the job of each language model, by name."""

TEXT_ARCHITECTURES = TEXT_CLASSIFIERS | LANGUAGE_MODELS
