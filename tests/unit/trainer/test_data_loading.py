"""What is told of waiting for data, and whether heeding it helps."""

import time

import pytest
from torch.utils.data import DataLoader, Dataset

from brimful.job import Data
from brimful.report.data_loading import feeding_lines
from brimful.results import DataLoading, StepRecord
from brimful.trainer.data.batches import data_loading
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
