"""A whole run has the steps that the trainer takes, at the predicted time of each."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.errors import UsageError
from brimful.options import RunLength
from brimful.results import whole_run
from helpers.tiny_jobs import SAMPLES, make_job, train

# B samples, T tokens


def predicted(batch: int = 32, tokens_per_sample: float | None = None, **given: Any) -> Any:
    price, world_size = given.pop("price", None), given.pop("world_size", 1)
    settings = bf.Settings(micro_batch_size=batch // world_size, world_size=world_size)
    return whole_run(
        RunLength(**given),
        settings,
        step_seconds=0.5,
        step_seconds_interval=(0.25, 1.0),
        tokens_per_sample=tokens_per_sample,
        price_per_hour=price,
    )


@pytest.mark.parametrize("batch", [10, 16, 50, 64])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_of_epochs_has_the_steps_of_the_trainer(batch: int, epochs: int) -> None:
    """The last batch of an epoch is a step of its own, however few samples it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_args, **_options: None)  # a batch larger than the data
        _, result = train(make_job(), micro_batch_size=batch, epochs=epochs)
    run = predicted(batch, epochs=epochs, dataset_size=SAMPLES)
    assert run.steps == len(result.steps)
    assert run.samples == sum(step.samples for step in result.steps)


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (32, 1), (33, 2), (64, 2), (1_000_000, 31_250)])
def test_a_run_of_samples_ends_with_a_smaller_step_if_they_leave_one(samples: int, steps: int) -> None:
    run = predicted(samples=samples)
    assert (run.steps, run.samples, run.epochs, run.tokens) == (steps, samples, None, None)
    assert run.predicted_seconds == steps * 0.5
    assert run.predicted_seconds_interval == (steps * 0.25, steps * 1.0)
    assert run.predicted_samples_per_second == 64


def test_a_run_of_tokens_has_the_samples_that_have_them() -> None:
    run = predicted(tokens=100_001, tokens_per_sample=100)
    assert (run.samples, run.steps, run.tokens) == (1001, math.ceil(1001 / 32), 100_001)
    assert run.predicted_tokens_per_second == 6400
    assert predicted(samples=10, tokens_per_sample=100).tokens == 1000


def test_the_cost_is_that_of_all_devices_for_the_hours() -> None:
    run = predicted(64, samples=64 * 7200, price=0.5, world_size=4)
    assert run.predicted_seconds == 3600
    assert run.predicted_cost == 2.0
    assert run.predicted_cost_interval == (1.0, 4.0)
    assert "2.00 (1.00–4.00), at 0.50 an hour, 4 devices" in str(run)
    free = predicted(samples=64)
    assert (free.predicted_cost, free.predicted_cost_interval) == (None, None)
    assert "cost" not in str(free)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "none is given"),
        ({"samples": 5, "tokens": 5}, "samples and tokens are given"),
        ({"epochs": 1, "dataset_size": 4, "samples": 4}, "epochs and samples are given"),
        ({"epochs": 3}, "3 epochs needs the number of samples"),
        ({"dataset_size": 4}, "without epochs"),
        ({"dataset_size": 4, "samples": 4}, "beside samples"),
        ({"samples": 0}, "at least 1"),
        ({"samples": 2**63}, "at most"),
        ({"tokens": 10}, "needs to know the tokens of a sample"),
        ({"samples": 10, "price": -1.0}, "price_per_hour is -1.0"),
        ({"samples": 10, "price": math.nan}, "price_per_hour is nan"),
    ],
)
def test_what_is_not_one_length_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        predicted(**given)


def tokens_job(name: str, **changes: Any) -> bf.Job:
    """A job on 6 token ids of each sample, which its batch has under some name."""
    return bf.Job(
        model=lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch[name]).mean(),
        batch=lambda n: {name: torch.randint(11, (n, 6))},  # (B, T)
        **changes,
    )


def counted(batch: dict[str, torch.Tensor]) -> int:
    return batch["text"][:, 1:].numel()


@pytest.mark.parametrize(
    ("job", "tokens"),
    [
        (tokens_job("input_ids"), 6),
        (tokens_job("text", count=counted, counted="tokens"), 5),
        (tokens_job("text", count=counted, counted="pixels"), None),
        (tokens_job("text"), None),
    ],
    ids=["input_ids", "counted as tokens", "counted otherwise", "not known"],
)
def test_the_tokens_of_a_sample_are_those_of_input_ids_or_counted(job: bf.Job, tokens: int | None) -> None:
    estimate = bf.estimate(job, "T4", micro_batch_size=4)
    plan = bf.plan(job, "T4", global_batch_size=4)
    survey = bf.gpus(job, global_batch_size=4, devices=["T4"])
    assert [each.tokens_per_sample for each in (estimate, plan, survey)] == [tokens] * 3
    assert bf.Plan.from_json(plan.to_json()) == plan
    for result in (estimate, plan, survey):
        if tokens is None:
            with pytest.raises(UsageError, match='Job\\(count=…, counted="tokens"\\)'):
                result.predict_run(tokens=60)
        else:
            of_gpu = result.predict_run(tokens=60)
            run = of_gpu[0].run if result is survey else of_gpu
            assert run.samples == 60 / tokens


def test_padding_counts_as_tokens_of_the_longest_batch() -> None:
    lengths = iter([3, 8] * 1000)

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.randint(11, (n, next(lengths)))}

    job = bf.Job(
        model=lambda: nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch["input_ids"]).mean(),
        batch=batch,
    )
    assert bf.estimate(job, "T4", micro_batch_size=4).tokens_per_sample == 8


def test_a_comparison_has_the_run_on_each_gpu_that_fits() -> None:
    def job() -> bf.Job:
        return bf.Job(
            model=lambda: nn.Linear(20_000, 20_000, bias=False),
            loss=lambda model, batch: model(batch).square().mean(),
            batch=lambda n: torch.randn(n, 20_000),
        )

    survey = bf.gpus(job(), global_batch_size=16, devices=["T4", "GTX 1650"], prices={"T4": 0.36})
    whole = survey.predict_run(epochs=2, dataset_size=100)
    t4, small = whole
    assert (small.run, small.usual and small.usual.run) == (None, None)
    assert t4.run is not None
    assert t4.usual is not None
    assert t4.usual.run is not None
    assert t4.run.steps == 2 * 7
    for fit in (t4, t4.usual):
        assert fit.run is not None
        assert fit.run.predicted_seconds == pytest.approx(14 * (fit.predicted_step_seconds or 0))
        assert fit.run.predicted_cost == pytest.approx(14 * (fit.predicted_cost_per_step or 0))
    assert [fit.run for fit in survey] == [None, None]
    text = str(whole)
    assert "run of 2 epochs, 200 samples: 14 steps of 16" in text
    assert "GTX 1650" in text.split("needs ")[0].splitlines()[-1]
    assert max(map(len, text.splitlines()[:6])) <= 90
