"""What a loss that couples the samples cannot be combined with is refused, and says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.capture import capture_step
from brimful.devices import find_device
from brimful.errors import LossError, UsageError
from brimful.job import Job
from brimful.profiling import measure_step
from brimful.settings import ChunkedLoss, Settings
from brimful.trace import Phase, Trace
from brimful.trainer import Trainer
from helpers.coupled_jobs import coupled_job, embed

SPLIT = Settings(micro_batch_size=4, gradient_accumulation_steps=2)


def test_a_count_means_nothing_to_it() -> None:
    with pytest.raises(UsageError, match=r"both `embed` and `count`"):
        coupled_job(count=len)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (replace(SPLIT, world_size=2), "not gathered"),
        (replace(SPLIT, chunked_loss=ChunkedLoss(layer="text.last", chunks=2)), "chunked_loss=False"),
    ],
)
def test_it_is_not_divided_among_ranks_nor_over_logits(settings: Settings, why: str) -> None:
    for run in (
        lambda: Trainer(coupled_job(), settings, device="cpu"),
        lambda: measure_step(coupled_job(), settings),
        lambda: capture_step(coupled_job(), settings, find_device("cpu")),
    ):
        with pytest.raises(UsageError, match=why):
            run()


def test_a_chunked_loss_is_refused_because_samples_are_compared() -> None:
    with pytest.raises(UsageError, match=r"compares the samples of a batch.*Leave chunked_loss out"):
        bf.estimate(coupled_job(), "cpu", micro_batch_size=8, chunked_loss=True)


@pytest.mark.parametrize(
    ("embeds", "why"),
    [
        (lambda model, batch: embed(model, batch)["image"][:1], r"has shape \(1, 6\) for a batch of 4"),
        (lambda model, batch: {}, "0 tensors"),
        (lambda model, batch: embed(model, batch)["image"].detach(), "no gradient"),
    ],
)
def test_embeddings_that_cannot_be_put_together_are_refused(embeds: Any, why: str) -> None:
    def square(embeddings: Any) -> torch.Tensor:
        return (embeddings @ embeddings.T).square().mean()

    with pytest.raises(LossError, match=why):
        measure_step(coupled_job(embed=embeds, loss=square), SPLIT)


def test_a_part_of_a_large_tensor_does_not_keep_the_whole() -> None:
    """The first token of a hidden state, say: else each micro-batch's would be held until the loss."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    job = Job(
        model=Wide,
        embed=lambda model, x: model(x)[:, :3],
        loss=lambda made: (made @ made.T).square().mean(),
        batch=lambda n: torch.randn(n, 4),
        optimizer="sgd",
    )
    few, many = (
        bf.estimate(
            job, "cpu", micro_batch_size=8, gradient_accumulation_steps=steps
        ).predicted_peak_allocated_bytes
        for steps in (2, 6)
    )
    assert many - few < 8 * 1000 * 4  # one micro-batch's whole output is as large as that
    measured = measure_step(job, Settings(micro_batch_size=8, gradient_accumulation_steps=6), steps=1)
    assert measured.measured_peak_allocated_bytes == many


def test_sizes_are_captured_one_by_one_as_the_loss_is_no_line() -> None:
    """Similarities of all samples with all grow with the square."""
    job = coupled_job()
    line = bf.estimate(job, "cpu", micro_batch_size=2)
    for size in (3, 200):
        whole = bf.estimate(job, "cpu", micro_batch_size=size)
        assert line.at(size).predicted_peak_allocated_bytes == whole.predicted_peak_allocated_bytes


def test_the_trace_says_so_and_traces_without_it_are_read() -> None:
    trace = capture_step(coupled_job(), SPLIT, find_device("cpu"))
    assert trace.couples_samples
    assert any(op.phase is Phase.EMBEDDING for op in trace.ops)
    assert Trace.from_json(trace.to_json()) == trace
    document = trace.to_json()
    del document["couples_samples"]
    assert not Trace.from_json(document).couples_samples


def test_evaluation_takes_the_embeddings_of_the_whole_batch() -> None:
    phases = bf.estimate(
        coupled_job(), "RTX 3090", micro_batch_size=4, gradient_accumulation_steps=8, evaluate=True
    )
    assert any(phase.name == "evaluation" for phase in phases.phases)
