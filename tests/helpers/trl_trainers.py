"""Small trainers of TRL: their tokenizer, texts and models are made here, without a network."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from helpers.trainers import arguments

WORDS, LONGEST = 90, 24
"""Words of the vocabulary, and of the longest text."""


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def llama(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=dropout,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def words(generator: random.Random, count: int) -> str:
    return " ".join(f"w{generator.randrange(WORDS)}" for _ in range(count))


def texts(samples: int = 40) -> Dataset:
    """Of 6 to 23 words, and one of 24."""
    generator = random.Random(0)
    lengths = [generator.randrange(6, LONGEST) for _ in range(samples)]
    lengths[28 % samples] = LONGEST
    return Dataset.from_dict({"text": [words(generator, length) for length in lengths]})


def questions(samples: int = 40) -> Dataset:
    """Prompts and completions; the loss is of the completions."""
    generator = random.Random(0)
    lengths = [generator.randrange(3, LONGEST // 2) for _ in range(samples)]
    lengths[28 % samples] = LONGEST // 2
    return Dataset.from_dict(
        {
            "prompt": [words(generator, length) for length in lengths],
            "completion": [" " + words(generator, length) for length in lengths],
        }
    )


def preferences(samples: int = 40) -> Dataset:
    generator = random.Random(0)
    lengths = [generator.randrange(3, LONGEST // 2) for _ in range(samples)]
    lengths[28 % samples] = LONGEST // 2
    return Dataset.from_dict(
        {
            "prompt": [words(generator, length) for length in lengths],
            "chosen": [" " + words(generator, length) for length in lengths],
            "rejected": [" " + words(generator, max(length - 2, 1)) for length in lengths],
        }
    )


def reward(folder: Path, dropout: float = 0.1, **changes: Any) -> RewardTrainer:
    torch.manual_seed(0)
    config = llama(dropout).config
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    settings = {"bf16": False, "gradient_checkpointing": False, "max_length": 64, **changes}
    more = {name: settings.pop(name) for name in ("callbacks",) if name in settings}
    return RewardTrainer(
        model=model,
        args=RewardConfig(**arguments(folder, **settings)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        **more,
    )


def sft(
    folder: Path, model: nn.Module | None = None, dataset: Dataset | None = None, **changes: Any
) -> SFTTrainer:
    """8 texts a step, in float32 and without checkpointing unless `changes` say otherwise."""
    more = {name: changes.pop(name) for name in ("callbacks", "peft_config") if name in changes}
    settings = {"bf16": False, "gradient_checkpointing": False, "max_length": 64, **changes}
    return SFTTrainer(
        model=llama() if model is None else model,
        args=SFTConfig(**arguments(folder, **settings)),
        train_dataset=texts() if dataset is None else dataset,
        processing_class=tokenizer(),
        **more,
    )


def dpo(
    folder: Path, model: nn.Module | None = None, ref_model: nn.Module | None = None, **changes: Any
) -> DPOTrainer:
    more = {name: changes.pop(name) for name in ("callbacks", "peft_config") if name in changes}
    settings = {"bf16": False, "gradient_checkpointing": False, "max_length": 64, **changes}
    return DPOTrainer(
        model=llama() if model is None else model,
        ref_model=ref_model,
        args=DPOConfig(**arguments(folder, **settings)),
        train_dataset=preferences(),
        processing_class=tokenizer(),
        **more,
    )
