"""What an export has, what it lacks and says so, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import brimful as bf
from brimful.cli.exports import export_files
from brimful.errors import UsageError
from brimful.exports import ExportSource, ExportTool, write_export
from brimful.exports.yaml import to_yaml
from brimful.settings import (
    Action,
    ChunkedLoss,
    MemoryFormat,
    OptimizerImplementation,
    Parallelism,
    Precision,
    Settings,
    UnitAction,
)

SETTINGS = Settings(micro_batch_size=2, gradient_accumulation_steps=4)
RECOMPUTED = tuple(UnitAction(fqn=f"blocks.{i}", action=Action.RECOMPUTE) for i in range(3))
FSDP2 = Settings(micro_batch_size=2, world_size=2, parallelism=Parallelism.FSDP2)


def exported(settings: Settings = SETTINGS, **fields: Any) -> ExportSource:
    return ExportSource(**{"settings": settings, "device_kind": "cuda", "optimizer": "adamw", **fields})


def arguments_of(settings: Settings, **fields: Any) -> dict[str, Any]:
    return json.loads(write_export(exported(settings, **fields), ExportTool.TRANSFORMERS).text)


@pytest.mark.parametrize("tool", [tool for tool in ExportTool if tool is not ExportTool.FSDP])
def test_what_a_tool_cannot_express_is_listed_and_not_in_its_settings(tool: ExportTool) -> None:
    units = (*RECOMPUTED[:2], UnitAction(fqn="blocks.2", action=Action.OFFLOAD))
    settings = replace(
        SETTINGS,
        units=units,
        chunked_loss=ChunkedLoss(layer="head", chunks=8),
        prefetch_inputs=True,
        offload_optimizer=True,
    )
    made = write_export(exported(settings), tool)
    assert set(made.not_expressed) == {
        "2 of 3 units recomputed",
        "1 of 3 units offloaded",
        "the loss computed in 8 chunks",
        "the optimizer on the host",
        "micro-batches copied ahead",
    }
    assert made.settings == SETTINGS


@pytest.mark.parametrize("tool", [tool for tool in ExportTool if tool is not ExportTool.FSDP])
def test_what_the_user_sets_is_named(tool: ExportTool) -> None:
    settings = replace(
        SETTINGS, expandable_segments=True, memory_format=MemoryFormat.CHANNELS_LAST, own_checkpointing=False
    )
    made = write_export(exported(settings), tool)
    assert ("PYTORCH_ALLOC_CONF", "expandable_segments:True") in made.environment
    assert any("memory_format=torch.channels_last" in remark for remark in made.remarks)
    assert any("gradient_checkpointing_disable" in remark for remark in made.remarks)
    assert made.settings == settings


def test_transformers_recomputes_only_if_every_unit_is_recomputed() -> None:
    assert arguments_of(replace(SETTINGS, units=RECOMPUTED))["activation_checkpointing"]
    for action in (Action.KEEP, Action.OFFLOAD, Action.NEST):
        units = (*RECOMPUTED[:2], UnitAction(fqn="blocks.2", action=action))
        assert "activation_checkpointing" not in arguments_of(replace(SETTINGS, units=units))


@pytest.mark.parametrize(
    ("precision", "set_to"),
    [("fp32", set()), ("tf32", {"tf32"}), ("fp16", {"fp16"}), ("bf16", {"bf16"})],
)
def test_transformers_has_the_precision(precision: str, set_to: set[str]) -> None:
    arguments = arguments_of(replace(SETTINGS, precision=Precision(precision)))
    assert {name for name in ("tf32", "fp16", "bf16") if arguments.get(name)} == set_to


@pytest.mark.parametrize(
    ("implementation", "device_kind", "name", "is_expressed"),
    [
        (OptimizerImplementation.FUSED, "cuda", "adamw_torch_fused", True),
        (OptimizerImplementation.FOREACH, "cuda", "adamw_torch", True),
        (OptimizerImplementation.FOR_LOOP, "cuda", "adamw_torch", False),
        (OptimizerImplementation.FOR_LOOP, "cpu", "adamw_torch", True),
    ],
)
def test_transformers_has_the_implementation_of_adamw(
    implementation: OptimizerImplementation, device_kind: str, name: str, is_expressed: bool
) -> None:
    settings = replace(SETTINGS, optimizer_implementation=implementation)
    made = write_export(exported(settings, device_kind=device_kind), ExportTool.TRANSFORMERS)
    assert json.loads(made.text)["optim"] == name
    assert (made.settings == settings) is is_expressed


@pytest.mark.parametrize("optimizer", [None, "adafactor", "muon"])
def test_an_optimizer_that_transformers_lacks_is_passed_by_the_user(optimizer: str | None) -> None:
    made = write_export(exported(optimizer=optimizer), ExportTool.TRANSFORMERS)
    assert "optim" not in json.loads(made.text)
    assert "Trainer(…, optimizers=(optimizer, None))" in made.remarks[0]


@pytest.mark.parametrize("field", ["sums", "couples"])
@pytest.mark.parametrize("tool", list(ExportTool))
def test_a_loss_that_is_not_a_mean_of_micro_batches_is_refused(tool: ExportTool, field: str) -> None:
    with pytest.raises(UsageError, match=r"brimful\.fit"):
        write_export(exported(**{field: True}), tool)


@pytest.mark.parametrize("field", ["sums", "couples"])
def test_the_same_loss_of_one_micro_batch_is_exported(field: str) -> None:
    write_export(exported(Settings(micro_batch_size=8), **{field: True}), ExportTool.LIGHTNING)


def test_counts_that_only_brimful_weights_by_are_named() -> None:
    made = write_export(exported(counts=True), ExportTool.LIGHTNING)
    assert any("Job.count" in remark for remark in made.remarks)


@pytest.mark.parametrize(
    ("tool", "settings", "way_out"),
    [
        (ExportTool.TRANSFORMERS, FSDP2, "accelerate"),
        (ExportTool.LIGHTNING, FSDP2, "accelerate"),
        (ExportTool.DEEPSPEED, FSDP2, "zero3"),
        (ExportTool.FSDP, SETTINGS, "fsdp2"),
        (ExportTool.ACCELERATE, replace(FSDP2, precision=Precision.BF16), "fully_shard"),
        (ExportTool.ACCELERATE, replace(FSDP2, parallelism=Parallelism.ZERO2), "deepspeed"),
        (ExportTool.DEEPSPEED, replace(SETTINGS, precision=Precision.FP16), "bf16"),
    ],
)
def test_ranks_and_precisions_that_a_tool_trains_otherwise_are_refused(
    tool: ExportTool, settings: Settings, way_out: str
) -> None:
    with pytest.raises(UsageError, match=way_out):
        write_export(exported(settings), tool)


def test_accelerate_is_refused_for_several_ranks_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="mpirun"):
        write_export(exported(replace(SETTINGS, world_size=2), device_kind="cpu"), ExportTool.ACCELERATE)


def test_fully_shard_has_the_policies_of_the_plan() -> None:
    settings = replace(FSDP2, precision=Precision.BF16, param_dtype="bfloat16", offload_parameters=True)
    made = json.loads(write_export(exported(settings), ExportTool.FSDP).text)
    assert made["mp_policy"] == {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert (made["autocast"], made["cpu_offload"], made["reshard_after_forward"]) == ("bfloat16", True, True)


def test_ranks_of_one_model_are_launched_by_each_tool() -> None:
    settings = replace(SETTINGS, world_size=4, num_nodes=2)
    trainer = yaml.safe_load(write_export(exported(settings), ExportTool.LIGHTNING).text)["trainer"]
    assert (trainer["devices"], trainer["num_nodes"], trainer["strategy"]) == (2, 2, "ddp")
    launched = yaml.safe_load(write_export(exported(settings), ExportTool.ACCELERATE).text)
    assert (launched["num_processes"], launched["num_machines"]) == (4, 2)
    assert launched["distributed_type"] == "MULTI_GPU"
    of_losses, remark = write_export(exported(settings), ExportTool.TRANSFORMERS).remarks
    assert "trainer.loss_is_scaled_for_ga = False" in of_losses
    assert remark == "Start it by torchrun --nnodes 2 --nproc-per-node 2."
    whole = replace(settings, gradient_accumulation_steps=1)
    assert write_export(exported(whole), ExportTool.TRANSFORMERS).remarks == (remark,)


def test_the_peak_is_predicted_without_what_is_not_expressed() -> None:
    job = bf.Job(
        model=lambda: nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)]),
        loss=lambda model, x: model(x).square().mean(),
        batch=lambda n: torch.randn(n, 64),
    )
    plan = bf.plan(job, "cpu", global_batch_size=1024, micro_batch_size=1024, recompute="all")
    made = plan.export(job, "lightning")
    kept = bf.plan(job, "cpu", global_batch_size=1024, micro_batch_size=1024, recompute="none")
    assert made.predicted_peak_device_bytes == kept.predicted_peak_device_bytes
    assert made.predicted_peak_device_bytes > plan.predicted_peak_device_bytes
    assert "units recomputed" in str(made)
    tight = replace(plan, budget_bytes=plan.predicted_peak_device_bytes)
    assert tight.export(job, "transformers").fits
    assert not tight.export(job, "lightning").fits
    assert "DOES NOT FIT" in str(tight.export(job, "lightning"))


def test_an_unknown_tool_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="accelerate"):
        export_files(["megatron"])


@pytest.mark.parametrize("asked", [["fsdp", "fsdp=x"], ["fsdp="], ["fsdp=x", "lightning=x"]])
def test_files_that_would_be_written_twice_are_refused(asked: list[str]) -> None:
    with pytest.raises(UsageError, match="--export"):
        export_files(asked)


def test_yaml_is_read_as_it_was_meant() -> None:
    document = {"a": "no", "b": {"c": True, "d": None, "e": 1.5}, "f": 'x: "y" # z', "g": "ü"}
    assert yaml.safe_load(to_yaml(document, comments=("one", "two"))) == document
