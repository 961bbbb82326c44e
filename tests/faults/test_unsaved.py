"""`resume` in a run directory without saves: what training wrote there is neither deleted nor overwritten."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from brimful.errors import ResumeError, RunDirectoryError
from brimful.job import Data
from brimful.trainer import Callback
from brimful.trainer.storage.run_directory import check_restart

pytestmark = pytest.mark.filterwarnings("ignore:the last batch of each epoch has")


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


class KilledAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer, record):
        if record.step == self.step:
            raise Killed


@pytest.fixture
def job(job_with, samples):
    return job_with(data=lambda: Data(train=samples, validation=samples))


def content_of(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


def moved_away(saves: Path) -> None:
    shutil.rmtree(saves)


def linked_to_a_disk_that_is_not_mounted(saves: Path) -> None:
    shutil.rmtree(saves)
    saves.symlink_to(saves.parent.parent / "not mounted")


def emptied(saves: Path) -> None:
    shutil.rmtree(saves)
    saves.mkdir()


def a_file(saves: Path) -> None:
    shutil.rmtree(saves)
    saves.write_text("")


def a_fifo(saves: Path) -> None:
    shutil.rmtree(saves)
    os.mkfifo(saves)


LOST = [moved_away, linked_to_a_disk_that_is_not_mounted, emptied, a_file, a_fifo]


@pytest.mark.parametrize("lose", LOST)
def test_a_finished_run_whose_saves_are_gone_is_refused_and_left_as_it_is(job, trained, tmp_path, lose):
    run = tmp_path / "run"
    trained(job, epochs=2, run_dir=run, ema_decay=0.9)
    lose(run / "saves")
    before = content_of(run)
    assert {"weights.safetensors", "best.safetensors", "average.safetensors", "result.json"} <= set(before)
    with pytest.raises(ResumeError, match=r"(?s)saves.*Bring"):
        trained(job, epochs=3, run_dir=run, resume=True, ema_decay=0.9)
    assert content_of(run) == before


@pytest.mark.parametrize("lose", [moved_away, linked_to_a_disk_that_is_not_mounted, a_file])
def test_a_killed_run_whose_saves_are_gone_is_refused_and_left_as_it_is(job, trained, tmp_path, lose):
    run = tmp_path / "run"
    with pytest.raises(Killed):
        trained(job, epochs=2, run_dir=run, save_every=1, callbacks=[KilledAt(3)])
    lose(run / "saves")
    before = content_of(run)
    with pytest.raises(ResumeError, match=r"(?s)saves.*Bring"):
        trained(job, epochs=2, run_dir=run, resume=True)
    assert content_of(run) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_saves_that_may_not_be_read_are_an_error_and_left_as_they_are(job, trained, tmp_path):
    run = tmp_path / "run"
    trained(job, epochs=1, run_dir=run)
    before = content_of(run)
    (run / "saves").chmod(0)
    try:
        with pytest.raises(ResumeError, match="Permission denied"):
            trained(job, epochs=2, run_dir=run, resume=True)
    finally:
        (run / "saves").chmod(0o755)
    assert content_of(run) == before


def test_a_run_killed_before_its_first_save_starts_again_and_keeps_what_it_left(job, trained, tmp_path):
    run = tmp_path / "run"
    _, expected = trained(job, epochs=1)
    left = []
    for steps in (2, 1):
        with pytest.raises(Killed):
            trained(job, epochs=1, run_dir=run, resume=True, callbacks=[KilledAt(steps)])
        left.append((run / "metrics.jsonl").read_bytes())
    _, result = trained(job, epochs=1, run_dir=run, resume=True)
    assert result.losses == expected.losses
    assert losses(run) == list(expected.losses)
    assert [(run / f"unsaved-{number}" / "metrics.jsonl").read_bytes() for number in (1, 2)] == left
    assert losses(run / "unsaved-1") == list(expected.losses)[:2]


def test_a_half_written_save_stays_until_a_whole_one_is_there(job, trained, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Killed):
        trained(job, epochs=1, run_dir=run, callbacks=[KilledAt(2)])
    half = run / "saves" / ".step-000000002.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    with pytest.raises(Killed):
        trained(job, epochs=1, run_dir=run, resume=True, callbacks=[KilledAt(2)])
    assert (half / "model.safetensors").read_bytes() == b"half"
    trained(job, epochs=1, run_dir=run, resume=True)
    assert [path.name for path in (run / "saves").iterdir()] == ["step-000000004"]


def test_nothing_is_set_aside_before_the_run_can_start(job, job_with, trained, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Killed):
        trained(job, epochs=1, run_dir=run, callbacks=[KilledAt(2)])
    before = content_of(run)
    with pytest.raises(ZeroDivisionError):
        trained(job_with(model=lambda: 1 / 0), epochs=1, run_dir=run, resume=True)
    assert content_of(run) == before


def test_a_file_of_the_users_in_an_unsaved_run_is_refused_and_left_alone(job, trained, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Killed):
        trained(job, epochs=1, run_dir=run, callbacks=[KilledAt(2)])
    (run / "mine.txt").write_text("dear")
    before = content_of(run)
    with pytest.raises(RunDirectoryError, match=r"mine\.txt"):
        trained(job, epochs=1, run_dir=run, resume=True)
    assert content_of(run) == before


def test_a_save_that_was_refused_is_kept_although_another_of_its_step_is_refused_too(job, trained, tmp_path):
    run = tmp_path / "run"
    refused = []
    for epochs in (2, 3):
        trained(job, epochs=epochs, run_dir=run, resume=True)
        newest = max((run / "saves").glob("step-*"))
        (newest / "state.pt").write_bytes(b"torn %d" % epochs)
        shutil.copytree(newest, run / "saves" / "step-000000099", dirs_exist_ok=True)
        refused.append((newest / "state.pt").read_bytes())
        with pytest.warns(UserWarning, match="is not used"):
            trained(job, epochs=epochs, run_dir=run, resume=True)
    kept = [path / "state.pt" for path in (run / "saves").glob("refused-step-000000099*")]
    assert sorted(path.read_bytes() for path in kept) == refused


def test_metrics_that_cannot_be_opened_refuse_a_restart_in_a_line(tmp_path, monkeypatch):
    """As another user's are."""
    (tmp_path / "metrics.jsonl").touch()
    opened = Path.open

    def refusing(path, *arguments, **options):
        if path.name == "metrics.jsonl":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(RunDirectoryError, match=r"metrics.jsonl cannot be opened .*: Permission denied"):
        check_restart(tmp_path)
