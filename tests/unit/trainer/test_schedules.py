"""Learning rates over a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.errors import UnknownNameError, UsageError


def job() -> bf.Job:
    return bf.Job(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        data=lambda: bf.Data(train=torch.arange(20.0).view(10, 2) / 20),
    )


class Rates(bf.trainer.Callback):
    """The rate that each step was taken with is that before it."""

    def __init__(self) -> None:
        self.after: list[float] = []

    def on_step(self, trainer: bf.trainer.Trainer, record: object) -> None:
        self.after.append(trainer.optimizer.param_groups[0]["lr"])


def rates(schedule: bf.trainer.Schedule, **options: object) -> list[float]:
    seen = Rates()
    bf.trainer.Trainer(
        job(),
        bf.Settings(micro_batch_size=1),
        schedule=schedule,
        callbacks=[seen],
        show_progress=False,
        **options,
    ).fit()  # type: ignore[arg-type]
    return seen.after


def test_a_rate_rises_in_a_straight_line_and_falls_to_nothing() -> None:
    assert rates(bf.trainer.Schedule("linear", 0.4)) == pytest.approx(
        [0.5 * part for part in (2 / 5, 3 / 5, 4 / 5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0)]
    )
    cosine = [bf.trainer.Schedule("cosine").factor(step, 4) for step in range(5)]
    assert cosine == pytest.approx([1, 0.8535533906, 0.5, 0.1464466094, 0])


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_no_step_of_a_run_is_taken_at_rate_nought(name: str) -> None:
    for steps in (1, 2, 7, 100):
        for warmup in (0.0, 0.1, 0.5, 0.99):
            assert all(0 < bf.trainer.Schedule(name, warmup).factor(step, steps) <= 1 for step in range(steps))


def test_a_resumed_run_goes_on_with_the_rate_it_had(tmp_path: Path) -> None:
    schedule = bf.trainer.Schedule("cosine", 0.2)
    whole = rates(schedule, epochs=2)

    class Stop(bf.trainer.Callback):
        def on_step(self, trainer: bf.trainer.Trainer, record: object) -> None:
            trainer.stop()

    settings = bf.Settings(micro_batch_size=1)
    bf.trainer.Trainer(
        job(),
        settings,
        schedule=schedule,
        epochs=2,
        run_dir=tmp_path,
        callbacks=[Stop()],
        show_progress=False,
    ).fit()
    assert rates(schedule, epochs=2, run_dir=tmp_path, resume=True) == whole[1:]


def test_unknown_names_and_runs_of_unknown_length_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="cosine"):
        bf.trainer.Schedule("cosin")
    with pytest.raises(UsageError, match="below 1"):
        bf.trainer.Schedule("linear", 1.0)

    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(1, 2)])

    with pytest.raises(UsageError, match="Set `steps`"):
        rates(bf.trainer.Schedule("linear"), data=bf.Data(train=Endless()))


def test_each_step_is_recorded_with_the_rate_it_was_taken_with() -> None:
    seen = Rates()
    trainer = bf.trainer.Trainer(
        job(),
        bf.Settings(micro_batch_size=1),
        schedule=bf.trainer.Schedule("linear", 0.4),
        callbacks=[seen],
        epochs=1,
        show_progress=False,
    )
    recorded = [step.learning_rate for step in trainer.fit().steps]
    assert recorded == pytest.approx([0.5 / 5, *seen.after[:-1]])


def test_an_optimizer_that_has_no_rate_of_its_own_is_trained_with() -> None:
    """Transformers' Adafactor has None."""

    class Unrated(torch.optim.SGD):
        def __init__(self, parameters: object) -> None:
            super().__init__(parameters, lr=0.1)  # type: ignore[arg-type]
            for group in self.param_groups:
                group["own"], group["lr"] = group["lr"], None

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-group["own"])

    result = bf.trainer.Trainer(
        replace(job(), optimizer=Unrated), bf.Settings(micro_batch_size=1), steps=2, show_progress=False
    ).fit()
    assert [step.learning_rate for step in result.steps] == [None, None]
