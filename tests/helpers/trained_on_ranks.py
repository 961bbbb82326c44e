"""Trains one job on this rank, or alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from brimful.errors import UsageError
from brimful.job import Batch, Data, Job
from brimful.planner import Plan
from brimful.results import TrainingResult
from brimful.settings import Action, Parallelism, Settings, UnitAction
from brimful.trainer import Trainer

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH, IGNORED = 17, 12, 6, 8, -100
SAMPLES = 5 * GLOBAL_BATCH + 1
"""The last batch has one sample, so that a rank has none."""


class Tokens(nn.Module):
    """Blocks to recompute, and a part that only some samples take."""

    def __init__(self, *, dropout: float = 0.0, branches: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3))
        )
        self.seldom = nn.Linear(WIDTH, WIDTH) if branches else None
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def logits(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embedding(tokens))
        taken = tokens[:, 0] == 0
        if self.seldom is not None and taken.any():
            hidden = torch.where(taken[:, None, None], hidden + self.seldom(hidden), hidden)
        return self.head(hidden)


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1).clone()
    lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=generator)
    lengths[:2] = 0  # a micro-batch of the validation, and perhaps of training, with nothing to count
    labels[torch.arange(LENGTH)[None] >= lengths[:, None]] = IGNORED
    return {"tokens": tokens, "labels": labels}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Calls a method of the model that is not its forward."""
    return F.cross_entropy(
        model.logits(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED
    )


def count(batch: Batch) -> Tensor:
    return (batch["labels"] != IGNORED).sum()


def metrics(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    hits = (model.logits(batch["tokens"]).argmax(-1) == batch["labels"]).float()
    return {"hits": hits.mean()}


def make_job(*, dropout: float = 0.0, loads: bool = False, branches: bool = True) -> Job:
    held = samples()

    def data() -> Data:
        if not loads:
            return Data(train=held, validation={name: tensor[:9] for name, tensor in held.items()})
        dataset = TensorDataset(held["tokens"], held["labels"])
        batches = DataLoader(
            dataset,
            batch_size=GLOBAL_BATCH,
            shuffle=True,
            collate_fn=lambda items: {
                "tokens": torch.stack([tokens for tokens, _ in items]),
                "labels": torch.stack([labels for _, labels in items]),
            },
        )
        return Data(train=batches)

    return Job(
        model=lambda: Tokens(dropout=dropout, branches=branches),
        loss=loss,
        batch=held,
        count=count,
        metrics=metrics,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=data,
        name="tokens",
    )


def has_branches(how: Settings) -> bool:
    """All but DDP want every rank to use the same parameters in a step."""
    return how.parallelism is Parallelism.DDP


def settings(ranks: int, *, accumulation: int = 2, parallelism: Parallelism = Parallelism.DDP) -> Settings:
    """The same global batch on any number of ranks; a block is recomputed."""
    return Settings(
        micro_batch_size=GLOBAL_BATCH // ranks // accumulation,
        gradient_accumulation_steps=accumulation,
        world_size=ranks,
        parallelism=parallelism,
        units=(UnitAction(fqn="blocks.1", action=Action.RECOMPUTE),),
    )


def trained(
    how: Settings | Plan, *, dropout: float = 0.0, loads: bool = False, branches: bool = True, **options: Any
) -> tuple[TrainingResult, dict[str, Tensor]]:
    """What a run came to, and its weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        trainer = Trainer(
            make_job(dropout=dropout, loads=loads, branches=branches),
            how,
            device="cpu",
            show_progress=False,
            **({"epochs": 2, "max_gradient_norm": 0.5, "verify": False} | options),
        )
        result = trainer.fit()
    weights = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in trainer.model.state_dict().items()
    }
    return result, weights


def curve(how: Settings, options: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and gradient norms of the steps, losses of the validations, and the weights."""
    result, weights = trained(how, **options)
    losses = [step.loss for step in result.steps] + [step.gradient_norm for step in result.steps]
    validations = [value for record in result.validations for value in (record.loss, record.metrics["hits"])]
    return losses, validations, weights


def saved_and_resumed(run_dir: str, how: Settings) -> tuple[list[float], list[float]]:
    """Losses of a run of eight steps, and of one that is ended after four and resumed."""
    options = {"dropout": 0.3, "loads": True, "epochs": None, "branches": has_branches(how)}
    whole = curve(how, options | {"steps": 8})[0]
    options |= {"run_dir": Path(run_dir), "save_every": 4}
    trained(how, **options, steps=4)
    return whole, curve(how, {**options, "steps": 8, "resume": True})[0]


def by_zero(
    run_dir: str, how: Settings, options: dict[str, Any]
) -> tuple[list[float], list[float], tuple[list[float], list[float]]]:
    """Losses and validations of a run that leaves its weights; of a resumed one and one that is whole."""
    losses, validations, _parts = curve(how, options | {"run_dir": Path(run_dir), "epochs": 1})
    return losses, validations, saved_and_resumed(f"{run_dir}-resumed", how)


def by_zero_with_peaks(
    how: Settings, options: dict[str, Any], plans: list[Plan]
) -> tuple[list[float], list[int | None]]:
    """Losses and gradient norms of a run, peaks of others; then one in which parameters have no gradient."""
    losses, peaks = curve(how, options)[0], [measured_peak_bytes(plan) for plan in plans]
    with pytest.raises(UsageError, match="2 of 11 trainable parameters had no gradient"):
        trained(how, branches=True)
    return losses, peaks


def measured_peak_bytes(how: Plan) -> int | None:
    """Of this rank, in a run of a few steps."""
    return trained(how, branches=False, epochs=None, steps=5)[0].measured_peak_allocated_bytes
