"""Small trainers of sentence-transformers: tokenizer, texts and models are made here, without a network."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from helpers.trainers import arguments

WORDS, LONGEST = 90, 24


def save_bert(folder: Path, dropout: float) -> None:
    """A BERT with random weights and its tokenizer, as `from_pretrained` reads them."""
    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{index}" for index in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )
    config = BertConfig(
        vocab_size=len(names),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def embedder(folder: Path, dropout: float = 0.1) -> SentenceTransformer:
    """Mean-pooled embeddings of a small BERT."""
    saved = folder / f"bert-{dropout}"
    if not saved.exists():
        save_bert(saved, dropout)
    torch.manual_seed(0)
    transformer = Transformer(str(saved), max_seq_length=64)
    return SentenceTransformer(modules=[transformer, Pooling(32)], device="cpu")


def sentences(columns: tuple[str, ...], label: Callable[[random.Random], Any] | None = None) -> Dataset:
    """40 rows of texts of 4 to 23 words; one text of 24 words in each column, in different rows."""
    generator = random.Random(0)
    rows: dict[str, list[Any]] = {}
    for place, column in enumerate(columns):
        lengths = [generator.randrange(4, LONGEST) for _ in range(40)]
        lengths[20 + place] = LONGEST
        rows[column] = [" ".join(f"w{generator.randrange(WORDS)}" for _ in range(n)) for n in lengths]
    if label is not None:
        rows["label"] = [label(generator) for _ in range(40)]
    return Dataset.from_dict(rows)


def pairs() -> Dataset:
    return sentences(("anchor", "positive"))


def scored() -> Dataset:
    return sentences(("first", "second"), random.Random.random)


def trainer(
    folder: Path,
    loss: Callable[[SentenceTransformer], nn.Module],
    dataset: Any,
    *,
    dropout: float = 0.1,
    **changes: Any,
) -> SentenceTransformerTrainer:
    """8 samples a step."""
    more = {name: changes.pop(name) for name in ("callbacks", "eval_dataset") if name in changes}
    model = embedder(folder, dropout)
    return SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(**arguments(folder, **changes)),
        train_dataset=dataset,
        loss=loss(model),
        **more,
    )
