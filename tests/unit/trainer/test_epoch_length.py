"""Data that give other batches than their length says: it is noted, and an epoch without any is an error."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from brimful.errors import DataError, UsageError
from brimful.job import Data
from brimful.results import StopReason, TrainingResult
from brimful.trainer import Schedule
from brimful.trainer.monitor import progress

SAID = 10
"""Samples; batches of two."""


def sample(index):
    return {"x": torch.full((8,), float(index)), "y": torch.tensor(index % 3)}


class Ending(Dataset):
    """Says ten samples, and ends at one of them, as a user's `__getitem__` may."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self):
        return SAID

    def __getitem__(self, index):
        if index >= self.at:
            raise StopIteration
        return sample(index)


class Streamed(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self):
        return SAID

    def __iter__(self):
        return map(sample, range(self.samples))


@pytest.fixture
def fit(job_with, trained):
    def fitted(dataset, **options):
        job = job_with(data=lambda: Data(train=DataLoader(dataset, batch_size=2)))
        return trained(job, 2, **options)[1]

    return fitted


SHORT = "epoch 1 ended after 3 of 5 batches; the data gave no more"


@pytest.mark.parametrize("dataset", [Ending(6), Streamed(6)])
def test_epochs_that_end_early_are_noted_once_in_the_result(fit, dataset):
    result = fit(dataset, epochs=3)
    assert result.stopped_because is StopReason.FINISHED
    assert len(result.steps) == 9
    assert result.notes == (SHORT,)
    assert SHORT in str(TrainingResult.from_json(result.to_json()).notes)
    assert fit(dataset, epochs=1, schedule=Schedule("linear")).notes == (
        f"{SHORT}. The schedule is for 5 steps",
    )


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
def test_epochs_that_are_longer_are_noted_too(fit):
    assert fit(Streamed(14), epochs=1).notes == ("epoch 1 had 7 batches; 5 were expected",)


def test_epochs_as_long_as_they_say_are_not_noted(fit):
    assert fit(Streamed(10), epochs=2).notes == ()
    assert fit(Streamed(10), epochs=2, steps=3).notes == ()


def test_the_note_survives_resuming_and_stands_once_in_the_metrics(fit, tmp_path):
    fit(Ending(6), epochs=1, run_dir=tmp_path / "run")
    result = fit(Ending(6), epochs=3, run_dir=tmp_path / "run", resume=True)
    assert len(result.steps) == 9
    assert result.notes == (SHORT,)
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"kind": "note"') == 1


def test_the_report_has_the_note(fit):
    from brimful.report import training_text

    assert f"  note                {SHORT}" in training_text(fit(Ending(6), epochs=1)).splitlines()


def test_the_total_that_is_shown_becomes_the_true_one(fit, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    fit(Ending(6), epochs=2, show_progress=True)
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert lines == ["step 1/10", "step 2/10", "step 3/10", "step 4/6", "step 5/6", "step 6/6"]


def test_the_total_that_is_shown_follows_epochs_of_the_expected_length_again(
    fit, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)

    class Growing(Streamed):
        """The first epoch is short."""

        def __iter__(self):
            self.samples, samples = SAID, self.samples
            return map(sample, range(samples))

    fit(Growing(6), epochs=3, show_progress=True)
    lines = [line.split("  ")[0] for line in capsys.readouterr().err.splitlines() if line.startswith("step ")]
    assert lines[2:5] == ["step 3/15", "step 4/9", "step 5/9"]
    assert lines[-2:] == ["step 12/13", "step 13/13"]


def test_an_epoch_without_a_batch_is_an_error(fit, job_with, trained):
    with pytest.raises(UsageError, match="gave no batch in epoch 1"):
        fit(Ending(0), epochs=1)

    class Nothing:
        def __len__(self):
            return SAID

        def batches(self, _samples, *, seed, epoch, skip):
            return iter(())

    with pytest.raises(DataError, match="gave no batch in epoch 1"):
        trained(job_with(data=lambda: Data(train=Nothing())), 2, epochs=1)


def test_data_that_became_shorter_than_what_was_trained_on_are_refused(fit, tmp_path):
    fit(Streamed(10), steps=4, run_dir=tmp_path / "run")
    with pytest.raises(DataError, match="gave 2 batches in epoch 1, of which 4 were trained on before"):
        fit(Streamed(4), epochs=1, run_dir=tmp_path / "run", resume=True)
