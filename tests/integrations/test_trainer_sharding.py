"""A plan in a Transformers Trainer whose processes shard the model by FSDP2, and the refusal of other ways."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

import brimful.integrations.transformers as bft
from brimful.errors import UsageError
from brimful.integrations.transformers.applied_plan import AppliedPlan
from brimful.integrations.transformers.sharding import reduce_each_micro_batch
from brimful.settings import Parallelism, Settings
from helpers.sharded_trainers import call_sharded
from helpers.torchrun import result_of_two_ranks
from helpers.trainers import trainer

GATHERED_IN_BF16 = "FSDP2 gathers parameters in bfloat16 and averages gradients in it, without autocast"

RANK = """
import sys
from pathlib import Path

import torch

import brimful.integrations.transformers as bft
from brimful.errors import InfeasibleError
from helpers.sharded_trainers import PeakOfStep, sharded_trainer
from helpers.trainers import gpt2, losses, train

folder = Path(sys.argv[1])

def made(**changes):
    return sharded_trainer(folder, gpt2(dropout=0.0), **changes)

def least(values):  # of both processes
    found = torch.tensor(min(values))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return int(found)

CASES = {
    "bf16": ({"bf16": True}, {"recompute": "all", "micro_batch_size": 4}),
    "recomputed": ({}, {"recompute": "all", "micro_batch_size": 4}),
    "accumulated": (
        {"gradient_accumulation_steps": 2, "fsdp_config": {"activation_checkpointing": True}},
        {"recompute": "none", "micro_batch_size": 2},
    ),
}
found = {}
for name, (changes, options) in CASES.items():
    planned = made(**changes)
    plan = bft.plan(planned, "cpu", budget="1GiB", **options)
    measured = PeakOfStep()
    bft.apply(plan, planned, report=False)
    planned.add_callback(measured)
    train(planned)
    alone = made(**changes)
    train(alone)
    found[name] = {
        "parallelism": plan.settings.parallelism,
        "ranks": plan.settings.world_size,
        "notes": plan.notes,
        "precision": plan.settings.precision,
        "planned": losses(planned),
        "alone": losses(alone),
        "predicted": plan.predicted_peak_allocated_bytes,
        "measured": least([each.allocated_bytes for each in measured.peaks]),
    }
try:
    bft.plan(made(), "cpu", budget="0.1MiB")
except InfeasibleError as error:  # on each rank, or the others would wait
    texts = [None, None]
    torch.distributed.all_gather_object(texts, (str(error), error.budget_bytes))
    found["same error"] = texts[0] == texts[1]
report(found)
"""


@pytest.mark.slow
def test_fsdp2_trains_and_takes_what_was_planned(tmp_path: Path) -> None:
    found = result_of_two_ranks(tmp_path, RANK, str(tmp_path))
    assert found.pop("same error")
    for name, case in found.items():
        assert (case["parallelism"], case["ranks"]) == ("fsdp2", 2)
        assert len(case["planned"]) == 4
        if name != "accumulated":
            assert case["planned"] == case["alone"]  # bit for bit
        assert case["planned"] == pytest.approx(case["alone"], rel=1e-5)
        # in bfloat16 the plan notes that it does not know what the CPU's library takes; measured: 3.7 % more
        tolerance = 0.05 if name == "bf16" else 0.01
        assert case["predicted"] == pytest.approx(case["measured"], rel=tolerance), name
    assert found["bf16"]["precision"] == "fp32"
    assert GATHERED_IN_BF16 in found["bf16"]["notes"]
    assert GATHERED_IN_BF16 not in found["recomputed"]["notes"]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"fsdp_version": 1}, r'with FSDP1\. Set fsdp_config={"version": 2}'),
        ({}, {"cpu_offload": True}, "Leave cpu_offload out"),
        ({"fp16": True}, {}, "Set bf16=True"),
        ({}, {}, "FSDP2 in one process.* Start more .* or leave fsdp out"),
    ],
)
def test_other_ways_to_shard_are_refused(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    own = trainer(tmp_path, **changes)
    call_sharded(own, **options)
    with pytest.raises(UsageError, match=message):
        bft.plan(own, "cpu")


def test_deepspeed_is_refused_with_the_nearest_way_out(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    with pytest.raises(UsageError, match=r"DeepSpeed.* fsdp_config={\"version\": 2}.* parallelism='zero3'"):
        bft.plan(own, "cpu")


def test_a_plan_for_another_way_to_shard_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = trainer(tmp_path)
    monkeypatch.setattr(type(own.args), "world_size", 2)
    settings = Settings(micro_batch_size=8, world_size=2, parallelism=Parallelism.FSDP2)
    plan: Any = SimpleNamespace(settings=settings)
    with pytest.raises(UsageError, match="the plan is for fsdp2, and the trainer's processes train by ddp"):
        AppliedPlan(plan, own, recovers=True, reports=False, verifies=True)


def test_a_plan_without_sharding_is_not_applied_under_fsdp2(tmp_path: Path) -> None:
    own = trainer(tmp_path)
    call_sharded(own)
    plan: Any = SimpleNamespace(settings=Settings(micro_batch_size=8))
    with pytest.raises(UsageError, match="the plan is for ddp, and the trainer's processes train by fsdp2"):
        AppliedPlan(plan, own, recovers=True, reports=False, verifies=True)


@pytest.mark.parametrize("before", [False, True])
def test_gradients_are_averaged_after_each_micro_batch_until_undone(tmp_path: Path, before: bool) -> None:
    """Under FSDP2; `Trainer` reads it as here."""
    own = trainer(tmp_path)
    options = own.accelerator.gradient_state.plugin_kwargs
    options["sync_each_batch"] = before
    reduce_each_micro_batch(own)
    assert options["sync_each_batch"] is before
    call_sharded(own)
    undo = reduce_each_micro_batch(own)
    assert options["sync_each_batch"]
    undo()
    assert options["sync_each_batch"] is before


def test_fsdp_that_accelerate_leaves_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = trainer(tmp_path)
    monkeypatch.setattr(type(own.args), "world_size", 2)
    own.args.fsdp = True
    with pytest.warns(UserWarning, match="Accelerate trains by DDP on a CPU"):
        bft.job(own)
