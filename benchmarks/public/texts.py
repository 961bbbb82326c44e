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


@script(
    "Shawn1993/cnn-text-classification-pytorch", "93415f08168a1ae60635320569f6eca0ae3a40bb", "train.py", 64
)
def sentences_by_a_cnn() -> bf.Job:
    from model import CNN_Text

    args = Namespace(
        embed_num=2000, embed_dim=64, class_num=2, kernel_num=50, kernel_sizes=[3, 4, 5], dropout=0.5, static=False
    )
    return bf.Job(
        model=lambda: CNN_Text(args),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randint(1, 2000, (n, 40)), "y": torch.randint(0, 2, (n,))},
        optimizer=partial(adam, lr=0.001),
    )
