import threading
import time

import pytest
import torch

import brimful as bf
from brimful.batches import BatchLayout
from brimful.errors import DataError
from brimful.trainer.data.batches import Batches, read_ahead
from helpers.tiny_jobs import StopAfter, make_job

CPU = torch.device("cpu")


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("brimful-data")]


def test_the_next_batch_is_read_while_one_is_used_and_no_more_than_that():
    read: list[int] = []

    def reading(place):
        read.append(place)
        return place

    batches = read_ahead(range(5), reading, CPU)
    assert read == []
    assert next(batches) == 0
    deadline = time.monotonic() + 20
    while len(read) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert read == [0, 1]
    assert list(batches) == [1, 2, 3, 4]
    assert not data_threads()


def test_an_end_in_the_midst_leaves_no_thread_behind():
    batches = read_ahead(range(5), lambda place: place, CPU)
    next(batches)
    assert data_threads()
    batches.close()
    assert not data_threads()


def test_what_reading_raises_comes_where_its_batch_would_have():
    def reading(place):
        if place == 2:
            raise OSError("the disk is gone")
        return place

    batches = read_ahead(range(5), reading, CPU)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not data_threads()


@pytest.fixture
def ahead(monkeypatch):
    """On a CPU as on a GPU, but for the pinned memory."""

    class ReadsAhead(Batches):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self._reads_ahead = self._samples is not None

    def use():
        monkeypatch.setattr("brimful.trainer.setup.Batches", ReadsAhead)

    return use


@pytest.mark.parametrize("stopped_after", [1, 4, 6])
def test_a_run_that_reads_ahead_is_the_same_resumed_too(job_with, trained, tmp_path, ahead, stopped_after):
    whole, expected = trained(job_with(), 4, 4, epochs=3)
    ahead()
    trainer, result = trained(job_with(), 4, 4, epochs=3)
    run = {"epochs": 3, "run_dir": tmp_path / "run"}
    trained(job_with(), 4, 4, callbacks=[StopAfter(stopped_after)], **run)
    resumed, again = trained(job_with(), 4, 4, resume=True, **run)
    assert result.losses == again.losses == expected.losses
    for other in (trainer, resumed):
        torch.testing.assert_close(other.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert not data_threads()


def test_a_batch_that_cannot_be_read_ahead_ends_the_run_after_the_steps_before_it(
    job_with, trained, tmp_path, ahead, monkeypatch
):
    _, expected = trained(job_with(), epochs=1)
    ahead()
    whole, taken = BatchLayout.take, []

    def take(layout, batch, indices):
        taken.append(indices)
        if len(taken) == 3:
            raise OSError("the disk is gone")
        return whole(layout, batch, indices)

    with monkeypatch.context() as patch:
        patch.setattr(BatchLayout, "take", take)
        with pytest.raises(DataError, match="the disk is gone") as error:
            trained(job_with(), epochs=1, run_dir=tmp_path / "run")
    assert "saved after step 2" in error.value.__notes__[-1]
    _, result = trained(job_with(), epochs=1, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_only_batches_on_the_host_that_go_to_a_gpu_are_read_ahead():
    def reads_ahead(train, device):
        return Batches(train, global_batch_size=2, seed=0, device=torch.device(device))._reads_ahead

    rows = torch.zeros(4, 2)
    assert reads_ahead(rows, "cuda:0")
    assert not reads_ahead(rows, "cpu")
    assert not reads_ahead([{"x": rows}], "cuda:0")


def test_the_data_thread_uses_the_gpu_that_training_uses_by_default(monkeypatch):
    """`set_device` takes no device without an index, as torch 2.11 said on an H100."""
    found = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(torch.device(device).index))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    for asked in (None, "auto", "cuda", torch.device("cuda")):
        trainer = bf.trainer.Trainer(make_job(), bf.Settings(micro_batch_size=2), device=asked)
        list(read_ahead(range(2), lambda place: torch.ones(place), trainer._config.device))
    assert found == [0, 0, 0, 0]
