"""Batches of graphs, of targets, with time first: split training computes what whole training computes."""

import copy
import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import brimful as bf
from brimful.batches import layout_of, make_batch, map_tensors
from brimful.distributed.ranks import Ranks
from brimful.job import Data, Job
from brimful.settings import Settings
from helpers.batches_of_all_kinds import (
    JOBS,
    WHOLE,
    GraphBatch,
    graph,
    image,
    target,
)

KINDS = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
SAMPLES = 5


def built(job: Job) -> nn.Module:
    torch.manual_seed(0)
    model = job.model()
    assert isinstance(model, nn.Module)
    return model.double()


def in_double(batch: Any) -> Any:
    return map_tensors(batch, lambda each: each.double() if each.is_floating_point() else each)


@KINDS
def test_the_parts_of_a_batch_are_its_samples_in_their_order(job: Job) -> None:
    layout, batch = layout_of(job), make_batch(job, SAMPLES)
    parts = layout.split(batch, 2)
    assert [layout.count(part) for part in parts] == [2, 2, 1]
    assert [type(part) for part in parts] == [type(layout.part(batch, 0, 2))] * 3
    picked = layout.take(batch, torch.tensor([4, 0]))
    assert layout.count(picked) == 2
    model = built(job)
    alone = [job.loss(model, in_double(layout.part(batch, index, index + 1))) for index in (4, 0)]
    together = job.loss(model, in_double(picked))
    torch.testing.assert_close(together, torch.stack(alone).mean())


@pytest.mark.sweep
@KINDS
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_split_training_is_whole_training(job: Job, micro_batch_size: int) -> None:
    batch = in_double(make_batch(job, 6))
    model = built(job)
    plain = copy.deepcopy(model)
    loss = job.loss(plain, batch)
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model)
    settings = Settings(micro_batch_size=micro_batch_size, gradient_accumulation_steps=6 // micro_batch_size)
    in_its_type = replace(job, model=lambda: built(job))  # steps are predicted of the model that is trained
    outcome = bf.apply(settings, in_its_type, model, optimizer)(batch)
    torch.testing.assert_close(outcome.loss, loss.detach())
    for old, new, expected in zip(before.parameters(), model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(old - new, expected.grad)


@KINDS
@pytest.mark.parametrize("steps", [1, 3])
def test_the_estimate_is_what_is_measured(job: Job, steps: int) -> None:
    settings = Settings(micro_batch_size=2, gradient_accumulation_steps=steps)
    estimate = bf.estimate(job, "cpu", micro_batch_size=2, gradient_accumulation_steps=steps)
    measured = bf.measure(job, settings, "cpu")
    assert estimate.predicted_peak_allocated_bytes == pytest.approx(
        measured.measured_peak_allocated_bytes, rel=0.02
    )


@pytest.mark.sweep
@KINDS
def test_a_plan_that_splits_is_certified(job: Job) -> None:
    plan = bf.plan(job, "cpu", global_batch_size=4, micro_batch_size=2)
    assert plan.settings.gradient_accumulation_steps == 2
    assert bf.verify(job, plan).holds


@KINDS
def test_ranks_together_have_each_sample_once(job: Job) -> None:
    batch, layout, model = make_batch(job, SAMPLES), layout_of(job), built(job)
    parts = [Ranks(rank=rank, count=2).micro_batches(batch, 2, layout) for rank in range(2)]
    assert [[layout.count(part) for part, counts in of_rank if counts] for of_rank in parts] == [[2, 1], [2]]
    assert len(parts[0]) == len(parts[1])
    found = sum(
        job.loss(model, in_double(part)) * layout.count(part)
        for of_rank in parts
        for part, counts in of_rank
        if counts
    )
    torch.testing.assert_close(found / SAMPLES, job.loss(model, in_double(batch)))


def test_a_dataloader_of_images_and_targets_is_trained_on_in_micro_batches() -> None:
    job = JOBS["images and targets"]
    assert trained(job, 2, detection_loader()) == pytest.approx(trained(job, 4, detection_loader()), rel=1e-5)


def test_a_dataloader_of_graphs_is_trained_on_in_micro_batches() -> None:
    job = JOBS["a batch of graphs"]
    loader = DataLoader(
        [graph(index) for index in range(10)], batch_size=4, collate_fn=GraphBatch.from_data_list
    )
    assert trained(job, 2, loader) == pytest.approx(trained(job, 4, loader), rel=1e-5)


def test_one_batch_of_all_graphs_is_shuffled_and_cut() -> None:
    job = JOBS["a batch of graphs"]
    graphs = GraphBatch.from_data_list([graph(index) for index in range(10)])
    assert trained(job, 2, graphs) == pytest.approx(trained(job, 4, graphs), rel=1e-5)


def test_dataloader_batches_that_cannot_be_split_are_trained_on_as_they_come() -> None:
    batches = [WHOLE.batch(2) for _ in range(3)]
    losses = trained(WHOLE, 4, batches)
    assert len(losses) == 4
    assert losses[2] < losses[0]


def trained(job: Job, micro_batch_size: int, train: Any) -> list[float]:
    """The losses of an epoch in global batches of 4, and that of a validation on the same data."""
    result, _plain = bf.fit(
        dataclasses.replace(
            job,
            data=lambda: Data(train=train, validation=train),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        ),
        Settings(micro_batch_size=micro_batch_size, gradient_accumulation_steps=4 // micro_batch_size),
        show_progress=False,
    )
    return [*(step.loss for step in result.steps), *(record.loss for record in result.validations)]


def detection_loader() -> DataLoader[Any]:
    samples = [(image(index), target(index)) for index in range(10)]
    return DataLoader(samples, batch_size=4, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
