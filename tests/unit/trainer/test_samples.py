"""Data that are read as training comes to them, weights from a file, and what a job says about itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.errors import ResumeError, UsageError
from brimful.trainer.data.batches import Batches

SETTINGS = bf.Settings(micro_batch_size=4)


class Squares:
    """Ten samples, their order another one in each epoch."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batches(self, size: int, *, seed: int, epoch: int, skip: int = 0) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(100 * seed + epoch))
        for indices in order.split(size)[skip:]:
            yield indices.float()[:, None] ** 2


def job(**changes: Any) -> bf.Job:
    plain = bf.Job(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        data=lambda: bf.Data(train=Squares()),
        name="squares",
    )
    return replace(plain, **changes)


def fit(which: bf.Job, **options: Any) -> bf.trainer.TrainingResult:
    return bf.trainer.Trainer(which, SETTINGS, device="cpu", show_progress=False, **options).fit()


def test_samples_are_told_the_global_batch_size_and_may_end_with_a_smaller_batch() -> None:
    result = fit(job(), epochs=2)
    assert [record.samples for record in result.steps] == [4, 4, 2, 4, 4, 2]


def test_a_run_on_samples_resumes_in_the_midst_of_an_epoch(tmp_path: Path) -> None:
    whole = fit(job(), epochs=2)
    fit(job(), steps=4, epochs=2, run_dir=tmp_path)
    resumed = fit(job(), epochs=2, run_dir=tmp_path, resume=True)
    assert [r.loss for r in resumed.steps] == [r.loss for r in whole.steps]


def test_no_samples_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="no samples"):
        Batches(Squares(0), global_batch_size=4, seed=0)


def test_a_dry_run_leaves_a_model_trainable_whose_forward_writes_to_a_parameter() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(9, 4, max_norm=0.1)
            self.head = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    numbers = torch.arange(8)
    written = bf.Job(
        model=Normed,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: numbers[:n],
        data=lambda: bf.Data(train=numbers, longest=numbers[:4]),
    )
    result, _ = bf.fit(written, bf.Settings(micro_batch_size=4), steps=2, show_progress=False)
    assert len(result.steps) == 2


def test_the_longest_batch_may_be_made_for_the_global_batch_size() -> None:
    asked = []

    def longest(samples: int) -> torch.Tensor:
        asked.append(samples)
        return torch.ones(samples, 1)

    fit(job(data=lambda: bf.Data(train=Squares(), longest=longest)))
    assert set(asked) == {4}  # to try it, and to measure it


def test_weights_are_loaded_to_train_but_not_to_predict(tmp_path: Path) -> None:
    loaded = []

    def load(model: nn.Module) -> None:
        loaded.append(model)
        assert isinstance(model, nn.Linear)
        with torch.no_grad():
            model.weight.fill_(3.0)

    with_weights = job(weights=load)
    bf.estimate(with_weights, device="cpu")
    assert not loaded
    trainer = bf.trainer.Trainer(
        with_weights, SETTINGS, device="cpu", steps=1, max_gradient_norm=1e-9, show_progress=False
    )
    trainer.fit()
    assert loaded
    assert trainer.model.weight.item() == pytest.approx(3.0)


def test_weights_for_a_model_that_is_built_already_are_refused() -> None:
    with pytest.raises(UsageError, match="built already"):
        fit(job(model=nn.Linear(1, 1), weights=lambda model: None))


def test_what_a_job_says_about_itself_is_beside_its_weights_and_guards_resuming(tmp_path: Path) -> None:
    fit(job(about={"classes": ("cat", "dog")}), steps=2, run_dir=tmp_path)
    assert json.loads((tmp_path / "job.json").read_text()) == {"classes": ["cat", "dog"]}
    fit(job(about={"classes": ("cat", "dog")}), steps=3, run_dir=tmp_path, resume=True)
    with pytest.raises(ResumeError, match="other things about itself"):
        fit(job(about={"classes": ("cat", "cow")}), steps=4, run_dir=tmp_path, resume=True)


def test_what_cannot_be_written_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="JSON"):
        bf.trainer.Trainer(job(about={"device": torch.device("cpu")}), SETTINGS)
