import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from brimful.errors import RunDirectoryError, SaveError, UsageError
from brimful.trainer.storage.restore import SAVES
from brimful.trainer.storage.run_directory import (
    RunDirectory,
    check_restart,
    check_run_directory,
    set_unsaved_run_aside,
)
from brimful.trainer.storage.weights import WEIGHTS, load_weights


class Tied(nn.Module):
    """Embedding and head share their weight, and a buffer is a view of a part of another."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        steps = torch.arange(6.0)
        self.register_buffer("steps", steps)
        self.register_buffer("first_steps", steps[:3])
        self.register_buffer("all_steps", steps.view(2, 3))
        self.register_buffer("columns", torch.rand(3, 2).T)
        self.register_buffer("nothing", torch.empty(0))


@pytest.fixture
def directory(tmp_path):
    with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
        yield directory


def full_disk(*_args, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_it_is_made_with_its_parents_and_may_be_empty(tmp_path):
    RunDirectory(tmp_path / "runs" / "a").close()
    (tmp_path / "empty").mkdir()
    RunDirectory(tmp_path / "empty").close()
    assert (tmp_path / "runs" / "a").is_dir()


def test_a_directory_with_something_in_it_is_refused_and_left_alone(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_text(name)
    for make in (RunDirectory, check_run_directory):
        with pytest.raises(RunDirectoryError, match=r"a, b, c, ….*choose another"):
            make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcd")


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory(path)
    with pytest.raises(RunDirectoryError, match="cannot be opened and written to"):
        RunDirectory(path / "below")
    assert path.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RunDirectoryError, match="Permission denied"):
        RunDirectory(tmp_path / "run")


def test_a_directory_in_the_place_of_weights_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / WEIGHTS).mkdir()
    with pytest.raises(RunDirectoryError, match=r"weights\.safetensors is a directory"):
        RunDirectory(tmp_path, resumes=True)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]


def test_checking_writes_nothing(tmp_path):
    check_run_directory(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_tied_and_viewing_tensors_come_back_as_they_were(directory):
    model, other = Tied(), Tied()
    path = directory.save_weights(model, WEIGHTS, {"step": "12"})
    load_weights(other, path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.head.weight is other.embedding.weight
    assert "head.weight" not in load_file(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "12", "tied": '{"head.weight": "embedding.weight"}'}


def test_tied_weights_load_through_safetensors_alone(directory):
    model, other = (nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}) for _ in range(2))
    for each in (model, other):
        each["b"].weight = each["a"].weight
    load_model(other, directory.save_weights(model, WEIGHTS, {}))
    assert torch.equal(other["b"].weight, model["a"].weight)


def test_weights_of_another_model_or_none_are_refused(directory, tmp_path):
    path = directory.save_weights(nn.Linear(2, 2), WEIGHTS, {})
    with pytest.raises(UsageError, match=r"no weights for this Linear:(.*\n)*.*size mismatch"):
        load_weights(nn.Linear(2, 3), path)
    with pytest.raises(UsageError, match="no weights for this Linear"):
        load_weights(nn.Linear(2, 3), tmp_path / "nowhere")
    path.write_bytes(b"broken")
    with pytest.raises(UsageError, match="no weights for this Linear"):
        load_weights(nn.Linear(2, 3), path)


def test_state_that_is_no_tensor_is_left_out_with_a_warning(directory):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"history": [1, 2]}

    with pytest.warns(UserWarning, match="'_extra_state' .dict. is not a tensor"):
        path = directory.save_weights(Extra(2, 2), WEIGHTS, {})
    assert set(load_file(path)) == {"weight", "bias"}


@pytest.mark.parametrize(
    "failing", ["brimful.trainer.storage.weights.save_file", "pathlib.Path.replace", "os.fsync"]
)
def test_a_full_disk_leaves_the_file_that_was_there(directory, tmp_path, monkeypatch, failing):
    model = nn.Linear(64, 64)
    path = directory.save_weights(model, WEIGHTS, {})
    before = path.read_bytes()
    nn.init.zeros_(model.weight)
    monkeypatch.setattr(failing, full_disk)
    with pytest.raises(SaveError) as caught:
        directory.save_weights(model, WEIGHTS, {})
    for said in (
        str(path),
        "No space left on device",
        "needed: 16.2 KiB; free: ",
        "is intact",
        "Trainer.model",
    ):
        assert said in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["metrics.jsonl", SAVES, WEIGHTS]


def test_metrics_that_cannot_be_flushed_are_an_error_in_words(directory, monkeypatch):
    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(SaveError, match=r"metrics.jsonl could not be written: No space left on device"):
        directory.flush_metrics()


def test_json_that_cannot_be_written_leaves_the_file_that_was_there(directory, tmp_path, monkeypatch):
    directory.write_json("plan.json", {"a": 1})
    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(SaveError, match="is intact"):
        directory.write_json("plan.json", {"a": 2})
    with pytest.raises(SaveError, match="Nothing is there"):
        directory.write_json("result.json", {"a": 2})
    assert json.loads((tmp_path / "run" / "plan.json").read_text()) == {"a": 1}


def test_a_run_directory_that_is_gone_is_a_save_error(directory, tmp_path):
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(SaveError, match=r"No such file or directory|I/O error"):
        directory.save_weights(nn.Linear(2, 2), WEIGHTS, {})


def test_discarding_leaves_the_directory_empty(directory, tmp_path):
    directory.write_json("plan.json", {})
    directory.discard()
    assert list((tmp_path / "run").iterdir()) == []


def test_discarding_deletes_nothing_that_was_there_before(tmp_path):
    path = tmp_path / "run"
    with contextlib.closing(RunDirectory(path)) as earlier:
        earlier.write_json("plan.json", {"a": 1})
        earlier.save_weights(nn.Linear(2, 2), WEIGHTS, {})
    before = sorted(entry.name for entry in path.iterdir())
    later = RunDirectory(path, resumes=True)
    later.write_json("plan.json", {"a": 2})
    later.write_json("result.json", {})
    later.discard()
    assert sorted(entry.name for entry in path.iterdir()) == before


def test_metrics_that_are_not_a_regular_file_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    for attempt in (lambda: RunDirectory(tmp_path, resumes=True), lambda: check_restart(tmp_path)):
        with pytest.raises(RunDirectoryError, match="is not a regular file"):
            attempt()


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on file sizes there")
def test_a_real_limit_on_file_size_keeps_old_weights_and_whole_lines(tmp_path):
    script = """
        import resource, sys
        from pathlib import Path
        from torch import nn
        from brimful.errors import SaveError
        from brimful.trainer.storage.run_directory import RunDirectory
        from brimful.trainer.storage.weights import WEIGHTS

        directory = RunDirectory(Path(sys.argv[1]))
        directory.save_weights(nn.Linear(10, 10), WEIGHTS, {"step": "1"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            directory.save_weights(nn.Linear(100, 100), WEIGHTS, {"step": "2"})
        except SaveError as error:
            print("weights:", error)
        try:
            for _ in range(100):
                directory.append_metrics({"text": "x" * 90})
        except SaveError as error:
            print("metrics:", error)
    """
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(run_dir)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "weights:" in done.stdout
    assert "metrics:" in done.stdout
    assert "File too large" in done.stdout
    with safe_open(run_dir / WEIGHTS, "pt") as file:
        assert file.metadata()["step"] == "1"
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2000 // 103
    assert all(json.loads(line)["text"] == "x" * 90 for line in lines)
    assert sorted(path.name for path in run_dir.iterdir()) == ["metrics.jsonl", SAVES, WEIGHTS]


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_goes_on(tmp_path):
    path = tmp_path / "run"
    first = RunDirectory(path)
    first.append_metrics({"kind": "step"})
    restart = (lambda: check_restart(path), lambda: set_unsaved_run_aside(path))
    for attempt in (lambda: RunDirectory(path, resumes=True), *restart):
        with pytest.raises(RunDirectoryError, match="another process is training"):
            attempt()
    assert (path / "metrics.jsonl").exists()
    first.close()
    RunDirectory(path, resumes=True).close()
