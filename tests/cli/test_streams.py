"""What commands print, and how they end: output that cannot be written, jobs that print, exit or raise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.forked_commands import CLOSED, FULL, UNREAD, Command, Done, run

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full and fork")

JOB = """
import torch
from torch import nn
import brimful as bf

def samples(count):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return {"x": x, "y": (x.sum(1) > 0).long()}

def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def job(model=lambda: nn.Linear(8, 2), loss=cross_entropy):
    return bf.Job(model=model, loss=loss, batch=samples, optimizer="adamw",
                  data=lambda: bf.Data(train=samples(64), validation=samples(16)), name="signs")
"""
PRINTS = """
import atexit, os, subprocess
import jobs

print("at import")
os.write(1, b"below Python\\n")
subprocess.run(["echo", "by a process"])
atexit.register(print, "at exit")

def job():
    usual = jobs.job()
    def model():
        print("in model")
        return usual.model()
    def loss(model, batch):
        print("in loss")
        return usual.loss(model, batch)
    return jobs.job(model, loss)
"""
TALKS = """
import jobs

def job():
    usual = jobs.job()
    def loss(model, batch):
        print("in loss " * 100, flush=True)
        return usual.loss(model, batch)
    return jobs.job(loss=loss)
"""
EXITS = """
import sys
import jobs

def job(when):
    def model():
        sys.exit(0)
    def loss(model, batch):
        sys.exit("no GPU")
    if when == "factory":
        sys.exit()
    return jobs.job(loss=loss) if when == "loss" else jobs.job(model)
"""
CLOSES = """
import sys
import jobs

def job(how):
    if how == "closed":
        sys.stdout.close()
    else:
        sys.stdout = None
    return jobs.job()
"""
RAISES = """
def settings():
    return {}["missing"]

def job():
    return settings()
"""
FILES = {
    "jobs.py": JOB,
    "prints.py": PRINTS,
    "talks.py": TALKS,
    "exits.py": EXITS,
    "closes.py": CLOSES,
    "exits_at_import.py": "import sys\nsys.exit(0)\n",
    "raises.py": RAISES,
    "raises_at_import.py": "1 / 0\n",
    "syntax.py": "def job(:\n",
}
ESTIMATE = ("--device", "T4")
TRAIN = ("--device", "cpu", "--global-batch-size", "16", "--epochs", "2")


def make_files(folder: Path) -> Path:
    for name, content in FILES.items():
        (folder / name).write_text(content)
    return folder


@pytest.fixture(scope="module")
def estimates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """Commands that take little time, in forks of one process."""
    commands = {
        "prints": Command(arguments=("estimate", "prints.py:job", *ESTIMATE, "--json")),
        "exits_at_import": Command(arguments=("estimate", "exits_at_import.py:job", *ESTIMATE, "--json")),
        "exits_in_factory": Command(
            arguments=("estimate", "exits.py:job", "--set", "when=factory", *ESTIMATE, "--json")
        ),
        "exits_in_model": Command(
            arguments=("estimate", "exits.py:job", "--set", "when=model", *ESTIMATE, "--json")
        ),
        "exits_in_loss": Command(
            arguments=("estimate", "exits.py:job", "--set", "when=loss", *ESTIMATE, "--json")
        ),
        "sys_exit": Command(arguments=("estimate", "sys:exit", *ESTIMATE, "--json")),
        "builtin_exit": Command(arguments=("estimate", "builtins:exit", *ESTIMATE, "--json")),
        "exits_as_text": Command(arguments=("estimate", "exits_at_import.py:job", *ESTIMATE)),
        **{
            f"stdout {how}": Command(
                arguments=("estimate", "closes.py:job", "--set", f"how={how}", *ESTIMATE, "--json")
            )
            for how in ("closed", "None")
        },
        "undecodable": Command(arguments=("estimate", "\udcff.py:job", *ESTIMATE, "--json")),
        "raises": Command(arguments=("estimate", "raises.py:job", *ESTIMATE, "--json")),
        "raises_at_import": Command(arguments=("estimate", "raises_at_import.py:job", *ESTIMATE, "--json")),
        "syntax": Command(arguments=("estimate", "syntax.py:job", *ESTIMATE, "--json")),
        "raises_as_text": Command(arguments=("estimate", "raises.py:job", *ESTIMATE)),
        "no_model": Command(arguments=("estimate", "--json")),
        "no_number": Command(arguments=("estimate", "jobs.py:job", "--micro-batch-size", "x", "--json")),
        "full": Command(arguments=("estimate", "jobs.py:job", *ESTIMATE), stdout=FULL),
        "version": Command(arguments=("--version",), stdout=FULL),
        "both_full": Command(arguments=("--version",), stdout=FULL, stderr=FULL),
        "closed": Command(arguments=("--version",), stdout=CLOSED),
        "unread": Command(arguments=("--version",), stdout=UNREAD),
        "ascii": Command(
            arguments=("estimate", "jobs.py:job", *ESTIMATE), environment={"PYTHONIOENCODING": "ascii"}
        ),
    }
    folder = make_files(tmp_path_factory.mktemp("estimates"))
    return dict(zip(commands, run(folder, list(commands.values())), strict=True))


def test_json_alone_is_on_standard_output_whatever_prints(estimates: dict[str, Done]) -> None:
    done = estimates["prints"]
    assert done.status == 0
    assert done.document["job"] == "signs"
    for line in ("at import", "below Python", "by a process", "in model", "in loss", "at exit"):
        assert line in done.err.splitlines()


@pytest.mark.parametrize("how", ["closed", "None"])
def test_a_job_that_closes_standard_output_leaves_the_result(estimates: dict[str, Done], how: str) -> None:
    assert estimates[f"stdout {how}"].document["job"] == "signs"


def test_a_name_that_is_not_utf_8_is_refused_in_a_line(estimates: dict[str, Done]) -> None:
    done = estimates["undecodable"]
    assert done.status == 2
    assert "not UTF-8" in done.document["error"]["message"]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("exits_at_import", "sys.exit(0) in {folder}exits_at_import.py:2"),
        ("exits_in_factory", "sys.exit() in {folder}exits.py:11"),
        ("exits_in_model", "sys.exit(0) in {folder}exits.py:7"),
        ("exits_in_loss", "sys.exit('no GPU') in {folder}exits.py:9"),
        ("sys_exit", "sys.exit()"),
        ("builtin_exit", "sys.exit()"),
    ],
)
def test_a_job_that_exits_is_an_error_of_one_line(estimates: dict[str, Done], case: str, said: str) -> None:
    done = estimates[case]
    assert done.status == 1
    assert done.document["error"]["type"] == "JobExitError"
    before, _, after = said.partition("{folder}")
    message = done.document["error"]["message"]
    assert message.startswith(f"the job called {before}")
    assert after in message
    assert done.err == f"JobExitError: {message}\n"


def test_a_job_that_exits_never_ends_a_command_as_if_it_had_been_done(estimates: dict[str, Done]) -> None:
    done = estimates["exits_as_text"]
    assert (done.status, done.out) == (1, "")
    assert "the job called sys.exit(0)" in done.err


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("raises", "KeyError", "missing"),
        ("raises_at_import", "ZeroDivisionError", "division"),
        ("syntax", "SyntaxError", "syntax.py, line 1"),
    ],
)
def test_an_error_in_a_job_is_json_with_its_traceback_on_standard_error(
    estimates: dict[str, Done], case: str, kind: str, words: str
) -> None:
    done = estimates[case]
    assert done.status == 1
    assert done.document["error"]["type"] == kind
    assert words in done.document["error"]["message"]
    assert f"{case}.py" in done.err
    assert done.err.splitlines()[-1].startswith(kind)


def test_the_traceback_of_an_error_in_a_job_begins_in_the_job(estimates: dict[str, Done]) -> None:
    done = estimates["raises_as_text"]
    assert (done.status, done.out) == (1, "")
    head, first, *_ = done.err.splitlines()
    assert head.startswith("Traceback")
    assert first.endswith('raises.py", line 6, in job')
    assert "cli/app.py" not in done.err


@pytest.mark.parametrize(
    ("case", "words"), [("no_model", "Missing argument"), ("no_number", "'--micro-batch-size'")]
)
def test_arguments_that_are_wrong_are_json_too(estimates: dict[str, Done], case: str, words: str) -> None:
    done = estimates[case]
    assert done.status == 2
    assert done.document["error"]["type"] == "UsageError"
    assert words in done.document["error"]["message"]
    assert words in done.err


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("full", "No space left on device"),
        ("version", "No space left on device"),
        ("closed", "Bad file descriptor"),
    ],
)
def test_a_result_that_cannot_be_written_is_an_error_of_one_line(
    estimates: dict[str, Done], case: str, reason: str
) -> None:
    assert estimates[case].status == 1
    assert estimates[case].err == f"SaveError: standard output could not be written: {reason}.\n"


def test_a_reader_that_closes_the_pipe_is_not_an_error(estimates: dict[str, Done]) -> None:
    assert (estimates["unread"].status, estimates["unread"].err) == (0, "")


def test_no_stream_at_all_leaves_the_exit_status(estimates: dict[str, Done]) -> None:
    assert estimates["both_full"].status == 1


def test_characters_that_an_encoding_lacks_are_escaped(estimates: dict[str, Done]) -> None:
    assert estimates["ascii"].status == 0
    assert "\\xb5s" in estimates["ascii"].out


OUTPUTS = {
    "both_unread": {"stdout": UNREAD, "stderr": UNREAD},
    "stdout_unread": {"stdout": UNREAD},
    "stderr_unread": {"stderr": UNREAD},
    "stdout_full": {"stdout": FULL},
    "stderr_full": {"stderr": FULL},
    "both_closed": {"stdout": CLOSED, "stderr": CLOSED},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Done]]:
    """Runs that differ in where their output goes."""
    folder = make_files(tmp_path_factory.mktemp("trained"))
    commands = [
        Command(arguments=("train", "talks.py:job", *TRAIN, "--run-dir", name), **streams)
        for name, streams in OUTPUTS.items()
    ]
    commands.append(
        Command(arguments=("train", "talks.py:job", *TRAIN, "--run-dir", "json", "--json"), stdout=FULL)
    )
    commands.append(Command(arguments=("train", "talks.py:job", *TRAIN, "--run-dir", "b\udcffd")))
    done = run(folder, commands)
    return folder, dict(zip([*OUTPUTS, "json", "b\udcffd"], done, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*OUTPUTS, "b\udcffd"])
def test_training_ends_as_always_wherever_its_output_goes(
    trained: tuple[Path, dict[str, Done]], case: str
) -> None:
    folder, done = trained
    assert done[case].status == 0
    assert "Exception ignored" not in done[case].err
    kinds = [json.loads(line)["kind"] for line in (folder / case / "metrics.jsonl").read_text().splitlines()]
    assert (kinds.count("step"), kinds.count("validation")) == (8, 2)
    assert (folder / case / "weights.safetensors").exists()
    assert (
        f"run directory       {case.encode(errors='backslashreplace').decode()}"
        in (folder / case / "report.txt").read_text()
    )


@pytest.mark.slow
def test_json_of_a_run_that_cannot_be_written_is_an_error_after_the_run_is_kept(
    trained: tuple[Path, dict[str, Done]],
) -> None:
    folder, done = trained
    assert done["json"].status == 1
    assert "SaveError: standard output could not be written" in done["json"].err
    assert json.loads((folder / "json" / "result.json").read_text())["stopped_because"] == "finished"
    assert (folder / "json" / "report.txt").exists()


@pytest.mark.slow
def test_a_shell_s_pipeline_takes_a_line_and_training_goes_to_its_end(tmp_path: Path) -> None:
    """The interpreter's own start and end, without a fork in between."""
    make_files(tmp_path)
    train = " ".join(["train", "jobs.py:job", *TRAIN, "--run-dir", "run"])
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -m brimful {train} 2>&1 | head -1; echo ${{PIPESTATUS[0]}}'],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""
    assert (tmp_path / "run" / "report.txt").exists()
