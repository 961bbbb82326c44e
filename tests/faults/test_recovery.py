"""Faults that last: training goes on with less, or ends with all that it has saved and says so."""

import json
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import brimful as bf
from brimful.batches import BatchLayout
from brimful.errors import (
    DataError,
    OutOfMemoryError,
    PartialUpdateError,
    SaveError,
    UsageError,
)
from brimful.job import Data
from brimful.results import StopReason
from brimful.trainer import Trainer
from brimful.trainer.step import recovery as recovery_module
from helpers.batches_of_all_kinds import JOBS, WHOLE, images_and_targets


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def takes_at_most(samples: int, *, training: bool = True):
    """A loss whose memory runs out beyond so many samples."""

    def loss(model, batch):
        is_real = type(batch["x"]) is torch.Tensor
        if is_real and model.training is training and BatchLayout().count(batch) > samples:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has 8 GiB.")
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return loss


def test_memory_that_stays_short_lowers_the_micro_batch_and_the_losses_stay(job_with, trained, tmp_path):
    job = job_with(model=linear)
    _, expected = trained(job, 16, epochs=2)
    _, result = trained(replace(job, loss=takes_at_most(4)), 16, epochs=2, run_dir=tmp_path / "run")
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert result.settings.global_batch_size == 16
    assert result.settings.micro_batch_size <= 4
    first, *later = result.recoveries
    assert first.before == first.after
    assert first.message == "CUDA out of memory. Tried to allocate 2 GiB."
    assert [recovery.step for recovery in result.recoveries] == [1] * len(result.recoveries)
    assert all(recovery.before != recovery.after for recovery in later)
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["kind"] == "recovery" for line in told) == len(result.recoveries)


def test_a_plan_that_runs_out_is_planned_anew_for_less(job_with, samples):
    job = job_with(model=linear, batch=samples, loss=takes_at_most(8))
    plan = bf.plan(job, "cpu", global_batch_size=48, micro_batch_size=48)
    result = Trainer(job, plan, device="cpu", epochs=1, show_progress=False).fit()
    assert result.stopped_because is StopReason.FINISHED
    assert result.settings.global_batch_size == 48
    assert result.settings.micro_batch_size <= 8
    assert result.settings.optimizer_implementation == plan.settings.optimizer_implementation


def test_lists_of_images_and_targets_are_trained_on_in_smaller_micro_batches_where_memory_runs_out():
    def loss(model, batch):
        if type(batch[0][0]) is torch.Tensor and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(*batch)

    batches = [images_and_targets(range(4)) for _ in range(3)]
    job = replace(JOBS["images and targets"], data=lambda: Data(train=batches))
    expected = Trainer(job, bf.Settings(micro_batch_size=4), show_progress=False).fit()
    found = Trainer(replace(job, loss=loss), bf.Settings(micro_batch_size=4), show_progress=False).fit()
    assert found.settings.micro_batch_size <= 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_memory_that_is_short_for_a_batch_that_cannot_be_split_says_that_it_cannot():
    def loss(model, batch):
        if type(batch["x"]) is torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return WHOLE.loss(model, batch)

    job = replace(WHOLE, loss=loss, data=lambda: Data(train=[WHOLE.batch(4)]))
    with pytest.raises(OutOfMemoryError, match=r"the batch cannot be split: .*has shape \(12, 6\)"):
        Trainer(job, bf.Settings(micro_batch_size=4), show_progress=False).fit()


def test_a_lowered_run_is_resumed_as_lowered(job_with, trained, tmp_path):
    job = job_with(model=linear, loss=takes_at_most(4))
    _, expected = trained(job, 16, epochs=2)
    trained(job, 16, epochs=1, run_dir=tmp_path / "run")
    _, resumed = trained(job, 16, epochs=2, run_dir=tmp_path / "run", resume=True)
    assert resumed.settings.micro_batch_size <= 4
    assert resumed.losses == pytest.approx(expected.losses, rel=1e-6)
    assert len(resumed.recoveries) == len(expected.recoveries)


@pytest.mark.filterwarnings("ignore:the last batch of each epoch has")
def test_a_batch_that_statistics_couple_is_not_split_behind_the_users_back(job_with, trained, tmp_path):
    def net():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    job = job_with(model=net, loss=takes_at_most(8))
    with pytest.raises(OutOfMemoryError, match=r"nothing that takes less[\s\S]*BatchNorm"):
        trained(job, 16, epochs=1, run_dir=tmp_path / "run")


def test_running_out_for_good_ends_the_run_saved_and_resumable(job_with, trained, tmp_path):
    _, expected = trained(job_with(model=linear), 16, steps=6)

    class Later:
        calls = 0

        def __call__(self, model, batch):
            self.calls += type(batch["x"]) is torch.Tensor
            if self.calls > 3:
                raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported …")
            return F.cross_entropy(model(batch["x"]), batch["y"])

    with pytest.raises(OutOfMemoryError) as error:
        trained(job_with(model=linear, loss=Later()), 16, steps=6, run_dir=tmp_path / "run")
    assert any("saved after step 3" in note for note in error.value.__notes__)
    _, result = trained(job_with(model=linear), 16, steps=6, run_dir=tmp_path / "run", resume=True)
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    assert len(result.steps) == 6


def test_validation_goes_on_with_fewer_samples_at_once(job_with, trained, samples):
    job = job_with(model=linear, data=lambda: Data(train=samples, validation=samples))
    _, expected = trained(job, 16, epochs=2)
    _, result = trained(replace(job, loss=takes_at_most(5, training=False)), 16, epochs=2)
    assert result.losses == expected.losses
    assert [v.loss for v in result.validations] == pytest.approx([v.loss for v in expected.validations])
    assert [(r.during, r.before, r.after) for r in result.recoveries] == [
        ("validation", "16 samples at once", "16 samples at once"),
        ("validation", "16 samples at once", "8 samples at once"),
        ("validation", "8 samples at once", "4 samples at once"),
    ]


def test_validation_that_does_not_fit_one_sample_ends_with_what_to_do(job_with, trained, samples, tmp_path):
    job = job_with(model=linear, data=lambda: Data(train=samples, validation=samples))
    job = replace(job, loss=takes_at_most(0, training=False))
    with pytest.raises(OutOfMemoryError, match=r"validation with 1 sample at once.* one sample") as error:
        trained(job, 16, epochs=2, run_dir=tmp_path / "run")
    assert "Train with a smaller budget, which leaves more to the validation." in str(error.value)
    assert any("saved after step" in note for note in error.value.__notes__)


class Counted(nn.Linear):
    """Counts its forward passes in a buffer, as hooks of quantisation and pruning do."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_a_validation_that_is_run_again_leaves_buffers_as_if_it_had_not_been(job_with, trained, samples):
    def runs_out_once(model, batch):
        if not model.training and next(tries) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return loss(model, batch)

    tries = iter(range(100))
    job = job_with(model=Counted, data=lambda: Data(train=samples, validation=samples))
    loss = job.loss
    expected, _ = trained(job, 16, epochs=2)
    trainer, result = trained(replace(job, loss=runs_out_once), 16, epochs=2)
    assert [recovery.during for recovery in result.recoveries] == ["validation"]
    assert torch.equal(trainer.model.calls, expected.model.calls)


@pytest.mark.filterwarnings("ignore:the training data give batches")
def test_the_longest_batch_is_tried_first_and_leaves_no_trace(job_with, trained, samples):
    def sized(n):
        return {name: tensor[:n] for name, tensor in samples.items()}

    job = job_with(loss=takes_at_most(8))
    short = [sized(6), sized(8)]
    _, expected = trained(job_with(data=lambda: Data(train=short)), 8, 6)
    job = replace(job, data=lambda: Data(train=short, longest=sized(48)))
    _, result = trained(job, 8, 6)
    assert not result.recoveries
    assert result.losses == expected.losses
    _, lowered = trained(job, 16, 3)
    assert {recovery.during for recovery in lowered.recoveries} == {"rehearsal"}


def test_an_allocator_that_searches_in_each_step_is_given_less(job_with, trained, monkeypatch):
    searches = iter([0, 0, 1, 1, 1, 2, 3, 4, *[4] * 40])
    monkeypatch.setattr(recovery_module, "_allocator_retries", lambda _device: next(searches))
    _, result = trained(job_with(model=linear), 16, epochs=3)
    (recovery,) = result.recoveries
    assert (recovery.during, recovery.step) == ("allocator", 7)
    assert recovery.before != recovery.after
    assert result.settings.global_batch_size == 16


class Dying(Dataset):
    """Its worker is killed at one sample, as by the system when memory runs out."""

    def __init__(self, samples, at: int) -> None:
        self.samples, self.at = samples, at

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return {name: tensor[index] for name, tensor in self.samples.items()}


def test_a_dead_worker_ends_the_run_saved_and_resumable(job_with, trained, samples, tmp_path):
    def job(at):
        loader = DataLoader(Dying(samples, at), batch_size=8, num_workers=1, prefetch_factor=1)
        return job_with(data=lambda: Data(train=loader))

    _, expected = trained(job(-1), 8, epochs=1)
    with pytest.raises(DataError, match="worker") as error:
        trained(job(40), 8, epochs=1, run_dir=tmp_path / "run")
    steps = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert f"saved after step {steps}" in error.value.__notes__[-1]
    _, result = trained(job(-1), 8, epochs=1, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_a_full_disk_does_not_end_training_before_the_end(job_with, trained, tmp_path, monkeypatch):
    from brimful.trainer.storage import saves

    _, expected = trained(job_with(), epochs=2)
    whole = saves.write_tensors

    def full(*arguments, **options):
        if (tmp_path / "run" / "saves").exists() and len(
            list((tmp_path / "run" / "saves").glob("step-*"))
        ) == 1:
            raise OSError(28, "No space left on device")
        whole(*arguments, **options)

    monkeypatch.setattr(saves, "write_tensors", full)
    with pytest.raises(SaveError, match="No space left"):
        trained(job_with(), epochs=2, run_dir=tmp_path / "run", save_every=2)
    monkeypatch.setattr(saves, "write_tensors", whole)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(line["kind"] == "failed save" for line in lines)
    assert sum(line["kind"] == "step" for line in lines) == 8
    _, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_settings_without_a_smaller_micro_batch_say_so(job_with, trained):
    with pytest.warns(UserWarning, match="not compared"), pytest.raises(OutOfMemoryError, match="one sample"):
        trained(job_with(model=linear, loss=takes_at_most(0)), 1, 4, steps=1)


def test_an_allocator_that_searches_does_not_end_a_run_that_can_take_no_less(job_with, trained, monkeypatch):
    searches = iter(range(1000))
    monkeypatch.setattr(recovery_module, "_allocator_retries", lambda _device: next(searches))
    _, result = trained(job_with(model=linear), 1, steps=8)
    assert result.stopped_because is StopReason.FINISHED


def test_an_error_in_the_update_is_not_saved_as_if_the_step_had_not_been(job_with, trained, tmp_path):
    class Breaking(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            super().step(closure)
            Breaking.steps += 1
            if Breaking.steps == 4:
                raise ValueError("a hook of mine")

    job = job_with(model=linear, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    _, expected = trained(job, 16, epochs=2)
    broken = replace(job, optimizer=lambda p: Breaking(p, lr=0.1))
    with pytest.raises(PartialUpdateError, match="a hook of mine"):
        trained(broken, 16, epochs=2, run_dir=tmp_path / "run", save_every=2)
    _, result = trained(broken, 16, epochs=2, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_a_schedule_that_ends_does_not_make_a_step_be_taken_twice(job_with, trained, tmp_path):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)

    job = job_with(model=linear, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ValueError, match="Tried to step") as error:
        trained(job, 16, epochs=3, run_dir=tmp_path / "run", schedule=schedule)
    assert "saved after step 7" in error.value.__notes__[-1]
    saved = json.loads((tmp_path / "run" / "saves" / "step-000000007" / "run.json").read_text())
    assert (saved["epoch"], saved["batches"]) == (2, 3)


def test_what_cannot_be_saved_is_told_in_the_first_steps(job_with, trained, tmp_path):
    class Own(torch.optim.SGD):
        def state_dict(self):
            return super().state_dict() | {"mine": threading.Lock}

    job = job_with(optimizer=lambda p: Own(p, lr=0.1))
    with pytest.raises(UsageError, match="without running code"):
        trained(job, 16, epochs=3, run_dir=tmp_path / "run", save_every=2)


def test_fewer_steps_than_were_taken_are_no_reason_to_train_on(job_with, trained, tmp_path):
    trained(job_with(), steps=6, run_dir=tmp_path / "run")
    _, result = trained(job_with(), steps=5, run_dir=tmp_path / "run", resume=True)
    assert len(result.steps) == 6


class Augmented(Dataset):
    """Draws from the global generator, and can be made to raise once."""

    raises_at: int | None = None

    def __init__(self, samples) -> None:
        self.samples, self.reads = samples, 0

    def __len__(self):
        return 48

    def __getitem__(self, index):
        self.reads += 1
        x = self.samples["x"][index] + 0.1 * torch.randn(8)
        if self.reads == self.raises_at:
            raise OSError("the disk is gone")
        return {"x": x, "y": self.samples["y"][index]}


def test_a_batch_that_was_read_but_not_trained_on_is_read_alike_again(job_with, trained, samples, tmp_path):
    def job(raises_at):
        dataset = Augmented(samples)
        dataset.raises_at = raises_at
        return job_with(data=lambda: Data(train=DataLoader(dataset, batch_size=8, shuffle=True)))

    _, expected = trained(job(None), 8, epochs=1)
    with pytest.raises(DataError, match="the disk is gone"):
        trained(job(29), 8, epochs=1, run_dir=tmp_path / "run")
    _, result = trained(job(None), 8, epochs=1, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_the_check_before_the_first_step_leaves_buffers_as_if_it_had_not_been(job_with, trained, samples):
    """Dropout keeps gradients from being compared, so that losses in evaluation mode are."""
    job = job_with(model=lambda: nn.Sequential(Counted(), nn.Dropout(0.5)), data=lambda: Data(train=samples))
    unchecked = trained(job, 8, 2, epochs=None, steps=2, verify=False)[0]
    with pytest.warns(UserWarning, match="each forward updates state that the next one reads: 2 times a step"):
        checked = trained(job, 8, 2, epochs=None, steps=2, verify=True)[0]
    assert torch.equal(checked.model[0].calls, unchecked.model[0].calls)
    assert unchecked.model[0].calls == 4


def test_an_interrupt_while_an_out_of_memory_error_is_handled_undoes_the_step(job_with):
    calls = []

    def loss(model, batch):
        value = F.cross_entropy(model(batch["x"]), batch["y"])
        calls.append(None)
        if len(calls) == 2:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except torch.OutOfMemoryError:
                raise KeyboardInterrupt from None
        return value

    def normed():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    settings = bf.Settings(micro_batch_size=8)
    undisturbed = Trainer(job_with(model=normed), settings, steps=1, show_progress=False)
    undisturbed.fit()
    trainer = Trainer(job_with(model=normed, loss=loss), settings, steps=4, verify=False, show_progress=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert len(calls) == 2
    assert torch.equal(trainer.model[1].running_mean, undisturbed.model[1].running_mean)
