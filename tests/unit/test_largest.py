"""The largest size that trains, from Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import brimful as bf
from brimful.api import largest, largest_plan

MIB = 2**20


def job(width: int) -> bf.Job:
    return bf.Job(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6)]),
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, width),
        optimizer="sgd",
    )


def test_the_largest_size_fits_and_the_next_does_not() -> None:
    found = largest(job, "T4", option="width", step=64, start=256, micro_batch_size=64, budget=500 * MIB)
    assert found.estimate.verdict == "fits"
    assert found.size.value + 64 == found.size.next_value
    beyond = bf.estimate(job(found.size.next_value), "T4", micro_batch_size=64, budget=500 * MIB)
    assert beyond.verdict != "fits"
    assert f"the largest width that fits is {found.size.value:,}" in str(found).splitlines()[0]


def test_nothing_that_fits_is_said_with_numbers() -> None:
    with pytest.raises(bf.InfeasibleError, match=r"not even width=64 .* too much") as error:
        largest(job, "T4", option="width", step=64, start=256, budget=100 * MIB)
    assert error.value.budget_bytes == 100 * MIB
    assert error.value.shortfall_bytes > 0


def test_the_largest_batch_of_a_plan_is_one_micro_batch() -> None:
    asked = {"budget": 400 * MIB, "recompute": "all", "offload_optimizer": False, "expandable_segments": False}
    found = largest_plan(lambda _: job(1024), "T4", option="micro_batch_size", start=64, **asked)
    settings = found.plan.settings
    assert (settings.micro_batch_size, settings.gradient_accumulation_steps) == (found.size.value, 1)
    assert found.without_plan is not None
    assert found.without_plan.size.value < found.size.value
    assert found.kept.settings.micro_batch_size == found.size.value
    assert "the plan takes +" in str(found)
