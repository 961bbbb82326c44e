"""What is told of waiting for data, and whether heeding it helps."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from brimful.errors import UsageError
from brimful.job import Data, Job
from brimful.options import LoadingOptions
from brimful.report.data_loading import feeding_lines
from brimful.results import DataLoading, StepRecord
from brimful.trainer.data.batches import data_loading
from brimful.trainer.data.loading import with_loading
from brimful.trainer.run import loop as run_module


def loading(workers, **changes):
    values = {"workers": workers, "persistent_workers": False, "pins_memory": False, "processors": 8}
    return DataLoading(**values | changes)


def steps(seconds, data_seconds, epochs=1, at_start=None):
    return [
        StepRecord(
            step=1, epoch=epoch, loss=1.0, gradient_norm=1.0, seconds=seconds, samples=4, updated=True,
            data_seconds=at_start if at_start is not None and position == 0 else data_seconds,
        )
        for epoch in range(1, epochs + 1)
        for position in range(10)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("workers", "seconds", "data_seconds", "needed"),
    [
        (0, 0.1, 0.3, 3),  # 0.3 s to read
        (0, 0.1, 0.01, 1),
        (1, 0.1, 0.2, 3),  # a batch each 0.3 s
        (2, 0.1, 0.05, 3),  # two batches each 0.3 s
        (2, 0.1, 0.001, None),
        (None, 0.1, 0.3, None),
    ],
)
def test_workers_are_needed_for_as_long_as_one_reads_in_the_time_of_a_step(
    workers, seconds, data_seconds, needed
):
    assert loading(workers).needed_workers(steps(seconds, data_seconds)) == needed


@pytest.mark.parametrize(
    ("records", "how", "said"),
    [
        (steps(0.1, 0.3), loading(0), "75% of the time: 3 workers would keep up; there are 0"),
        (steps(0.1, 0.3), loading(0, processors=2), "with 2 processors, else do less work"),
        (steps(0.1, 0.3), loading(None), "a DataLoader with workers"),
        (steps(0.1, 0.3), None, "75% of the time"),
        (steps(0.1, 0.0, 4, at_start=2.0), loading(2), "persistent_workers=True"),
        (steps(0.1, 0.0, 4, at_start=2.0), loading(2, persistent_workers=True), "first batch of each epoch"),
        (steps(0.1, 0.3)[:1], loading(0), "more workers"),
    ],
)
def test_what_would_help_is_told(records, how, said):
    ((_label, line),) = feeding_lines(records, how, on_gpu=False)
    assert said in line


def test_nothing_is_told_of_data_that_are_there_but_that_a_gpu_could_copy_them_itself():
    assert list(feeding_lines(steps(0.1, 0.001), loading(0), on_gpu=False)) == []
    ((_label, line),) = feeding_lines(steps(0.1, 0.001), loading(0), on_gpu=True)
    assert "pin_memory=True" in line
    assert list(feeding_lines(steps(0.1, 0.001), loading(0, pins_memory=True), on_gpu=True)) == []


def test_how_data_are_loaded_is_seen(samples):
    assert data_loading(samples) is None
    assert data_loading([samples, samples]).workers is None
    found = data_loading(DataLoader([1], num_workers=2, persistent_workers=True))
    assert (found.workers, found.persistent_workers, found.pins_memory) == (2, True, False)
    assert found.processors >= 1


class Slow(Dataset):
    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self):
        return 48

    def __getitem__(self, index):
        time.sleep(0.005)
        return {name: tensor[index] for name, tensor in self.samples.items()}


def test_a_run_tells_early_and_at_the_end_that_it_waits(job_with, trained, samples, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "STEPS_BEFORE_ADVICE", 4)
    job = job_with(data=lambda: Data(train=DataLoader(Slow(samples), batch_size=8)))
    _, result = trained(job, 8, show_progress=True)
    assert result.needed_workers >= 1
    assert result.data_loading.workers == 0
    assert capsys.readouterr().err.count("waited for data  ") == 1


def of_loader(loader) -> Job:
    return Job(
        model=lambda: nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        batch=lambda samples: torch.zeros(samples, 1),
        data=lambda: Data(train=loader),
        name="mine",
    )


NUMBERS = TensorDataset(torch.arange(8.0)[:, None])


@pytest.mark.parametrize(
    ("own", "asked", "expected"),
    [
        ({}, {"workers": 1}, (1, 2, False, False)),
        ({}, {"workers": 1, "prefetch_factor": 4, "pin_memory": True}, (1, 4, True, False)),
        ({"num_workers": 2, "persistent_workers": True}, {"workers": 0}, (0, None, False, False)),
        (
            {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": True},
            {"workers": 1},
            (1, 3, False, True),
        ),
        ({"num_workers": 2}, {"prefetch_factor": 5}, (2, 5, False, False)),
        ({"pin_memory": True}, {"workers": 1}, (1, 2, True, False)),
    ],
)
def test_a_loader_reads_the_same_batches_as_it_is_asked_to(own, asked, expected) -> None:
    loader = DataLoader(NUMBERS, batch_size=2, **own)
    read = with_loading(of_loader(loader), LoadingOptions(**asked)).data().train
    found = read.num_workers, read.prefetch_factor, read.pin_memory, read.persistent_workers
    assert found == expected
    assert loader.num_workers == own.get("num_workers", 0)
    if not read.pin_memory:  # which needs a GPU
        assert [batch.tolist() for (batch,) in read] == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]


@pytest.mark.parametrize(
    ("train", "asked", "message"),
    [
        (torch.zeros(8, 1), {"workers": 2}, "are for a DataLoader, and the data of mine are a Tensor"),
        (DataLoader(NUMBERS), {"prefetch_factor": 4}, "--prefetch-factor 4 needs at least one worker"),
    ],
)
def test_what_no_loader_can_do_is_refused(train, asked, message) -> None:
    with pytest.raises(UsageError, match=message):
        with_loading(of_loader(train), LoadingOptions(**asked)).data()
