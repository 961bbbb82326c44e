"""A plan's file is data: whatever it says, checking it or training by it runs no code that it names."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brimful.cli.sources import built_in_source
from brimful.errors import UsageError
from brimful.job import DEFAULT_NAME
from brimful.planner import Alternative, JobSource, Plan, PlanStatus
from brimful.settings import Settings
from helpers.command_line import brimful

JOB = """
import torch
from torch import nn
import brimful as bf

open("IMPORTED", "w").close()

def job(width=8):
    return bf.Job(
        model=lambda: nn.Linear(width, 2),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, width), "y": torch.randint(0, 2, (n,))},
        optimizer="sgd",
        data=lambda: bf.Data(train={"x": torch.randn(8, width), "y": torch.randint(0, 2, (8,))}),
        name="tiny",
    )
"""
SETTINGS = Settings(micro_batch_size=2, gradient_accumulation_steps=2)
COMMAND = {"command": "touch RAN"}


def plan(source: JobSource | None, device: str = "RTX 3090", budget_bytes: int = 2**32) -> Plan:
    return Plan(
        status=PlanStatus.FEASIBLE,
        job="tiny",
        device=device,
        device_kind="cpu" if device == "cpu" else "cuda",
        budget_bytes=budget_bytes,
        settings=SETTINGS,
        predicted_peak_allocated_bytes=10,
        predicted_peak_reserved_bytes=10,
        predicted_peak_device_bytes=10,
        predicted_step_seconds=1.0,
        plain=Alternative(
            label="plain",
            settings=SETTINGS,
            predicted_peak_reserved_bytes=10,
            predicted_step_seconds=1.0,
            fits=True,
        ),
        alternatives=(),
        source=source,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(JOB)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"), [("os:system", COMMAND), ("mine.py:job", {"width": 16}), ("hf:mine", {})]
)
def test_what_a_file_names_is_neither_imported_nor_run(
    folder: Path, name: str, options: dict[str, Any]
) -> None:
    plan(JobSource(name=name, options=options)).save(folder / "p.json")
    done = brimful(folder, "plan", "--check", "p.json")
    assert (done.returncode, "does not decide which code runs" in done.stderr) == (2, True)
    assert {path.name for path in folder.iterdir()} <= {"mine.py", "p.json", "cache"}


@pytest.mark.parametrize(
    ("name", "options", "command"),
    [
        ("os:system", COMMAND, "os:system '--set=command=touch RAN'"),
        ("mine:job", {"flag": True, "rate": 0.5}, "mine:job --set=flag=true --set=rate=0.5"),
        ("hf:/models/mine", {}, "hf:/models/mine"),
        ("a b.py:job; touch RAN", {}, "'a b.py:job; touch RAN'"),
        ("no-such-model", {}, "no-such-model"),
        ("..:job", {}, "..:job"),
        ("--output=RAN", {}, "MODEL"),
        ("x\n\x1b[31m:y", {}, "MODEL"),
        ("x:" + "y" * 4000, {}, "MODEL"),
        ("x:y", {"a": "z" * 4000}, "MODEL"),
    ],
)
def test_the_error_shows_the_command_that_checks_it_quoted_for_a_shell(
    name: str, options: dict[str, Any], command: str
) -> None:
    with pytest.raises(UsageError) as caught:
        built_in_source(Path("a plan.json"), plan(JobSource(name=name, options=options)), ["--budget=1GiB"])
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 1500
    assert said.endswith(f"code: brimful plan {command} --check 'a plan.json' --budget=1GiB")


def test_the_command_that_is_shown_checks_the_plan(folder: Path) -> None:
    plan(JobSource(name="mine.py:job", options={"width": 16})).save(folder / "p.json")
    shown = brimful(folder, "plan", "--check", "p.json").stderr.partition("trust that code: brimful ")[2]
    done = brimful(folder, *shlex.split(shown))
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "tiny on RTX 3090")


def test_a_file_that_names_no_model_needs_one_on_the_command_line(folder: Path) -> None:
    plan(None).save(folder / "p.json")
    done = brimful(folder, "plan", "--check", "p.json")
    assert done.returncode == 2
    assert done.stderr.endswith("Name it: brimful plan MODEL --check p.json\n")


def test_options_of_a_built_in_architecture_must_be_its_own(folder: Path) -> None:
    plan(JobSource(name="resnet18", options={"image_size": 64, "name": 9, "text": 9})).save(folder / "p.json")
    done = brimful(folder, "plan", "--check", "p.json")
    assert done.returncode == 2
    assert "resnet18 does not take the option name, text. It takes image_size, num_classes." in done.stderr


@pytest.mark.parametrize(("budget_bytes", "status"), [(2**32, 0), (2**20, 1)])
def test_a_plan_for_a_built_in_architecture_is_checked_without_naming_it(
    folder: Path, budget_bytes: int, status: int
) -> None:
    source = JobSource(name="resnet18", options={"image_size": 64})
    plan(source, budget_bytes=budget_bytes).save(folder / "p.json")
    done = brimful(folder, "plan", "--check", "p.json")
    assert (done.returncode, done.stdout.partition(":")[0]) == (status, "resnet18 on RTX 3090")


@pytest.mark.parametrize("arguments", [("plan", "--check"), ("train", "mine:job", "--plan")])
def test_a_damaged_plan_is_one_line_and_exit_status_2(folder: Path, arguments: tuple[str, ...]) -> None:
    document = plan(None).to_json()
    document["settings"]["micro_batch_size"] = 1.5
    (folder / "p.json").write_text(json.dumps(document))
    done = brimful(folder, *arguments, "p.json")
    assert done.returncode == 2
    said = "the plan p.json: field `settings.micro_batch_size`: expected `int`, got `float`."
    assert done.stderr.splitlines()[-1] == f"FileFormatError: {said}"
    assert "Traceback" not in done.stderr


def test_a_plan_that_is_a_pipe_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    done = brimful(folder, "plan", "--check", "pipe")
    assert (done.returncode, "the plan pipe is not a regular file" in done.stderr) == (2, True)


@pytest.mark.slow
def test_training_by_a_plan_and_resuming_run_nothing_that_it_names(folder: Path) -> None:
    hostile = JobSource(name="os:system", options=COMMAND)
    plan(hostile, device="cpu").save(folder / "p.json")
    asked = ("train", "mine:job", "--run-dir", "run")
    begun = brimful(folder, *asked, "--plan", "p.json", "--epochs", "1")
    assert begun.returncode == 0, begun.stderr
    kept = json.loads((folder / "run" / "plan.json").read_text())
    (folder / "run" / "plan.json").write_text(json.dumps(kept | {"source": plan(hostile).to_json()["source"]}))
    resumed = brimful(folder, *asked, "--resume", "--epochs", "2")
    assert resumed.returncode == 0, resumed.stderr
    assert not (folder / "RAN").exists()


def test_a_plan_for_another_job_is_told_before_anything_is_predicted(folder: Path) -> None:
    plan(JobSource(name="mine.py:job", options={})).save(folder / "p.json")
    done = brimful(folder, "plan", "bert-large", "--check", "p.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "p.json is a plan for 'tiny', and the model given is 'bert-large'." in done.stderr


def test_a_plan_made_in_python_for_a_job_without_a_name_is_for_any_job_of_a_file(folder: Path) -> None:
    replace(plan(None, device="cpu"), job=DEFAULT_NAME).save(folder / "p.json")
    done = brimful(folder, "plan", "mine:job", "--check", "p.json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    refused = brimful(folder, "plan", "bert-large", "--check", "p.json")
    assert "p.json is a plan for 'job', and the model given is 'bert-large'." in refused.stderr
