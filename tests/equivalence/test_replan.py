"""A run that changes its settings between two steps trains as it would have without the change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.results import TrainingResult
from brimful.trainer.step import self_correction
from brimful.trainer.step.measured_steps import MeasuredSteps
from helpers.wrong_plans import LENGTH, SAMPLES, gpt_job, too_large, too_small, wrong_by

STEPS = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(job: bf.Job, plan: bf.Plan, **options: Any) -> tuple[TrainingResult, dict[str, Tensor]]:
    """The result, and parameters, buffers and optimizer state at the end."""
    trainer = bf.Trainer(job, plan, steps=STEPS, show_progress=False, **options)
    result = trainer.fit()
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for number, values in trainer.optimizer.state_dict()["state"].items():
        state |= {f"state {number} {name}": torch.as_tensor(value) for name, value in values.items()}
    return result, state


def trained_without(job: bf.Job, plan: bf.Plan, **options: Any) -> tuple[TrainingResult, dict[str, Tensor]]:
    """The same of a run that does not even search."""
    with patch.object(self_correction, "may_be_better", lambda *_: False):
        return trained(job, plan, **options)


def assert_changed(result: TrainingResult, plan: bf.Plan) -> None:
    found = result.self_correction
    assert found is not None
    assert found.better is not None
    assert found.changed_after_step is not None
    assert found.changed_after_step < STEPS
    assert result.settings == found.better.settings != plan.settings
    assert result.settings.global_batch_size == plan.settings.global_batch_size
    assert result.measured_peak_reserved_bytes is not None
    assert result.measured_peak_reserved_bytes <= plan.budget_bytes


def test_with_other_recomputation_the_training_is_equal_to_the_last_bit() -> None:
    # Masks must be drawn as without the change, though the search makes batches of random numbers.
    job = gpt_job(dropout=0.1, batch=lambda n: {"x": torch.randint(40, (n, LENGTH))})
    plan = too_large(job, predicted=0.5, micro_batch_size=SAMPLES)  # with the average it fits, as predicted
    schedule = bf.Schedule("cosine", warmup=0.2)
    without, expected = trained_without(job, plan, schedule=schedule, max_gradient_norm=0.5, ema_decay=0.9)
    result, state = trained(job, plan, schedule=schedule, max_gradient_norm=0.5, ema_decay=0.9, replan=True)
    assert_changed(result, plan)
    assert result.settings.changed
    assert result.losses == without.losses
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_with_other_micro_batches_the_training_is_equal_within_rounding() -> None:
    job = gpt_job()
    plan = too_large(job, recompute="none")
    without, expected = trained_without(job, plan)
    result, state = trained(job, plan, replan=True)
    assert_changed(result, plan)
    assert result.settings.micro_batch_size < plan.settings.micro_batch_size
    assert result.losses == pytest.approx(without.losses, rel=1e-5)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


def timed(*seconds: float) -> Any:
    """Medians of the steps before the change, after it, and of those before measured again."""
    medians, of = iter(seconds), MeasuredSteps.of
    return patch.object(
        MeasuredSteps,
        "of",
        lambda *measured, **options: replace(of(*measured, **options), step_seconds=next(medians), spread=0.01),
    )


@pytest.mark.parametrize(
    ("seconds", "is_kept"),
    [((2.0, 1.0), True), ((1.0, 1.01), True), ((1.0, 2.0, 3.0), True), ((1.0, 2.0, 1.5), False)],
    ids=["faster", "as fast", "slower, as all is", "slower"],
)
def test_a_faster_plan_within_the_budget_trains_the_same_whether_or_not_it_is_kept(
    seconds: tuple[float, ...], is_kept: bool
) -> None:
    job = gpt_job(dropout=0.1)
    plan = too_small(job, micro_batch_size=SAMPLES)
    without, expected = trained_without(job, plan)
    with timed(*seconds):
        result, state = trained(job, plan, replan=True)
    found = result.self_correction
    assert found is not None
    assert found.better is not None
    assert found.change is not None
    assert found.change.is_kept == is_kept
    assert found.change.measured_step_seconds == seconds[1]
    assert found.change.measured_again_step_seconds == (seconds[2] if len(seconds) > 2 else None)
    assert result.settings == (found.better.settings if is_kept else plan.settings)
    in_force = found.better if is_kept else plan
    assert result.predicted_peak_reserved_bytes == in_force.predicted_peak_reserved_bytes
    if is_kept:
        assert_changed(result, plan)
    assert result.losses == without.losses
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_model_trained_in_place_has_its_own_forward_afterwards() -> None:
    job = gpt_job()
    model = job.model()
    job = gpt_job(model=model)
    result, _ = trained(job, too_large(gpt_job()), replan=True)
    assert result.self_correction is not None
    assert result.self_correction.changed_after_step is not None
    assert not any("forward" in vars(module) for module in model.modules())


class Normed(nn.Module):
    """BatchNorm couples the samples of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(32, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Linear(128, 32))
                for _ in range(5)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("asked", [{}, {"split_batch_norm": True}], ids=["whole", "split"])
def test_micro_batches_stay_as_they_are_where_a_layer_couples_their_samples(asked: dict[str, bool]) -> None:
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
    job = gpt_job(
        model=Normed,
        loss=lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"]),
        batch={"x": x[:128]},
        data=lambda: bf.Data(train={"x": x}),
    )
    kept = bf.plan(job, "cpu", global_batch_size=128, **asked)
    plan = wrong_by(kept, 0.79, budget_bytes=kept.predicted_peak_reserved_bytes * 8 // 10)
    without, expected = trained_without(job, plan, verify=False)
    result, state = trained(job, plan, verify=False, replan=True)
    assert_changed(result, plan)
    assert result.settings.micro_batch_size == plan.settings.micro_batch_size
    assert result.losses == without.losses
    assert all(torch.equal(state[name], expected[name]) for name in state)
