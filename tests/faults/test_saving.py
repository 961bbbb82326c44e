"""What a run says of its saves is true, and what it resumes from does not hang on `metrics.jsonl`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from brimful.errors import SaveError
from brimful.job import Data
from brimful.results import StopReason
from brimful.trainer import Callback
from brimful.trainer.storage import saves
from brimful.utils.quantities import parse_bytes

pytestmark = pytest.mark.filterwarnings("ignore:the last batch of each epoch has")


@pytest.fixture
def disk(monkeypatch):
    """A disk that is full for the saves after some steps; asked once for each attempt."""

    class Disk:
        full_for: tuple[str, ...] = ()
        times = 10**6
        write = staticmethod(saves.write_tensors)

        def __call__(self, tensors, path, metadata):
            self.write(tensors, path, metadata)
            if path.parent.name.startswith(self.full_for) and self.full_for and self.times:
                self.times -= 1
                raise OSError(28, "No space left on device")

    found = Disk()
    monkeypatch.setattr(saves, "write_tensors", found)
    return found


def saved_steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "saves").iterdir())


def test_a_first_save_that_fails_is_not_said_to_be_there(job_with, trained, tmp_path, disk):
    trained(job_with(), steps=1, run_dir=tmp_path / "whole")
    (whole,) = (tmp_path / "whole" / "saves").iterdir()
    disk.full_for = (".step-",)
    with pytest.raises(SaveError, match="There is no checkpoint before it") as error:
        trained(job_with(), steps=2, run_dir=tmp_path / "run", save_every=1)
    assert saved_steps(tmp_path / "run") == []
    notes = "\n".join(error.value.__notes__)
    assert "Saving after it failed as well" in notes
    assert "The run has no save" in notes
    assert "is saved after step" not in notes
    needed = parse_bytes(re.search(r"needed: at least ([\d.]+ \w+);", str(error.value))[1])
    files = sum(path.stat().st_size for path in whole.iterdir() if path.name != "manifest.json")
    assert 0.95 * files < needed <= files
    disk.full_for = ()
    _, result = trained(job_with(), steps=2, run_dir=tmp_path / "run", resume=True)
    assert result.stopped_because is StopReason.FINISHED


def test_a_later_save_that_fails_names_the_one_that_is_whole(job_with, trained, tmp_path, disk):
    disk.full_for = (".step-000000003", ".step-000000004")
    with pytest.raises(SaveError, match="The checkpoint after step 2 is complete"):
        trained(job_with(), steps=4, run_dir=tmp_path / "run", save_every=1)
    assert saved_steps(tmp_path / "run") == [1, 2]


def failing_validation(job):
    def loss(model, batch):
        if not model.training and type(batch["x"]) is torch.Tensor:
            raise ValueError("a metric of mine")
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return replace(job, loss=loss)


def test_an_error_after_a_save_of_the_same_step_that_failed_makes_a_second_attempt(
    job_with, trained, samples, tmp_path, disk
):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    _, expected = trained(job, epochs=2)
    disk.full_for, disk.times = (".step-000000004",), 1
    with pytest.raises(ValueError, match="of mine") as error:
        trained(failing_validation(job), epochs=2, run_dir=tmp_path / "run", save_every=2)
    assert disk.times == 0
    assert error.value.__notes__ == [
        f"The run is saved after step 4; resuming {tmp_path / 'run'} continues there."
    ]
    assert saved_steps(tmp_path / "run") == [2, 4]
    _, result = trained(job, epochs=2, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses


def test_where_the_second_attempt_fails_too_the_save_before_is_named(
    job_with, trained, samples, tmp_path, disk
):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    disk.full_for = (".step-000000004",)
    with pytest.raises(ValueError, match="of mine") as error:
        trained(failing_validation(job), epochs=2, run_dir=tmp_path / "run", save_every=2)
    failed, where = error.value.__notes__
    assert "Saving after it failed as well: SaveError" in failed
    assert where.startswith("The run is saved after step 2;")
    assert saved_steps(tmp_path / "run") == [2]


class Worsening:
    """A validation loss that is lowest in the second epoch."""

    losses = (3.0, 1.0, 2.0, 1.5, 2.5)

    def __init__(self, validated: int = 0) -> None:
        self.values = iter(self.losses[validated:])

    def __call__(self, model, batch):
        if model.training or type(batch["x"]) is not torch.Tensor:
            return F.cross_entropy(model(batch["x"]), batch["y"])
        return torch.tensor(next(self.values))


def damage(metrics: Path, how: str) -> None:
    content = metrics.read_bytes()
    if how == "gone":
        metrics.unlink()
    elif how == "empty":
        metrics.write_bytes(b"")
    elif how == "torn":
        metrics.write_bytes(content[: len(content) // 2])
    elif how == "one line":
        lines = content.splitlines(keepends=True)
        metrics.write_bytes(b"".join([lines[0], b'{"kind": "step", "step": "x"}\n', *lines[2:]]))
    else:
        metrics.write_bytes(b"\x00\xff garbage [" * 100)


@pytest.mark.parametrize("how", ["gone", "empty", "torn", "one line", "garbage"])
def test_the_best_weights_and_patience_do_not_hang_on_the_metrics(job_with, trained, samples, tmp_path, how):
    job = job_with(data=lambda: Data(train=samples, validation=samples))
    run = tmp_path / "run"
    _, expected = trained(replace(job, loss=Worsening()), 50, epochs=5, patience=3)
    trained(replace(job, loss=Worsening()), 50, epochs=3, run_dir=run)
    best, before = (run / "best.safetensors").read_bytes(), (run / "metrics.jsonl").read_bytes()
    damage(run / "metrics.jsonl", how)
    damaged = (run / "metrics.jsonl").read_bytes() if (run / "metrics.jsonl").exists() else b""
    with pytest.warns(UserWarning, match=r"metrics.jsonl is damaged: it has \d of the 3 steps"):
        _, result = trained(replace(job, loss=Worsening(2)), 50, epochs=5, run_dir=run, resume=True, patience=3)
    assert (run / "best.safetensors").read_bytes() == best
    assert [v.loss for v in result.validations] == [v.loss for v in expected.validations]
    assert result.stopped_because is expected.stopped_because is StopReason.NOT_IMPROVING
    assert result.losses[-2:] == expected.losses[-2:]
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert all(json.loads(line) for line in lines)
    kept = [path.read_bytes() for path in run.glob("metrics.damaged-*.jsonl")]
    assert kept == ([damaged] if damaged else [])
    if how == "one line":
        assert set(before.splitlines(keepends=True)[2:5]) <= set(lines)


def test_metrics_after_the_save_are_no_damage(job_with, trained, tmp_path):
    class Dies(Callback):
        def on_step(self, trainer, record):
            if record.step == 7:
                raise KeyboardInterrupt

    _, expected = trained(job_with(), epochs=2)
    with pytest.raises(KeyboardInterrupt):
        trained(job_with(), epochs=2, run_dir=tmp_path / "run", save_every=3, callbacks=[Dies()])
    _, result = trained(job_with(), epochs=2, run_dir=tmp_path / "run", resume=True)
    assert result.losses == expected.losses
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 9))
