"""What a newcomer types first: the bare command, and completion of the shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import brimful


def test_the_bare_command_suggests_commands_that_run(tmp_path: Path) -> None:
    bare = brimful(tmp_path)
    assert (bare.returncode, bare.stderr) == (0, "")
    assert "brimful --help" in bare.stdout
    watch, *predict = re.findall(r"(?m)^  brimful (.+)$", bare.stdout)
    assert watch.startswith("run ")
    assert len(predict) == 2
    for each in predict:
        ran = brimful(tmp_path, *shlex.split(each))
        assert ran.returncode == 0, (each, ran.stderr)
        assert "RTX 3060" in ran.stdout


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("pla", "plan"),
        ("estimate gpt2 --micro-b", "--micro-batch-size"),
        ("plan x --device RTX-309", "RTX-3090"),
    ],
)
def test_a_shell_completes(typed: str, completed: str) -> None:
    environment = {
        "_BRIMFUL_COMPLETE": "complete_bash",
        "COMP_WORDS": f"brimful {typed}",
        "COMP_CWORD": str(len(typed.split())),
    }
    code = "import sys; sys.argv = ['brimful']; from brimful.cli.app import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed in ran.stdout.split()


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("train images . --num-workers 2", "It is --workers here."),
        ("train language-model a.txt --workers 2", "`brimful train FILE.py:job` and"),
        ("estimate gpt2 --pin-memory", "`brimful train FILE.py:job` and"),
    ],
)
def test_options_of_a_data_loader_are_named_where_they_are(tmp_path: Path, typed: str, named: str) -> None:
    refused = brimful(tmp_path, *shlex.split(typed))
    assert refused.returncode == 2
    assert named in refused.stderr


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("estimat gpt2", "there is no command estimat. Meant is perhaps: brimful estimate."),
        ("frobnicate", "there is no command frobnicate. To see all: brimful --help."),
        ("train.py", "there is no command train.py. To watch a script: brimful run train.py."),
        ("run", "Missing argument 'script'. For example: brimful run train.py"),
        ("report", "For example: brimful report runs/digits"),
        ("gpus gpt2", "Missing option '--global-batch-size'. For example: brimful gpus gpt2"),
        ("doctor a.py --kill 3", "--kill does not go with scripts. What does: brimful doctor --help"),
        ("doctor empty.pickle", '_dump_snapshot("snapshot.pickle") writes one.'),
    ],
)
def test_what_cannot_be_done_ends_with_what_to_type_next(tmp_path: Path, typed: str, named: str) -> None:
    (tmp_path / "a.py").touch()
    (tmp_path / "empty.pickle").touch()
    refused = brimful(tmp_path, *shlex.split(typed))
    assert refused.returncode in (1, 2)
    assert named in refused.stderr
