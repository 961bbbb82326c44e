"""`brimful doctor`, as a user types it: what is found, where, and the exit status."""

from __future__ import annotations

import json
import os
import pickle
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import brimful

SCRIPT = """
import torch
total = 0
for x in data:
    loss = model(x).mean()
    loss.backward()
    total += loss
"""
JOB = """
import torch
from torch import nn
import brimful as bf

job = bf.Job(
    model=lambda: nn.Linear(64, 4096, bias=False),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]).mT, batch["y"]),
    batch=lambda n: {"x": torch.randn(n, 128, 64), "y": torch.zeros(n, 128).long()},
    optimizer="adamw",
    name="tiny",
)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "clean.py").write_text(SCRIPT.replace("+= loss", "+= loss.item()"))
    (tmp_path / "mine.py").write_text(JOB)
    blocks = [{"size": 1024, "requested_size": 1000, "state": "active_allocated", "address": 0, "frames": []}]
    snapshot = {"segments": [{"total_size": 2048, "blocks": blocks}], "device_traces": []}
    (tmp_path / "memory.pickle").write_bytes(pickle.dumps(snapshot))
    return tmp_path


def test_a_script_is_checked_and_not_run(folder: Path) -> None:
    done = brimful(folder, "doctor", "train.py", "clean.py", "--sarif", "found.sarif")
    assert done.returncode == 1
    assert done.stdout.startswith("train.py:7: history-kept: total keeps the graphs of earlier steps")
    assert done.stdout.endswith("1 finding in the text of 2 scripts\n")
    (result,) = json.loads((folder / "found.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "history-kept"
    clean = brimful(folder, "doctor", "clean.py", "--json")
    assert (clean.returncode, json.loads(clean.stdout)) == (0, {"scripts": ["clean.py"], "findings": []})


def test_notes_leave_the_exit_status(folder: Path) -> None:
    text = SCRIPT.replace("+= loss", "+= loss.item()") + "\nmodel.cuda()\n"
    (folder / "clean.py").write_text(text)
    done = brimful(folder, "doctor", "clean.py")
    assert "clean.py:7: note: waits-for-values" in done.stdout
    assert done.returncode == 0


def test_a_folder_of_scripts_is_checked(folder: Path) -> None:
    done = brimful(folder, "doctor", ".", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["scripts"]) == (1, ["clean.py", "mine.py", "train.py"])
    assert {*document["findings"][0]} == {"what", "change", "line", "size_bytes", "seconds", "check"}


def test_a_broken_script_is_reported_and_the_others_are_checked(folder: Path) -> None:
    (folder / "train.py").unlink()
    (folder / "broken.py").write_text("import torch\nfor x in y\n")
    done = brimful(folder, "doctor", ".", "--sarif", "found.sarif")
    assert done.returncode == 1
    assert done.stdout.startswith("broken.py:2: not-checked: the script cannot be checked: it is not Python: ")
    assert done.stdout.endswith("1 finding in the text of 3 scripts\n")
    (result,) = json.loads((folder / "found.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "not-checked"
    (folder / "broken.py").unlink()
    assert brimful(folder, "doctor", ".").returncode == 0


def test_a_snapshot_is_explained(folder: Path) -> None:
    done = brimful(folder, "doctor", "memory.pickle", "--json")
    (device,) = json.loads(done.stdout)["devices"]
    assert (done.returncode, device["reserved_bytes"], device["allocated_bytes"]) == (0, 2048, 1024)
    assert set(device) == {
        *("device", "segments", "reserved_bytes", "allocated_bytes", "late_bytes", "free_inside_bytes"),
        *(
            "largest_free_bytes",
            "cached_bytes",
            "lines",
            "events",
            "before_bytes",
            "peak",
            "ran_out",
            "findings",
        ),
    }
    (folder / "memory.pickle").write_bytes(b"cos\nsystem\n.")
    refused = brimful(folder, "doctor", "memory.pickle")
    assert refused.returncode == 2
    assert "could run code (GLOBAL); it is not read" in refused.stderr


def test_a_job_is_checked_without_running_it(folder: Path) -> None:
    done = brimful(folder, "doctor", "mine.py:job", "--device", "RTX 3090", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["job"], document["device"]) == (1, "tiny", "RTX 3090")
    assert [each["check"] for each in document["findings"]] == ["logits-in-the-loss"]
    assert set(document) == {
        *("job", "device", "torch", "micro_batch_size", "predicted_peak_allocated_bytes", "peak_phase"),
        *("categories", "modules", "largest", "savings", "notes", "findings"),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.py",), "none.py cannot be read: No such file"),
        (("none.pickle",), "none.pickle cannot be read: No such file"),
        (("train.py", "mine.py:job"), "several scripts can be named, or one other thing"),
        (("train.py", "d/nosuch"), "there is no file d/nosuch (looked in "),
        (("train.py", "NOTES.txt"), "there is no file NOTES.txt (looked in "),
        (("train.py", ".", "found.txt"), "found.txt is not a Python script"),
        (("NOTES.txt",), "there is no file or directory 'NOTES.txt' (looked in "),
        (("found.txt",), "found.txt is a file, but names no model: it is neither Python (.py) nor JSON"),
        (("mine.py:job", "--sarif", "x"), "--sarif does not go with a job"),
        (("train.py", "--device", "T4"), "--device does not go with scripts"),
        (("no-such-model",), "unknown model 'no-such-model'"),
    ],
)
def test_bad_usage_says_what_was_found(folder: Path, arguments: tuple[str, ...], words: str) -> None:
    (folder / "found.txt").touch()
    done = brimful(folder, "doctor", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_findings_are_as_wide_as_a_terminal_and_a_line_each_for_tools(folder: Path) -> None:
    long = brimful(folder, "doctor", "train.py").stdout.splitlines()
    assert [each[:11] for each in long] == ["train.py:7:", "  → add to ", "1 finding i"]
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "brimful", "doctor", "train.py"]
    variables = {**os.environ, "COLUMNS": "60"}
    subprocess.run(command, cwd=folder, env=variables, stdout=theirs, timeout=120, check=False)
    shown = os.read(ours, 4096).decode().replace("\r\n", "\n")
    os.close(ours)
    os.close(theirs)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("train.py:7: history-kept: ")
    assert lines[1].startswith("    ")
    assert shown.split() == "\n".join(long).split()
