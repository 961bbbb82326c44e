"""Settings that take less memory keep to what the user asked of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import brimful as bf
from brimful.errors import OutOfMemoryError
from brimful.options import PlanOptions
from brimful.planner import Plan
from brimful.trainer.step.fallback import MemoryFallback

# V vocabulary, T tokens, D width

V, T, D, BATCH = 4096, 16, 32, 8


class Language(nn.Module):
    """Logits take most of its memory, or with a large widening the blocks."""

    def __init__(self, widening: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(D, widening * D), nn.Tanh(), nn.Linear(widening * D, D)) for _ in "ab")
        )
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def job(widening: int = 16) -> bf.Job:
    return bf.Job(
        model=lambda: Language(widening),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]).view(-1, V), batch["x"].view(-1)),
        batch=lambda n: {"x": torch.randint(V, (n, T))},
        optimizer="sgd",
    )


def planned(the_job: bf.Job | None = None, **asked: Any) -> Plan:
    return bf.plan(the_job or job(), "cpu", global_batch_size=BATCH, **asked)


def lowered(plan: Plan) -> bf.Settings:
    return MemoryFallback(job(), plan, torch.device("cpu"))(plan.settings)


def test_a_loss_in_chunks_is_taken_only_where_it_is_permitted() -> None:
    pinned = {"micro_batch_size": BATCH, "recompute": "none"}
    assert lowered(planned(**pinned)).chunked_loss is not None
    refused = lowered(planned(**pinned, chunked_loss=False))
    assert refused.chunked_loss is None
    assert refused.micro_batch_size == BATCH // 2  # nothing else is left


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_a_pinned_action_stays(recompute: str) -> None:
    plan = planned(recompute=recompute, chunked_loss=False)
    assert {unit.action for unit in lowered(plan).units} == {unit.action for unit in plan.settings.units}


def test_a_pinned_micro_batch_stays_as_long_as_something_else_takes_less() -> None:
    wide = job(widening=128)
    plan = planned(wide, micro_batch_size=BATCH, chunked_loss=False)
    lower = MemoryFallback(wide, plan, torch.device("cpu"))
    settings = lower(plan.settings)
    assert settings.micro_batch_size == BATCH
    assert settings.recomputed
    for _ in range(3):
        settings = lower(settings)
    assert settings.micro_batch_size < BATCH


def test_a_plans_file_holds_what_was_asked() -> None:
    plan = planned(
        budget=2**30,
        precision=(bf.settings.Precision.FP32, torch.bfloat16),
        chunked_loss=False,
        allow_optimizers="adafactor",
    )
    assert plan.asked == PlanOptions(
        budget="1073741824B", precision="fp32,bfloat16", chunked_loss=False, allow_optimizers=("adafactor",)
    )
    assert Plan.from_json(plan.to_json()).asked == plan.asked


def test_a_plan_of_before_says_nothing_of_it() -> None:
    document = planned().to_json()
    del document["asked"]
    assert Plan.from_json(document).asked == PlanOptions()


def normed(module: bool) -> bf.Job:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 2))

    return bf.Job(
        model=make().eval() if module else make,
        loss=lambda model, batch: model(batch).square().mean(),
        batch=lambda n: torch.randn(n, D),
        optimizer="sgd",
    )


@pytest.mark.parametrize("module", [False, True])
def test_a_batch_that_batch_norm_couples_is_split_only_if_that_was_permitted(module: bool) -> None:
    the_job = normed(module)
    asked = {"micro_batch_size": BATCH, "recompute": "none"}
    plan = planned(the_job, **asked)
    with pytest.raises(OutOfMemoryError, match="the batch was not split: 1 computes with the whole"):
        MemoryFallback(the_job, plan, torch.device("cpu"))(plan.settings)
    permitted = planned(the_job, **asked, split_batch_norm=True)
    assert MemoryFallback(the_job, permitted, torch.device("cpu"))(permitted.settings).micro_batch_size < BATCH
