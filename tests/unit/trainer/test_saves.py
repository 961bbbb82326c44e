"""What is saved is whole or is not there, and a run that goes on from it is the run that was not
interrupted."""

import gc
import json
import shutil
import signal
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from brimful.errors import DataError, ResumeError, SaveError, UsageError
from brimful.job import Data
from brimful.results import StopReason
from brimful.trainer import Callback, Trainer
from brimful.trainer.storage.restore import SAVES, manifest_text, newest_save
from brimful.trainer.storage.saves import Saves

pytestmark = pytest.mark.filterwarnings("ignore:the last batch of each epoch has")  # told in tests of their own


class StopAfter(Callback):
    """Ends a run as a user would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, record):
        if record.step == self.step:
            trainer.stop()


class Noisy(Dataset):
    """Samples that draw from the global generators, as augmentation does."""

    def __init__(self, samples) -> None:
        self.samples = samples

    def __len__(self):
        return len(self.samples["x"])

    def __getitem__(self, index):
        x = self.samples["x"][index]
        return {"x": x + 0.1 * torch.randn_like(x), "y": self.samples["y"][index]}


def schedule(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)


def state_of(trainer: Trainer) -> dict:
    return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}


def assert_same(found: Trainer, expected: Trainer) -> None:
    torch.testing.assert_close(state_of(found), state_of(expected), rtol=0, atol=0)


class WithStatistics(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))


@pytest.mark.parametrize("workers", [None, 0, 2], ids=["one batch", "loader", "workers"])
@pytest.mark.parametrize("stopped_after", [1, 5, 7, 8])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    job_with, trained, samples, tmp_path, workers, stopped_after
):
    def data():
        if workers is None:
            return Data(train=samples, validation=samples)
        loader = DataLoader(Noisy(samples), batch_size=16, shuffle=True, num_workers=workers, drop_last=True)
        return Data(train=loader, validation=DataLoader(Noisy(samples), batch_size=25, shuffle=True))

    job = job_with(model=WithStatistics, data=data)
    options = {"epochs": 3, "schedule": schedule, "max_gradient_norm": 0.5}
    whole, expected = trained(job, **options, run_dir=tmp_path / "whole")
    _, stopped = trained(job, **options, run_dir=tmp_path / "run", callbacks=[StopAfter(stopped_after)])
    assert stopped.stopped_because is StopReason.INTERRUPTED
    resumed, result = trained(job, **options, run_dir=tmp_path / "run", resume=True)
    assert result.stopped_because is StopReason.FINISHED
    assert_same(resumed, whole)
    assert result.losses == expected.losses
    assert [(v.step, v.loss) for v in result.validations] == [(v.step, v.loss) for v in expected.validations]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, len(result.steps) + 1))


def test_steps_after_the_last_save_are_taken_again_alike(job_with, trained, tmp_path):
    class Dies(Callback):
        def on_step(self, trainer, record):
            if record.step == 7:
                raise RuntimeError("the machine is gone")

    whole, expected = trained(job_with(), epochs=3)
    with pytest.raises(RuntimeError, match="gone"):
        trained(job_with(), epochs=3, run_dir=tmp_path / "run", save_every=3, callbacks=[Dies()])
    resumed, result = trained(job_with(), epochs=3, run_dir=tmp_path / "run", save_every=3, resume=True)
    assert_same(resumed, whole)
    assert result.losses == expected.losses


def test_a_finished_run_goes_on_with_more_epochs(job_with, trained, tmp_path):
    whole, expected = trained(job_with(), epochs=3)
    trained(job_with(), epochs=2, run_dir=tmp_path / "run")
    resumed, result = trained(job_with(), epochs=3, run_dir=tmp_path / "run", resume=True)
    assert_same(resumed, whole)
    assert result.losses == expected.losses
    _, again = trained(job_with(), epochs=3, run_dir=tmp_path / "run", resume=True)
    assert again.losses == expected.losses


def test_resuming_without_a_save_begins_the_run(job_with, trained, tmp_path):
    _, result = trained(job_with(), epochs=1, run_dir=tmp_path / "run", resume=True)
    assert len(result.steps) == 4


def test_only_the_newest_saves_are_kept(job_with, trained, tmp_path):
    trained(job_with(), epochs=3, run_dir=tmp_path / "run", save_every=1, keep_saves=3)
    assert sorted(path.name for path in (tmp_path / "run" / SAVES).iterdir()) == [
        "step-000000010", "step-000000011", "step-000000012",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["model.safetensors", "run.json", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["a bit", "torn", "gone"])
def test_a_damaged_save_is_refused_and_the_one_before_it_used(job_with, trained, tmp_path, name, damage):
    whole, expected = trained(job_with(), epochs=2)
    trained(job_with(), steps=6, run_dir=tmp_path / "run", save_every=2)
    path = tmp_path / "run" / SAVES / "step-000000006" / name
    content = bytearray(path.read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 16
        path.write_bytes(content)
    elif damage == "torn":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.unlink()
    with pytest.warns(UserWarning, match=r"step-000000006 is not used.*"):
        resumed, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", resume=True)
    assert_same(resumed, whole)
    assert result.losses == expected.losses


def test_no_whole_save_is_told_and_nothing_is_trained(job_with, trained, tmp_path):
    trained(job_with(), steps=2, run_dir=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run" / SAVES / "step-000000002" / "state.pt").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ResumeError, match=r"has no complete checkpoint[\s\S]*state.pt has bytes 0"):
            trained(job_with(), epochs=2, run_dir=tmp_path / "run", resume=True)


def test_a_save_that_would_run_code_is_not_loaded(job_with, trained, tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("this ran",))

    trained(job_with(), steps=2, run_dir=tmp_path / "run")
    save = tmp_path / "run" / SAVES / "step-000000002"
    torch.save({"step": 2, "evil": Evil()}, save / "state.pt")
    import hashlib

    files = json.loads((save / "manifest.json").read_text())["files"]
    content = (save / "state.pt").read_bytes()
    files["state.pt"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (save / "manifest.json").write_text(manifest_text(2, files))
    with pytest.raises(ResumeError, match=r"state\.pt cannot be read"):
        newest_save(tmp_path / "run", lambda _reason: None)


def test_a_manifest_is_changed_nowhere_unseen(job_with, trained, tmp_path):
    trained(job_with(), steps=4, run_dir=tmp_path / "run", save_every=2)
    path = tmp_path / "run" / SAVES / "step-000000004" / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        found = newest_save(tmp_path / "run", lambda _reason: None)
        assert found is not None
        assert found.step == 2, f"byte {place} was changed"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 7}, "has seed 0, and this one 7"),
        ({"micro_batch_size": 8}, "global batch size 16, and this one 8"),
    ],
)
def test_another_run_is_not_resumed_by_mistake(job_with, trained, tmp_path, changes, said):
    trained(job_with(), steps=2, run_dir=tmp_path / "run")
    with pytest.raises(ResumeError, match=said):
        trained(job_with(), run_dir=tmp_path / "run", resume=True, **changes)


def test_another_model_or_optimizer_is_not_resumed_by_mistake(job_with, trained, tmp_path):
    trained(job_with(), steps=2, run_dir=tmp_path / "run")
    with pytest.raises(ResumeError, match="cannot be resumed with this model"):
        trained(job_with(model=lambda: nn.Linear(8, 3)), run_dir=tmp_path / "run", resume=True)
    sgd = job_with(optimizer=lambda p: torch.optim.SGD([{"params": [each]} for each in p]))
    with pytest.raises(ResumeError, match="SGD"):
        trained(sgd, run_dir=tmp_path / "run", resume=True)
    with pytest.raises(ResumeError, match="no scheduler, and this one has one"):
        trained(job_with(), run_dir=tmp_path / "run", resume=True, schedule=schedule)


def test_saving_needs_a_directory(job_with):
    from brimful.settings import Settings

    with pytest.raises(UsageError, match="save_every needs a run_dir"):
        Trainer(job_with(), Settings(micro_batch_size=4), save_every=3)


def start_amid_a_signal(monkeypatch):
    """Each thread starts amid a signal."""
    start = threading.Thread.start

    def start_after_it(thread):
        signal.raise_signal(signal.SIGCHLD)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_after_it)


def write_amid_a_signal(monkeypatch):
    """It comes while the main thread waits for a save."""
    finish = Saves._finish

    def finish_late(*arguments):
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGCHLD)
        time.sleep(0.5)
        finish(*arguments)

    monkeypatch.setattr(Saves, "_finish", finish_late)


@pytest.mark.skipif(sys.platform == "win32", reason="it has no SIGCHLD")
@pytest.mark.parametrize("amid_a_signal", [start_amid_a_signal, write_amid_a_signal])
def test_a_signal_handler_that_raises_leaves_the_save_whole(
    amid_a_signal, trained, job_with, tmp_path, monkeypatch
):
    """As when a worker of a DataLoader is killed: torch raises from its handler of SIGCHLD."""

    def raises(_number, _frame):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises once for each worker too
        raise RuntimeError("DataLoader worker is killed")

    before = signal.signal(signal.SIGCHLD, raises)
    try:
        with monkeypatch.context() as patch:
            amid_a_signal(patch)
            with pytest.raises(DataError, match="DataLoader worker is killed") as caught:
                trained(job_with(), epochs=2, run_dir=tmp_path / "run", save_every=1)
    finally:
        signal.signal(signal.SIGCHLD, before)
    [note] = caught.value.__notes__
    assert "The run is saved after step 1;" in note
    resumed, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", resume=True)
    whole, expected = trained(job_with(), epochs=2, run_dir=tmp_path / "whole")
    assert [step.loss for step in result.steps] == [step.loss for step in expected.steps]
    assert_same(resumed, whole)


def test_the_error_of_a_failed_save_does_not_hold_the_copies_of_the_weights(
    trained, job_with, tmp_path, monkeypatch
):
    held = []

    def fails(_saves, _partial, _path, copies, _files):
        held.append(weakref.ref(next(iter(copies.files["model.safetensors"][0].values()))))
        raise OSError("no space left on device")

    monkeypatch.setattr(Saves, "_finish", fails)
    gc.disable()
    try:
        with pytest.raises(SaveError, match="no space left on device"):
            trained(job_with(), epochs=1, run_dir=tmp_path / "run")
        assert [each() for each in held] == [None] * len(held)
        assert held
    finally:
        gc.enable()
