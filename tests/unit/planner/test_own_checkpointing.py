"""A model that checkpoints itself is recognised, its recomputation is timed, and a plan may turn it off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brimful as bf
from brimful.errors import UnknownNameError
from brimful.memory import predict_memory
from brimful.profiling import measure_step
from brimful.transforms import apply_units

WIDTH, BLOCKS, SAMPLES = 64, 4, 256


class OwnFunction(torch.autograd.Function):
    """Checkpointing as libraries had it before torch did: forward without gradients, run again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(again)
        torch.autograd.backward(y, gradient)
        assert again.grad is not None
        return None, again.grad


WAYS: dict[str, Callable[..., Tensor]] = {
    "non-reentrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "own function": OwnFunction.apply,
}


class Block(nn.Module):
    def __init__(self, way: str, switch: str) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.way, self.switch = way, switch
        setattr(self, switch, True)

    def run(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(x)))

    def forward(self, x: Tensor) -> Tensor:
        is_on = getattr(self, self.switch) and self.training
        return WAYS[self.way](self.run, x) if is_on else self.run(x)


class Model(nn.Module):
    def __init__(self, way: str = "non-reentrant", switch: str = "gradient_checkpointing") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(way, switch) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def job(way: str = "non-reentrant", switch: str = "gradient_checkpointing", *, is_on: bool = True) -> bf.Job:
    def built() -> nn.Module:
        model = Model(way, switch)
        for block in model.blocks:
            setattr(block, switch, is_on)
        return model

    return bf.Job(
        model=built,
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        batch=lambda n: {"x": torch.randn(n, WIDTH), "y": torch.randint(0, 10, (n,))},
        optimizer="sgd",
        name="blocks",
    )


def estimate(the_job: bf.Job, **how: Any) -> bf.api.Estimate:
    return bf.estimate(the_job, "RTX 3090", micro_batch_size=SAMPLES, **how)


@pytest.mark.parametrize("way", WAYS)
def test_it_is_recognised_and_its_recomputation_is_a_part_of_the_time(way: str) -> None:
    found = estimate(job(way))
    time = found.step_time
    assert found.own_checkpoints == BLOCKS
    assert time.recompute_seconds > 0.3 * time.forward_seconds
    parts = (time.forward_seconds, time.backward_seconds, time.recompute_seconds, time.optimizer_seconds)
    assert sum(parts) == pytest.approx(found.predicted_step_seconds)
    text = str(found)
    assert ", recompute " in text
    assert f"by the model itself: {BLOCKS} regions" in text
    assert "everything kept" not in text


@pytest.mark.parametrize("how", [{}, {"recompute": "all"}, {"gradient_accumulation_steps": 3}])
def test_a_model_that_keeps_everything_is_not_taken_for_one(how: dict[str, Any]) -> None:
    found = estimate(job(is_on=False), **how)
    assert found.own_checkpoints == 0
    assert "by the model itself" not in str(found)


def test_a_gradient_of_a_gradient_is_not_taken_for_one() -> None:
    def penalised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].requires_grad_()
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return slope.square().mean()

    assert estimate(replace(job(is_on=False), loss=penalised)).own_checkpoints == 0


@pytest.mark.parametrize("switch", ["gradient_checkpointing", "grad_checkpointing"])
def test_a_plan_may_turn_it_off(switch: str) -> None:
    around = bf.plan(job(switch=switch), "cpu", global_batch_size=SAMPLES)
    alone = bf.plan(job(switch=switch), "cpu", global_batch_size=SAMPLES, own_checkpointing="off")
    without = bf.plan(job(is_on=False), "cpu", global_batch_size=SAMPLES)
    assert alone.predicted_peak_allocated_bytes == without.predicted_peak_allocated_bytes
    assert not alone.settings.own_checkpointing
    assert "own checkpointing off" in str(alone)
    assert alone.plain.settings.own_checkpointing
    assert any("--own-checkpointing off" in note for note in around.notes)
    assert any(f"own checkpointing of {BLOCKS} regions is off" in note for note in alone.notes)


def test_a_model_without_a_switch_says_what_to_do() -> None:
    plan = bf.plan(job(switch="its_own_name"), "cpu", global_batch_size=SAMPLES, own_checkpointing="off")
    assert any("Remove torch.utils.checkpoint from the model's code" in note for note in plan.notes)


def test_the_plan_in_force_turns_it_off_and_removing_it_on_again() -> None:
    model = Model()
    model.blocks[1].gradient_checkpointing = False
    settings = bf.Settings(micro_batch_size=SAMPLES, own_checkpointing=False)
    applied = apply_units(model, settings)
    assert [block.gradient_checkpointing for block in model.blocks] == [False] * BLOCKS
    applied.remove()
    applied.remove()
    assert [block.gradient_checkpointing for block in model.blocks] == [True, False, True, True]


def test_training_is_the_same_with_it_and_without() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, WIDTH), Model().train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    on = gradients()
    applied = apply_units(model, bf.Settings(micro_batch_size=8, own_checkpointing=False))
    off = gradients()
    applied.remove()
    assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True))


@pytest.mark.parametrize("own_checkpointing", [True, False])
def test_what_is_predicted_is_measured_to_the_byte(own_checkpointing: bool) -> None:
    settings = bf.Settings(micro_batch_size=SAMPLES, own_checkpointing=own_checkpointing)
    trace = bf.api.capture_trace(job(), settings)
    assert trace.own_checkpoints == (BLOCKS if own_checkpointing else 0)
    found = predict_memory(trace).steady_peak_allocated_bytes
    assert found == measure_step(job(), settings, steps=1).measured_peak_allocated_bytes


def test_another_word_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"value of own_checkpointing 'no'.*keep, off"):
        bf.plan(job(), "cpu", global_batch_size=8, own_checkpointing="no")


@pytest.mark.parametrize("way", WAYS)
def test_no_choice_that_fits_is_faster_than_the_plan(way: str) -> None:
    """Every second block checkpoints itself: keeping such a unit does not keep what its forward made."""

    def half() -> nn.Module:
        model = Model(way)
        for block in list(model.blocks)[::2]:
            block.gradient_checkpointing = False
        return model

    plan = bf.plan(
        replace(job(), model=half), "cpu", global_batch_size=16 * SAMPLES, budget="60%", effort="max"
    )
    assert plan.alternatives
    for other in plan.alternatives:
        assert other.fits == (other.predicted_peak_reserved_bytes <= plan.budget_bytes)
        assert not other.fits or other.predicted_step_seconds >= plan.predicted_step_seconds
