"""Scripts that train on texts."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from public.case import script


def texts(n: int, tokens: int, vocabulary: int, *, least: int = 0) -> dict[str, Tensor]:
    """n texts of one length, and what follows each token."""
    made = torch.randint(least, vocabulary, (n, tokens + 1))
    return {"x": made[:, :-1].contiguous(), "y": made[:, 1:].contiguous()}


def adam(parameters: list[nn.Parameter], lr: float, **options: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=lr, **options)  # type: ignore[arg-type]


@script("karpathy/minGPT", "37baab71b9abea1b76ab957409a1cc2fbfba8a26", "projects/chargpt/chargpt.py", 16)
def character_gpt() -> bf.Job:
    from mingpt.model import GPT
    from mingpt.trainer import Trainer

    def model() -> nn.Module:
        config = GPT.get_default_config()
        config.merge_from_dict({"model_type": "gpt-micro", "vocab_size": 65, "block_size": 64})
        return GPT(config)

    return bf.Job(
        model=model,
        loss=lambda model, batch: model(batch["x"], batch["y"])[1],
        batch=partial(texts, tokens=64, vocabulary=65),
        optimizer=lambda model: model.configure_optimizers(Trainer.get_default_config()),
    )


@script("karpathy/makemore", "988aa59e4d8fefa526d06f3b453ad116258398d4", "makemore.py", 64)
def names_by_a_gru() -> bf.Job:
    """Labels after a name's end are -1, which the loss ignores."""
    from makemore import RNN, ModelConfig

    def batch(n: int) -> dict[str, Tensor]:
        made = texts(n, 16, 27, least=1)
        ends = torch.randint(3, 16, (n, 1))
        made["y"][torch.arange(16) > ends] = -1
        return made

    return bf.Job(
        model=lambda: RNN(ModelConfig(block_size=16, vocab_size=27), cell_type="gru"),
        loss=lambda model, batch: model(batch["x"], batch["y"])[1],
        batch=batch,
        count=lambda batch: (batch["y"] != -1).sum(),
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=5e-4, weight_decay=0.01, betas=(0.9, 0.99), eps=1e-8),
    )


@script("johnma2006/mamba-minimal", "03de542a36d873f6e6c4057ad687278cc6ae944d", "model.py", 8)
def mamba() -> bf.Job:
    """The repository has the model; its training is the usual one of a language model."""
    from model import Mamba, ModelArgs

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return bf.Job(
        model=lambda: Mamba(ModelArgs(d_model=48, n_layer=3, vocab_size=128)),
        loss=loss,
        batch=partial(texts, tokens=32, vocabulary=128),
    )


@script("Shawn1993/cnn-text-classification-pytorch", "93415f08168a1ae60635320569f6eca0ae3a40bb", "train.py", 64)
def sentences_by_a_cnn() -> bf.Job:
    from model import CNN_Text

    args = Namespace(
        embed_num=2000,
        embed_dim=64,
        class_num=2,
        kernel_num=50,
        kernel_sizes=[3, 4, 5],
        dropout=0.5,
        static=False,
    )
    return bf.Job(
        model=lambda: CNN_Text(args),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randint(1, 2000, (n, 40)), "y": torch.randint(0, 2, (n,))},
        optimizer=partial(adam, lr=0.001),
    )


@script("Jamie-Stirling/RetNet", "a5841a3ebffd181c7ec1d964b46060519df4b6c8", "src/retnet.py", 16, folder="src")
def language_model_by_retention() -> bf.Job:
    """The repository has the layers; words and their loss are the usual ones of a language model."""
    from retnet import RetNet

    class Model(nn.Module):
        def __init__(self, width: int = 32) -> None:
            super().__init__()
            self.words = nn.Embedding(256, width)
            self.layers = RetNet(layers=3, hidden_dim=width, ffn_size=2 * width, heads=4, double_v_dim=True)
            self.head = nn.Linear(width, 256)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.layers(self.words(x)))
            return logits

    return bf.Job(
        model=Model,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten()),
        batch=partial(texts, tokens=48, vocabulary=256),
        optimizer=partial(adam, lr=0.001),
    )


@script("karpathy/llama2.c", "350e04fe35433e6d2941dce5a1f53308f87058eb", "train.py", 16)
def stories_by_a_small_llama() -> bf.Job:
    """The loss is an attribute of the model, which forward sets."""
    from model import ModelArgs, Transformer

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        model(batch["x"], batch["y"])
        found: Tensor = model.last_loss
        return found

    return bf.Job(
        model=lambda: Transformer(
            ModelArgs(
                dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=32, max_seq_len=64
            )
        ),
        loss=loss,
        batch=partial(texts, tokens=64, vocabulary=512),
        optimizer=lambda model: model.configure_optimizers(1e-1, 5e-4, (0.9, 0.95), "cpu"),
    )


@script(
    "jadore801120/attention-is-all-you-need-pytorch",
    "132907dd272e2cc92e3c10e6c4e783a87ff8893d",
    "train.py",
    16,
    absent=("dill", "torchtext", "torchtext.data", "torchtext.datasets"),
)
def translator() -> bf.Job:
    """The loss is a sum over words that are not padding, smoothed; padding differs between sentences."""
    from transformer.Models import Transformer

    from train import cal_loss

    def batch(n: int) -> dict[str, Tensor]:
        made = {"source": torch.randint(2, 300, (n, 24)), "target": torch.randint(2, 300, (n, 25))}
        for words in made.values():
            words[torch.arange(words.shape[1]) > torch.randint(8, 24, (n, 1))] = 1
        return made

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        target, gold = batch["target"][:, :-1], batch["target"][:, 1:].contiguous().view(-1)
        found: Tensor = cal_loss(model(batch["source"], target), gold, 1, smoothing=True)
        return found

    return bf.Job(
        model=lambda: Transformer(
            300, 300, 1, 1, d_word_vec=64, d_model=64, d_inner=128, n_layers=2, n_head=4, d_k=16, d_v=16
        ),
        loss=loss,
        batch=batch,
        reduction="sum",
        optimizer=partial(adam, lr=1e-4, betas=(0.9, 0.98), eps=1e-09),
    )


@script(
    "codertimo/BERT-pytorch", "d10dc4f9d5a6f2ca74380f62039526eb7277c671", "bert_pytorch/trainer/pretrain.py", 16
)
def bert_of_two_sentences() -> bf.Job:
    """Two means are added: one over sentences, one over masked words, whose number differs; both ignore 0."""
    from bert_pytorch.model import BERT, BERTLM

    criterion = nn.NLLLoss(ignore_index=0)

    def batch(n: int) -> dict[str, Tensor]:
        words = torch.randint(5, 400, (n, 32))
        return {
            "bert_input": words,
            "segment_label": torch.arange(32).gt(15).long().expand(n, 32) + 1,
            "bert_label": torch.where(torch.rand(n, 32) < 0.15, words, 0),
            "is_next": torch.randint(0, 2, (n,)),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        next_sentence, masked_words = model(batch["bert_input"], batch["segment_label"])
        next_loss: Tensor = criterion(next_sentence, batch["is_next"])
        return next_loss + criterion(masked_words.transpose(1, 2), batch["bert_label"])

    return bf.Job(
        model=lambda: BERTLM(BERT(400, hidden=64, n_layers=3, attn_heads=4), 400),
        loss=loss,
        batch=batch,
        optimizer=partial(adam, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.01),
    )


@script("locuslab/TCN", "2f8c2b817050206397458dfd1f5a25ce8a32fe65", "TCN/word_cnn/word_cnn_test.py", 16)
def words_by_temporal_convolutions() -> bf.Job:
    """Convolutions under weight norm; the loss leaves the first half of each text out."""
    from TCN.word_cnn.model import TCN

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        output = model(batch["x"])[:, 24:].contiguous().view(-1, 300)
        return F.cross_entropy(output, batch["y"][:, 24:].contiguous().view(-1))

    return bf.Job(
        model=lambda: TCN(48, 300, [48] * 4, dropout=0.45, emb_dropout=0.25, kernel_size=3, tied_weights=True),
        loss=loss,
        batch=partial(texts, tokens=48, vocabulary=300),
        optimizer=lambda ps: torch.optim.SGD(ps, lr=4),
    )
