"""`brimful train`, run as a user runs it, and what goes wrong in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from helpers import command_line

JOBS = """
import torch
from torch import nn
import brimful as bf

WIDTH = 64
SAMPLES = 1600

def samples(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, WIDTH, generator=generator)
    return {"x": x, "y": (x.sum(1) > 0).long()}

def network():
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2))

def job(loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])):
    return bf.Job(
        model=network,
        loss=loss,
        batch=samples,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        metrics=lambda model, batch: {"accuracy": (model(batch["x"]).argmax(-1) == batch["y"]).float().mean()},
        data=lambda: bf.Data(train=samples(SAMPLES), validation=samples(64)),
        name="signs",
    )

class Turning:
    calls = 0

    def __call__(self, model, batch):
        loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
        self.calls += not loss.is_meta and type(loss) is torch.Tensor and model.training
        return loss * float("nan") if self.calls > 3 else loss

def turning_nan():
    return job(Turning())
"""

TRAIN = ("--device", "cpu", "--global-batch-size", "160")
RESULT_KEYS = {
    "brimful_training",
    "certificate",
    "budget_bytes",
    "counted",
    "data_loading",
    "device",
    "job",
    "largest_loss_difference",
    "measured_peak_allocated_bytes",
    "measured_peak_device_bytes",
    "measured_peak_reserved_bytes",
    "measured_step_seconds",
    "notes",
    "plain",
    "predicted_peak_allocated_bytes",
    "predicted_peak_device_bytes",
    "predicted_peak_reserved_bytes",
    "predicted_mfu",
    "predicted_step_seconds",
    "recoveries",
    "self_correction",
    "run_dir",
    "settings",
    "steps",
    "stopped_because",
    "temporaries_at_peak",
    "validations",
    "epochs",
}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    (tmp_path / "jobs.py").write_text(JOBS)
    command_line.keep_rates(tmp_path / "cache")

    def started(*arguments: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "brimful", "train", *arguments],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )

    return started


@pytest.fixture
def brimful(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    def ran(*arguments: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
        if before is None:
            return command_line.brimful(tmp_path, "train", *arguments)
        process = start(*arguments, before=before)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return ran


def weights_of(path: Path) -> set[str]:
    with safe_open(path, framework="pt") as file:
        return set(file.keys())


def test_a_run_says_predicted_beside_measured_and_writes_its_directory(brimful, tmp_path: Path) -> None:
    done = brimful(
        "jobs:job", *TRAIN, "--budget", "70%", "--epochs", "2", "--compare-plain", "--run-dir", "run"
    )
    assert done.returncode == 0, done.stderr
    for words in ("baseline", "predicted", "measured", "accuracy", "within"):
        assert words in done.stdout
    plain, planned = done.stderr.index("baseline, without the plan:"), done.stderr.index("\nwith the plan:")
    assert plain < done.stderr.index("step ", plain) < planned < done.stderr.index("step ", planned)
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "plan.json", "metrics.jsonl", "weights.safetensors", "result.json", "report.txt",
    }  # fmt: skip
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum("loss" in json.loads(line) for line in lines) >= 20
    assert "0.0.weight" in weights_of(tmp_path / "run" / "weights.safetensors")
    assert (tmp_path / "run" / "weights.safetensors").stat().st_mode & 0o777 == (
        tmp_path / "run" / "metrics.jsonl"
    ).stat().st_mode & 0o777


def test_train_json_has_exactly_the_documented_keys_and_nothing_else_on_stdout(brimful) -> None:
    done = brimful("jobs:job", *TRAIN, "--steps", "6", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == RESULT_KEYS
    assert document["measured_peak_allocated_bytes"] == document["predicted_peak_allocated_bytes"]
    assert len(document["steps"]) == 6


def test_nan_stops_the_run_with_status_1_the_step_and_the_last_good_weights(brimful, tmp_path: Path) -> None:
    done = brimful("jobs:turning_nan", *TRAIN, "--micro-batch-size", "160", "--run-dir", "run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "step 4" in done.stderr
    assert "nan" in done.stderr.lower()
    assert weights_of(tmp_path / "run" / "weights.safetensors")


def test_a_run_directory_that_exists_is_refused_and_left_alone(brimful, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("dear")
    done = brimful("jobs:job", *TRAIN, "--run-dir", "run")
    assert done.returncode == 2
    assert "mine.txt" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_a_disk_that_takes_no_more_is_told_with_status_1(brimful, tmp_path: Path) -> None:
    import resource

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the weights are 70 KB

    done = brimful("jobs:job", *TRAIN, "--steps", "4", "--run-dir", "run", before=limit)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "could not be written" in done.stderr
    assert "free" in done.stderr
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert not list((tmp_path / "run").glob(".*partial"))


def test_ctrl_c_finishes_the_step_saves_and_says_so(start, tmp_path: Path) -> None:
    process = start("jobs:job", *TRAIN, "--epochs", "1000000", "--run-dir", "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 2000):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    assert process.returncode == 130, (out, err)
    assert "interrupt" in (out + err).lower()
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(result["steps"]) == sum("gradient_norm" in line for line in lines) > 0
    assert weights_of(tmp_path / "run" / "weights.safetensors")


def test_a_run_is_terminated_saved_resumed_and_ends_as_if_it_had_not_been(
    start, brimful, tmp_path: Path
) -> None:
    whole = brimful("jobs:job", *TRAIN, "--epochs", "40", "--run-dir", "whole", "--json")
    command = ("jobs:job", *TRAIN, "--epochs", "40", "--run-dir", "run", "--save-every", "50", "--resume")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")  # as of a run killed in its first moments
    process = start(*command)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > 5000):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, (out, err)
    done = brimful(*command, "--json")
    assert done.returncode == 0, done.stderr
    losses = [step["loss"] for step in json.loads(done.stdout)["steps"]]
    assert losses == [step["loss"] for step in json.loads(whole.stdout)["steps"]]
    wrong = brimful(*command[:-1], "--resume", "--global-batch-size", "80")
    assert wrong.returncode == 2
    assert "would not be the same run" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("resnet50", "--device", "cpu"), "no data to train on"), (("jobs:job", "--device", "T4"), "no CUDA GPU")],
)
def test_what_cannot_be_trained_is_told_before_it_is_planned(brimful, arguments, said) -> None:
    done = brimful(*arguments, "--global-batch-size", "8")
    assert done.returncode == 2
    assert said in done.stderr
    assert "baseline" not in done.stdout


def test_a_plan_is_carried_out_as_it_is_and_nothing_may_be_asked_beside_it(brimful, tmp_path: Path) -> None:
    asked = ("plan", "jobs:job", *TRAIN, "--budget", "70%", "--output", "p.json")
    assert command_line.brimful(tmp_path, *asked).returncode == 0
    plan = json.loads((tmp_path / "p.json").read_text())
    done = brimful("jobs:job", "--plan", "p.json", "--steps", "4", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["settings"] == plan["settings"]
    refused = brimful("jobs:job", "--plan", "p.json", "--budget", "1GiB", "--precision", "bf16")
    assert refused.returncode == 2
    assert "--budget, --precision" in refused.stderr
    document = plan | {"job": "another"}
    (tmp_path / "other.json").write_text(json.dumps(document))
    other = brimful("jobs:job", "--plan", "other.json")
    assert other.returncode == 2
    assert "'another'" in other.stderr
    missing = brimful("jobs:job", "--steps", "1")
    assert missing.returncode == 2
    assert "--global-batch-size" in missing.stderr


def test_ctrl_c_while_training_without_the_plan_ends_the_whole_command(start, tmp_path: Path) -> None:
    process = start(
        "jobs:job", *TRAIN, "--budget", "70%", "--epochs", "1000000", "--compare-plain", "--run-dir", "run"
    )
    assert process.stdout is not None
    assert process.stderr is not None
    while process.poll() is None and "epoch" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "without the plan" in err
    assert not (tmp_path / "run").exists()


def test_a_budget_too_small_trains_nothing(brimful, tmp_path: Path) -> None:
    done = brimful("jobs:job", *TRAIN, "--budget", "100KiB", "--run-dir", "run")
    assert done.returncode == 1
    for words in ("no plan fits", "too much", "largest part", "would fit"):
        assert words in done.stderr
    assert not (tmp_path / "run").exists()


def test_resume_without_the_saves_or_the_plan_is_refused_and_changes_nothing(brimful, tmp_path: Path) -> None:
    command = ("jobs:job", *TRAIN, "--steps", "3", "--run-dir", "run")
    assert brimful(*command).returncode == 0
    for missing in ("saves", "plan.json"):
        (tmp_path / "run" / missing).rename(tmp_path / missing)
        before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
        again = brimful(*command[:-3], "6", *command[-2:], "--resume")
        assert again.returncode == 1, again.stderr
        assert again.stderr.startswith("ResumeError: ")
        assert missing in again.stderr
        assert "Traceback" not in again.stderr
        assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
        (tmp_path / missing).rename(tmp_path / "run" / missing)
