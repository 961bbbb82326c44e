"""The records of epochs: their time and peak memory, as far as a run knows them, resumed or not."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from brimful.report import training_text
from brimful.results import EpochRecord, TrainingResult
from brimful.trainer import Callback
from brimful.trainer.monitor.progress import make_progress
from brimful.trainer.step import epoch_peak
from brimful.trainer.step.epoch_peak import EpochPeak
from helpers.tiny_jobs import StopAfter

STEPS = 4  # of an epoch: 50 samples in batches of 16


class DiesAt(Callback):
    """Ends the process, as it were, without a save."""

    def __init__(self, step):
        self.step = step

    def on_step(self, trainer, record):
        if record.step == self.step:
            raise KeyboardInterrupt


def seconds_of(result, epoch):
    return pytest.approx(sum(step.total_seconds for step in result.steps if step.epoch == epoch))


def logged(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"]


def test_each_epoch_has_its_time_and_the_peak_of_its_measured_steps(job_with, trained, tmp_path):
    called = []

    class Seen(Callback):
        def on_epoch(self, trainer, record):
            called.append(record)

    _, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", callbacks=[Seen()])
    first, second = result.epochs
    assert [(each.epoch, each.step) for each in result.epochs] == [(1, STEPS), (2, 2 * STEPS)]
    assert [each.seconds for each in result.epochs] == [seconds_of(result, 1), seconds_of(result, 2)]
    assert first.measured_peak_allocated_bytes == result.measured_peak_allocated_bytes
    assert (second.measured_peak_allocated_bytes, first.measured_peak_device_bytes) == (None, None)
    assert result.seconds == pytest.approx(first.seconds + second.seconds)
    assert called == [first, second]
    assert [line["seconds"] for line in logged(tmp_path / "run")] == [first.seconds, second.seconds]
    assert TrainingResult.from_json(result.to_json()).epochs == result.epochs


def test_an_epoch_that_is_resumed_in_the_middle_has_the_time_of_all_its_steps_and_no_peak(
    job_with, trained, tmp_path
):
    """The resumed launch has not seen the first steps, and the third step of each launch is measured."""
    run = {"epochs": 3, "run_dir": tmp_path / "run", "save_every": 1}
    _, stopped = trained(job_with(), callbacks=[StopAfter(STEPS + 1)], **run)
    assert [each.epoch for each in stopped.epochs] == [1]
    _, result = trained(job_with(), resume=True, **run)
    first, resumed, last = result.epochs
    assert first == stopped.epochs[0]
    assert resumed.seconds == seconds_of(result, 2)
    assert result.measured_peak_allocated_bytes is not None
    assert resumed.measured_peak_allocated_bytes is None
    assert last.seconds == seconds_of(result, 3)
    assert [line["epoch"] for line in logged(tmp_path / "run")] == [1, 2, 3]
    assert result.seconds == pytest.approx(sum(each.seconds for each in result.epochs))


class DiesAfterAnEpoch(Callback):
    """The epoch is logged, and is not in the save of its last step."""

    def on_epoch(self, trainer, record):
        raise KeyboardInterrupt


@pytest.mark.parametrize("dies", [DiesAt(STEPS), DiesAt(STEPS + 1), DiesAfterAnEpoch()])
def test_a_run_that_dies_around_the_end_of_an_epoch_logs_it_once(job_with, trained, tmp_path, dies):
    run = {"epochs": 2, "run_dir": tmp_path / "run", "save_every": 2}
    with pytest.raises(KeyboardInterrupt):
        trained(job_with(), callbacks=[dies], **run)
    _, result = trained(job_with(), resume=True, **run)
    assert [each.epoch for each in result.epochs] == [1, 2]
    assert [each.seconds for each in result.epochs] == [seconds_of(result, 1), seconds_of(result, 2)]
    assert [line["epoch"] for line in logged(tmp_path / "run")] == [1, 2]


def test_times_are_not_known_where_records_of_steps_are_lost(job_with, trained, tmp_path):
    run = {"epochs": 2, "run_dir": tmp_path / "run", "save_every": 1}
    trained(job_with(), callbacks=[StopAfter(STEPS + 2)], **run)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    kept = [line.replace(b'"step"', b"damaged") if b'"step": 5,' in line else line for line in lines]
    assert kept != lines
    metrics.write_bytes(b"".join(kept))
    with pytest.warns(UserWarning, match="is damaged"):
        _, result = trained(job_with(), resume=True, **run)
    assert [each.seconds is None for each in result.epochs] == [False, True]
    assert result.seconds is None
    text = training_text(result)
    assert "not known" in text
    assert "training time" not in text


class FakeCounters:
    """The peaks that CUDA's allocator counts."""

    def __init__(self, patch):
        self.peak_bytes = self.held_bytes = 0
        for name in ("max_memory_allocated", "max_memory_reserved"):
            patch.setattr(torch.cuda, name, lambda _device: self.peak_bytes)
        patch.setattr(torch.cuda, "memory_reserved", lambda _device: self.held_bytes)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: self.reset())
        patch.setattr(torch.cuda, "synchronize", lambda _device: pytest.fail("the device is waited for"))
        patch.setattr(epoch_peak, "process_device_bytes", lambda _device: self.held_bytes + 300)

    def hold(self, held_bytes):
        self.held_bytes = held_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)

    def reset(self):
        self.peak_bytes = self.held_bytes


def test_the_peak_of_an_epoch_on_cuda_outlives_resets_and_not_the_epoch(monkeypatch):
    counters = FakeCounters(monkeypatch)
    peak = EpochPeak(torch.device("cuda"))
    counters.hold(9000)  # before the first step
    counters.hold(100)
    peak.begin(is_whole=True)
    counters.hold(5000)
    counters.hold(100)
    peak.before_reset()
    counters.reset()  # to measure a step
    counters.hold(2000)
    counters.hold(100)
    found = peak.found()
    assert (found.allocated_bytes, found.reserved_bytes, found.device_bytes) == (5000, 5000, 5300)
    peak.begin(is_whole=True)
    counters.hold(3000)
    assert peak.run_reserved_bytes == 5000
    assert peak.found().reserved_bytes == 3000
    peak.begin(is_whole=False)
    counters.hold(4000)
    assert peak.found() is None


def record(epoch=2, seconds=11.8, peak_bytes=312 * 2**20):
    return EpochRecord(
        epoch=epoch,
        step=94,
        seconds=seconds,
        measured_peak_allocated_bytes=peak_bytes,
        measured_peak_reserved_bytes=peak_bytes,
        measured_peak_device_bytes=None,
    )


@pytest.mark.parametrize(
    ("shown", "line"),
    [
        (record(), "epoch 2, step 94  trained in 11.8 s  peak 312 MiB"),
        (record(peak_bytes=None), "epoch 2, step 94  trained in 11.8 s"),
        (record(seconds=None, peak_bytes=None), "epoch 2, step 94  trained"),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_what_is_known_of_an_epoch(shown, line, terminal):
    output = StringIO()
    display = make_progress(100, show=True, console=Console(file=output, force_terminal=terminal, width=90))
    display.start()
    display.show_epoch(shown)
    display.stop()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    assert line in [each.rstrip() for each in re.split(r"[\r\n]", plain)]


def test_the_end_of_training_shows_each_epoch_or_the_first_the_mean_and_the_last(job_with, trained):
    _, result = trained(job_with(), epochs=2)

    def times(*seconds):
        epochs = tuple(record(number, each) for number, each in enumerate(seconds, start=1))
        text = training_text(replace(result, epochs=epochs))
        return [line.strip() for line in text.splitlines() if line.startswith("  epoch")]

    assert times(3.0) == ["epoch               3 s"]
    assert times(3.0, 2.0) == ["epochs              2: 3 s, 2 s"]
    assert times(3.0, None) == ["epochs              2: 3 s, not known"]
    assert times(4.0, *[2.0] * 8, 1.0) == ["epochs              10: first 4 s, mean 2.1 s, last 1 s"]
    assert times(4.0, *[2.0] * 8, None) == []
    assert times() == []
    assert "training time" in str(result)
