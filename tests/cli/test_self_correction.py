"""`brimful train` compares its first steps with the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from brimful.results.measurement import BUSY_FRACTION
from helpers.command_line import brimful

JOB = """
import torch
import torch.nn.functional as F
from torch import nn
import brimful as bf

def network():
    def block():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return nn.Sequential(*(block() for _ in range(6)))

def samples(count):
    return {"x": torch.randn(count, 64, generator=torch.Generator().manual_seed(0))}

job = bf.Job(
    model=network,
    loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"]),
    batch=samples,
    data=lambda: bf.Data(train=samples(2048)),
    name="blocks",
)
"""
PLAN = ("job.py:job", "--device", "cpu", "--global-batch-size", "256")
STEPS = "16"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    return tmp_path


def printed(folder: Path, *arguments: str) -> dict[str, Any]:
    done = brimful(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def wrong_plan(folder: Path) -> Path:
    """A plan's file whose peak is predicted at 0.69 of what it takes, within a budget of 0.7 of it."""
    document = printed(folder, "plan", *PLAN, "--micro-batch-size", "256")
    peak_bytes = document["predicted_peak_reserved_bytes"]
    for name in ("allocated", "reserved", "device"):
        document[f"predicted_peak_{name}_bytes"] = int(0.69 * peak_bytes)
    document["budget_bytes"] = int(0.7 * peak_bytes)
    path = folder / "wrong.json"
    path.write_text(json.dumps(document))
    return path


def test_the_first_steps_are_compared_in_one_line_and_kept_for_the_next_plan(folder: Path) -> None:
    before = printed(folder, "plan", *PLAN)
    assert before["job_calibration"] is None
    done = brimful(folder, "train", *PLAN, "--steps", STEPS, "--run-dir", "run")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "step time" in line and "measured" in line]
    assert "predicted" in line
    lines = [json.loads(each) for each in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (record,) = [each for each in lines if each["kind"] == "self_correction"]
    after = printed(folder, "plan", *PLAN)
    factor = record["measured_step_seconds"] / record["predicted_step_seconds"]
    is_busy = (record["core_wait_fraction"] or 0) > BUSY_FRACTION
    assert after["job_calibration"]["time_factor"] == pytest.approx(1.0 if is_busy else factor)
    assert is_busy or any("--no-job-calibration" in note for note in after["notes"])
    ignoring = printed(folder, "plan", *PLAN, "--no-job-calibration")
    assert ignoring["predicted_step_seconds"] == before["predicted_step_seconds"]
    kept = folder / "cache" / "brimful" / "job_calibrations.json"
    kept.write_text("{")
    damaged = brimful(folder, "plan", *PLAN)
    assert damaged.returncode == 0
    assert str(kept) in damaged.stderr
    assert "not used" in damaged.stderr


@pytest.mark.parametrize(("asked_fraction", "is_kept"), [(0.8, True), (0.001, False), (9.0, False)])
def test_an_error_that_the_prediction_excluded_lets_later_plans_keep_more(
    folder: Path, asked_fraction: float, is_kept: bool
) -> None:
    """Memory runs out in planned steps: with more than is predicted, with less, with implausibly more."""
    before = printed(folder, "plan", *PLAN)
    asked_bytes = int(asked_fraction * before["predicted_peak_allocated_bytes"])
    (folder / "job.py").write_text(
        JOB.replace("loss=lambda", "loss=lambda model, batch: loss(model, batch), #")
        + f"""
def loss(model, batch):
    output = model(batch["x"])
    if torch.is_grad_enabled() and len(batch["x"]) == 256 and not isinstance(batch["x"], FakeTensor):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate {asked_bytes} bytes.")
    return F.mse_loss(output, batch["x"])

from torch._subclasses import FakeTensor
"""
    )
    plan = ("job.py:job", "--device", "cpu", "--global-batch-size", "256", "--micro-batch-size", "256")
    done = brimful(folder, "train", *plan, "--steps", "2")
    assert done.returncode == 0, done.stderr
    after = printed(folder, "plan", *PLAN)
    assert done.stderr.count("later plans of this job multiply peaks by") == is_kept
    assert ("does not correct later plans" in done.stderr) == (asked_fraction > 2)
    if not is_kept:
        assert after["job_calibration"] is None
        return
    factor = after["job_calibration"]["peak_factor"]
    assert 1 < factor < 2
    assert after["job_calibration"]["time_factor"] == 1.0
    assert any(f"peaks × {factor:.3f}" in note for note in after["notes"])
    assert (
        after["settings"] != before["settings"]
        or after["predicted_peak_allocated_bytes"] > before["predicted_peak_allocated_bytes"]
    )


def test_a_run_says_that_its_plan_exceeds_its_budget(folder: Path) -> None:
    wrong = str(wrong_plan(folder))
    done = brimful(folder, "train", "job.py:job", "--plan", wrong, "--steps", STEPS)
    assert done.returncode == 0, done.stderr
    assert "OVER the budget" in done.stderr
