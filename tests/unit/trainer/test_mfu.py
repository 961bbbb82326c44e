from dataclasses import replace

import pytest
import torch

import brimful as bf
from brimful.devices import find_device
from brimful.planner import Plan
from brimful.report import training_text
from brimful.results import StepRecord
from brimful.settings import Precision
from brimful.trainer.monitor.mfu import Utilisation

RECORD = StepRecord(
    step=1, epoch=1, loss=1.0, gradient_norm=1.0, seconds=0.3, data_seconds=0.2, samples=16, updated=True
)


@pytest.fixture
def planned(job_with):
    def plan(**changes):
        job = job_with(**changes)
        return job, bf.plan(job, "cpu", global_batch_size=32, micro_batch_size=8)

    return plan


def test_it_is_the_planned_flops_of_the_samples_over_the_peak_in_step_and_waiting(planned, samples):
    job, plan = planned()
    plan = replace(plan, peak_flops_per_second=1e6)
    per_sample = 2 * 8 * 8 * 2 + 3 * 2 * 8 * 8 + 3 * 2 * 8 * 3  # the first layer's input needs no gradient
    assert plan.model_flops == 32 * per_sample
    assert plan.predicted_mfu == pytest.approx(plan.model_flops / plan.predicted_step_seconds / 1e6)
    assert Utilisation(plan, job).of(RECORD, samples) == pytest.approx(16 * per_sample / 0.5 / 1e6)


def test_it_is_not_told_of_other_shapes_or_where_nothing_is_known(planned, samples):
    job, plan = planned()
    known = replace(plan, peak_flops_per_second=1e6)
    other = samples | {"x": torch.zeros(50, 4, 8)}
    assert Utilisation(known, job).of(RECORD, other) is None
    assert Utilisation(known, job).of(RECORD, samples | {"more": torch.zeros(50, 9)}) is not None
    assert Utilisation(None, job).of(RECORD, samples) is None
    assert Utilisation(replace(known, peak_flops_per_second=None), job).of(RECORD, samples) is None
    assert replace(known, model_flops=None).predicted_mfu is None


def test_flops_and_peak_survive_a_file_and_older_plans_have_none(planned):
    _, plan = planned()
    plan = replace(plan, peak_flops_per_second=1e6)
    document = plan.to_json()
    assert Plan.from_json(document) == plan
    del document["model_flops"], document["peak_flops_per_second"]
    assert Plan.from_json(document).predicted_mfu is None


def test_the_peak_is_that_of_the_precision_and_of_a_cpu_only_if_it_was_measured():
    a100 = find_device("A100-SXM4-80GB")
    assert a100.peak_flops_per_second(Precision.BF16) == a100.bf16_flops_per_second
    assert a100.peak_flops_per_second(Precision.FP32) == a100.fp32_flops_per_second
    assert a100.peak_flops_per_second(Precision.TF32) == a100.tf32_flops_per_second
    assert find_device("cpu").peak_flops_per_second(Precision.FP32) is None


def test_a_run_tells_its_utilisation_beside_the_predicted_one(planned, trained):
    job, plan = planned(count=lambda batch: batch["y"].numel() * 2, counted="tokens")
    plan = replace(plan, peak_flops_per_second=1e6)
    result = bf.trainer.Trainer(job, plan, device="cpu", epochs=2, show_progress=False).fit()
    assert [step.terms for step in result.steps] == [2 * step.samples for step in result.steps] != []
    assert all(step.mfu is not None for step in result.steps)
    flops = plan.model_flops / 32 * result.samples_per_second
    assert result.measured_mfu == pytest.approx(flops / 1e6)
    assert result.terms_per_second == pytest.approx(2 * result.samples_per_second)
    (line,) = (line for line in training_text(result).splitlines() if "throughput" in line)
    assert "tokens/s, MFU" in line
    assert "predicted)" in line


def test_a_run_shows_samples_per_second_and_what_its_job_counts_if_that_is_another_rate(planned):
    def shown(**fields):
        job, plan = planned(**fields)
        result = bf.trainer.Trainer(job, plan, device="cpu", epochs=2, show_progress=False).fit()
        (line,) = (line for line in training_text(result).splitlines() if "throughput" in line)
        return line

    twice = shown(count=lambda batch: batch["y"].numel() * 2)
    assert twice.index(" samples/s, ") < twice.index(" counted/s")
    same = shown(count=lambda batch: len(batch["y"]))
    assert " samples/s" in same
    assert "counted" not in same
