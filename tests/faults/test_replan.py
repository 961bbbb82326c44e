"""Faults around a change of settings in training: nothing is lost, and a resumed run does not change again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import brimful as bf
from brimful.errors import InfeasibleError
from brimful.results import StopReason
from brimful.trainer import verify
from brimful.trainer.step import better, self_correction
from brimful.trainer.step.measured_steps import Measuring
from brimful.trainer.step.settings_change import SettingsChange
from helpers.wrong_plans import SAMPLES, gpt_job, next_token, too_large, too_small

STEPS = 14


@pytest.fixture(scope="module")
def plan() -> bf.Plan:
    return too_large(gpt_job(), micro_batch_size=SAMPLES)


def trained(plan: bf.Plan, job: bf.Job | None = None, **options: Any) -> bf.TrainingResult:
    given = {"steps": STEPS, "show_progress": False, "replan": True} | options
    return bf.fit(job or gpt_job(), plan, **given)[0]


class Stop(bf.Callback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: bf.Trainer, record: Any) -> None:
        if record.step == self.step:
            trainer.stop()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def changed_after(result: bf.TrainingResult) -> int:
    found = result.self_correction
    assert found is not None
    assert found.changed_after_step is not None
    return found.changed_after_step


@pytest.mark.parametrize("after", [1, 3], ids=["right after the change", "later"])
def test_a_run_stopped_after_the_change_resumes_with_the_new_settings_and_does_not_change_again(
    plan: bf.Plan, tmp_path: Path, after: int
) -> None:
    expected = trained(plan)
    changed = changed_after(expected)
    first = trained(plan, run_dir=tmp_path / "run", callbacks=[Stop(changed + after)])
    assert first.stopped_because is StopReason.INTERRUPTED
    assert first.settings == expected.settings
    with patch.object(self_correction, "find_better", side_effect=AssertionError("searched again")):
        resumed = trained(plan, run_dir=tmp_path / "run", resume=True)
    assert resumed.settings == expected.settings
    assert changed_after(resumed) == changed
    assert resumed.losses == expected.losses


def test_a_run_killed_after_the_change_loses_the_steps_since_its_last_save_alone(tmp_path: Path) -> None:
    script = """
import os, signal, sys, torch
import brimful as bf
from helpers.wrong_plans import SAMPLES, gpt_job
torch.set_num_threads(1)
class Kill(bf.Callback):
    def on_step(self, trainer, record):
        if record.step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
bf.fit(gpt_job(), bf.Plan.load(sys.argv[1]), steps=14, run_dir=sys.argv[2], save_every=2, replan=True,
       show_progress=False, callbacks=[Kill()])
"""
    plan = replace(
        too_large(gpt_job(), micro_batch_size=SAMPLES), job_kind=None
    )  # nothing is kept of its times
    plan.save(tmp_path / "plan.json")
    expected = trained(plan)
    killed_at = changed_after(expected) + 4
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent / "src"), str(tests)])
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "plan.json"), str(tmp_path / "run"), str(killed_at)],
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    resumed = trained(plan, run_dir=tmp_path / "run", resume=True)
    assert resumed.settings == expected.settings
    assert changed_after(resumed) == changed_after(expected)
    assert resumed.losses == expected.losses
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, STEPS + 1))


def test_memory_that_runs_out_right_after_the_change_is_recovered_from(plan: bf.Plan) -> None:
    expected = trained(plan)
    settings_then: list[Any] = []

    class Watch(bf.Callback):
        def on_step(self, trainer: bf.Trainer, record: Any) -> None:
            settings_then.append(record.step)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        is_real = type(batch["x"]) is torch.Tensor and len(batch["x"]) == SAMPLES and torch.is_grad_enabled()
        if is_real and len(settings_then) == changed_after(expected) and not ran_out:
            ran_out.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return next_token(model, batch)

    ran_out: list[bool] = []
    result = trained(plan, gpt_job(loss=loss), callbacks=[Watch()], verify=False)
    (recovery,) = result.recoveries
    assert recovery.step == changed_after(expected) + 1
    assert result.settings == expected.settings
    assert result.losses == expected.losses


@pytest.mark.parametrize(
    "error",
    [
        InfeasibleError("no plan fits", budget_bytes=1, smallest_peak_bytes=2),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("the search broke"),
    ],
    ids=["infeasible", "memory", "defect"],
)
def test_a_search_that_fails_leaves_the_run_as_it_was(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = too_small(gpt_job(), micro_batch_size=SAMPLES)
    recomputes: list[bool] = []

    class Watch(bf.Callback):
        def on_step(self, trainer: bf.Trainer, record: Any) -> None:
            recomputes.append(any("forward" in vars(module) for module in trainer.model.modules()))

    expected = trained(plan, replan=False)
    with patch.object(better, "search", side_effect=error):
        result = trained(plan, show_progress=True, callbacks=[Watch()])
    assert result.stopped_because is StopReason.FINISHED
    assert recomputes == [True] * STEPS
    assert result.settings == plan.settings
    assert result.losses == expected.losses
    assert str(error).splitlines()[0] in capsys.readouterr().err


def test_settings_that_cannot_be_applied_leave_those_before_in_force(plan: bf.Plan) -> None:
    expected = trained(plan, replan=False)
    found = trained(plan).self_correction
    assert found is not None
    assert found.better is not None
    units = tuple(replace(unit, fqn=f"{unit.fqn}.missing") for unit in found.better.settings.units)
    broken = replace(found.better, settings=replace(found.better.settings, units=units))
    with patch.object(self_correction, "find_better", return_value=broken):
        result = trained(plan, verify=False)
    assert result.settings == plan.settings
    assert result.losses == expected.losses
    assert result.self_correction is not None
    assert result.self_correction.changed_after_step is None


def test_settings_that_compute_something_else_are_not_put_in_force(plan: bf.Plan) -> None:
    with patch.object(verify, "verify_model", lambda *_args, **_how: WRONG):
        result = trained(plan)
    assert result.settings == plan.settings
    assert result.self_correction is not None
    assert result.self_correction.better is not None
    assert result.self_correction.changed_after_step is None


class WRONG:
    """A certificate that does not hold."""

    holds = False


def test_a_peak_over_the_budget_after_the_change_returns_the_run_to_the_settings_before() -> None:
    plan = too_small(gpt_job(), micro_batch_size=SAMPLES)
    peaks = Measuring.peak_bytes.fget
    assert peaks is not None

    def over_after_the_change(self: Measuring) -> int | None:
        found = peaks(self)
        return plan.budget_bytes + 1 if self.since_step and found is not None else found

    with patch.object(Measuring, "peak_bytes", property(over_after_the_change)):
        result = trained(plan)
    found = result.self_correction
    assert found is not None
    assert found.change is not None
    assert not found.change.is_kept
    assert found.change.step == changed_after(result) + 1  # the first step after it
    assert result.settings == plan.settings


def test_a_run_stopped_while_it_measures_the_earlier_settings_again_keeps_these(tmp_path: Path) -> None:
    plan = too_small(gpt_job(), micro_batch_size=SAMPLES)
    options: dict[str, Any] = {"steps": 26, "run_dir": tmp_path / "run"}
    expected = trained(plan, steps=26, replan=False)
    with patch.object(SettingsChange, "_is_slower", lambda *_: True):
        first = trained(plan, callbacks=[Stop(16)], **options)
    found = first.self_correction
    assert found is not None
    assert found.changed_after_step is not None
    assert found.change is None
    assert first.settings == plan.settings
    resumed = trained(plan, resume=True, **options)
    assert resumed.settings == plan.settings
    assert resumed.self_correction is not None
    assert resumed.self_correction.change is not None
    assert not resumed.self_correction.change.is_kept
    assert resumed.losses == expected.losses


def test_a_run_resumed_with_another_plan_compares_that_one(plan: bf.Plan, tmp_path: Path) -> None:
    trained(plan, run_dir=tmp_path / "run")
    other = too_small(gpt_job(), micro_batch_size=SAMPLES)
    resumed = trained(other, run_dir=tmp_path / "run", resume=True, steps=STEPS + 10)
    assert resumed.self_correction is not None
    assert resumed.self_correction.settings == other.settings
    assert resumed.self_correction.step > STEPS
