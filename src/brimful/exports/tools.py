"""One function per tool: a plan's settings → the text of a file.

A file says how a step runs: batches, precision, memory, ranks. The learning rate, its schedule, weight decay
and clipping do not belong to a plan, so they are not in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from brimful.errors import UsageError
from brimful.exports.records import Export, ExportSource, ExportTool
from brimful.exports.shared import (
    check_mathematics,
    environment,
    model_remarks,
    optimizer_remark,
    recomputes_all,
    tf32_remark,
    weight_remark,
    without_others,
)
from brimful.exports.yaml import to_yaml
from brimful.settings import OptimizerImplementation, Precision
from brimful.trace.zero import zero_options

_BY_HAND = frozenset({"optimizer_implementation"})
"""Fields that the user sets in tools that are given an optimizer."""

_COPIED_OUTPUTS = (
    "Accelerate copies outputs of the model that autocast made to float32, such as logits. The predicted peak "
    "has no such copy."
)
"""Source: `convert_outputs_to_fp32` (checked: accelerate 1.15)."""


def write_export(source: ExportSource, tool: ExportTool) -> Export:
    """A plan as a file of another tool, without a predicted peak.

    Raises `UsageError` if the tool would train something else, or cannot divide the model as the plan does.
    """
    check_mathematics(source, tool)
    return _WRITERS[tool](source)


def _export(
    source: ExportSource,
    tool: ExportTool,
    document: Mapping[str, Any],
    *,
    expressed: frozenset[str],
    remarks: tuple[str, ...],
    variables: tuple[tuple[str, str], ...] = (),
) -> Export:
    settings, not_expressed = without_others(source.settings, expressed)
    remarks = (*remarks, *weight_remark(source, tool), *model_remarks(settings))
    variables = (*environment(source), *variables)
    if tool.file_name.endswith(".json"):
        text = json.dumps(document, indent=2) + "\n"
    else:
        comments = (
            *(f"not expressed here: {each}" for each in not_expressed),
            *remarks,
            *(f"environment: {name}={value}" for name, value in variables),
        )
        text = to_yaml(document, comments=comments)
    return Export(
        tool=tool,
        text=text,
        settings=settings,
        not_expressed=not_expressed,
        remarks=remarks,
        environment=variables,
    )


def _refuse_parallelism(source: ExportSource, tool: ExportTool, permitted: str, way_out: str) -> None:
    settings = source.settings
    raise UsageError(
        f"the plan divides the model by {settings.parallelism} among {settings.world_size} ranks, and the "
        f"export for {tool} has {permitted}. {way_out}"
    )


def _is_divided(source: ExportSource) -> bool:
    return source.settings.divides_state


def _transformers(source: ExportSource) -> Export:
    """`TrainingArguments` (checked: transformers 5.23).

    Older versions name `activation_checkpointing` `gradient_checkpointing`, which 5.23 deprecates.
    """
    settings, tool = source.settings, ExportTool.TRANSFORMERS
    if _is_divided(source):
        _refuse_parallelism(source, tool, "DDP", "Export it for accelerate, deepspeed or fsdp.")
    document: dict[str, Any] = {
        "per_device_train_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "bf16": settings.precision is Precision.BF16,
        "fp16": settings.precision is Precision.FP16,
    }
    if settings.precision is Precision.TF32:
        document["tf32"] = True
    if source.device_kind == "cpu":
        document["use_cpu"] = True
    expressed, remarks = frozenset[str](), list[str]()
    optimizer = _OPTIMIZERS_OF_TRANSFORMERS.get(source.optimizer or "")
    if optimizer is None:
        remarks.append(f"{optimizer_remark(source)} Pass it: Trainer(…, optimizers=(optimizer, None)).")
        expressed |= _BY_HAND
    else:
        document |= optimizer
        implemented = _adamw_of(source) if document["optim"] == "adamw_torch" else None
        if implemented is not None:
            document["optim"] = implemented
            expressed |= _BY_HAND
    if source.optimizer == "adamw8bit":
        remarks.append(
            "Transformers keeps the optimizer state of embeddings in float32, 8 bytes a parameter. The "
            "predicted peak has 2."
        )
    if recomputes_all(settings):
        document["activation_checkpointing"] = True
        expressed |= {"units"}
        remarks.append("The model recomputes its own layers, which may differ from the units of the plan.")
    if settings.precision.autocast_dtype:
        remarks.append(_COPIED_OUTPUTS)
    if settings.gradient_accumulation_steps > 1:
        remarks.append(
            "Classifiers, BERT, T5 and all models whose loss ignores num_items_in_batch: set "
            "trainer.loss_is_scaled_for_ga = False. Otherwise the Trainer adds up the means of micro-batches."
        )
    if settings.world_size > 1:
        remarks.append(_torchrun(source))
    return _export(source, tool, document, expressed=expressed, remarks=tuple(remarks))


_OPTIMIZERS_OF_TRANSFORMERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"optim": "adamw_torch"},
    "adam": {"optim": "adamw_torch", "weight_decay": 0.0},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "rmsprop": {"optim": "rmsprop"},
    "adagrad": {"optim": "adagrad"},
    "adamw8bit": {"optim": "adamw_bnb_8bit"},
}
"""Arguments that choose the same formulas. Transformers' adafactor is another than torch's: it does not scale
by the parameter (source: `trainer_optimizer.py`, transformers 5.23)."""


def _adamw_of(source: ExportSource) -> str | None:
    """Name of torch's AdamW with the plan's implementation; None where Transformers has none."""
    implementation = source.settings.optimizer_implementation
    default = (
        OptimizerImplementation.FOREACH if source.device_kind == "cuda" else OptimizerImplementation.FOR_LOOP
    )
    if implementation is OptimizerImplementation.FUSED:
        return "adamw_torch_fused"
    return "adamw_torch" if implementation in (None, default) else None


def _torchrun(source: ExportSource) -> str:
    settings = source.settings
    nodes = f" --nnodes {settings.num_nodes}" if settings.num_nodes > 1 else ""
    return f"Start it by torchrun{nodes} --nproc-per-node {settings.world_size // settings.num_nodes}."


def _accelerate(source: ExportSource) -> Export:
    """The configuration of `accelerate launch` (checked: accelerate 1.15)."""
    settings, tool = source.settings, ExportTool.ACCELERATE
    if settings.world_size > 1 and settings.parallelism.is_zero:
        way_out = "Export it for deepspeed; Accelerate reads that file by DeepSpeedPlugin(hf_ds_config=…)."
        _refuse_parallelism(source, tool, "DDP and FSDP2", way_out)
    if settings.world_size > 1 and source.device_kind == "cpu":
        raise UsageError(
            "accelerate launch starts one process on a CPU, whatever num_processes is, unless by mpirun. "
            "Export it for transformers, lightning, deepspeed or fsdp, or plan for world_size=1."
        )
    autocast = settings.precision.autocast_dtype
    if settings.divides_model and autocast:
        raise UsageError(
            f"under FSDP2 Accelerate casts parameters and averages gradients in {autocast}, which rounds more "
            "than the plan. Export it for fsdp, which is torch's fully_shard."
        )
    distributed = "MULTI_GPU" if settings.world_size > 1 else "NO"
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if settings.divides_model else distributed,
        "mixed_precision": {Precision.BF16: "bf16", Precision.FP16: "fp16"}.get(settings.precision, "no"),
        "num_machines": settings.num_nodes,
        "num_processes": settings.world_size,
        "use_cpu": source.device_kind == "cpu",
    }
    expressed = _BY_HAND
    remarks = [
        f"Make the data loader with batch_size={settings.micro_batch_size}, that of one process.",
        optimizer_remark(source),
        *tf32_remark(settings),
    ]
    variables: tuple[tuple[str, str], ...] = ()
    if settings.gradient_accumulation_steps > 1:
        variables = (("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(settings.gradient_accumulation_steps)),)
        remarks.append(
            "Accelerator reads the accumulation from the environment. Train within "
            "accelerator.accumulate(model)."
        )
    if autocast:
        remarks.append(_COPIED_OUTPUTS)
    if settings.divides_model:
        document["fsdp_config"] = _fsdp_of_accelerate(source)
        expressed |= {"units"} if recomputes_all(settings) else set()
        remarks.append("Accelerate shards the embedding, last norm and output layer as units of their own.")
        if settings.gradient_accumulation_steps > 1:
            remarks.append(
                "accelerator.accumulate holds whole gradients until the last micro-batch, unlike the plan: "
                "GradientAccumulationPlugin(sync_each_batch=True) shards them after each."
            )
    return _export(source, tool, document, expressed=expressed, remarks=tuple(remarks), variables=variables)


def _fsdp_of_accelerate(source: ExportSource) -> dict[str, Any]:
    settings = source.settings
    classes = ",".join(sorted({name for _path, name in source.sharded_modules}))
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": settings.reshard_after_forward,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if classes else "NO_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": classes} if classes else {}),
        "fsdp_offload_params": settings.offload_parameters,
        "fsdp_activation_checkpointing": recomputes_all(settings),
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
    }


def _deepspeed(source: ExportSource) -> Export:
    """DeepSpeed's configuration (checked: DeepSpeed 0.19.8).

    Mixed precision is `torch_autocast`: sections `bf16` and `fp16` would hold the parameters in that type too.
    """
    settings, tool = source.settings, ExportTool.DEEPSPEED
    if settings.divides_model:
        _refuse_parallelism(
            source, tool, "DDP and ZeRO", "Plan with parallelism='zero3', or export it for fsdp."
        )
    if settings.precision is Precision.FP16:
        raise UsageError(
            "DeepSpeed's fp16 holds parameters in float16, and the plan holds them in float32. Plan with bf16."
        )
    is_zero = settings.world_size > 1 and settings.parallelism.is_zero
    document: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": (
            zero_options(settings.parallelism, source.parameter_count) if is_zero else {"stage": 0}
        ),
    }
    if settings.precision is Precision.BF16:
        document["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    remarks = [
        f"{optimizer_remark(source)} Pass it: deepspeed.initialize(model=…, optimizer=…, config=…).",
        f"Make the data loader with batch_size={settings.micro_batch_size}, that of one rank.",
        *tf32_remark(settings),
    ]
    if settings.world_size > 1:
        remarks.append(f"Start it by deepspeed --num_gpus {settings.world_size // settings.num_nodes}.")
        if not is_zero:
            remarks.append(
                "DeepSpeed's buffers for gradients take the place of DDP's buckets in the predicted peak."
            )
    return _export(source, tool, document, expressed=_BY_HAND, remarks=tuple(remarks))


def _fsdp(source: ExportSource) -> Export:
    """Keyword arguments of torch's `fully_shard`, for which torch has no file (checked: torch 2.13)."""
    settings, tool = source.settings, ExportTool.FSDP
    if not settings.divides_model:
        raise UsageError(
            f"fully_shard is FSDP2, and the plan has world_size={settings.world_size} and "
            f"parallelism={str(settings.parallelism)!r}. Plan with parallelism='fsdp2' (--parallelism fsdp2) "
            "and world_size=2 (--world-size 2) or more."
        )
    gathered = settings.param_dtype
    document = {
        "micro_batch_size": settings.micro_batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "world_size": settings.world_size,
        "autocast": settings.precision.autocast_dtype,
        "modules": [path for path, _name in source.sharded_modules],
        "reshard_after_forward": settings.reshard_after_forward,
        "mp_policy": {"param_dtype": gathered, "reduce_dtype": "float32"} if gathered else {},
        "cpu_offload": settings.offload_parameters,
    }
    remarks = (
        "Call fully_shard on each of the modules, then on the model, and make the optimizer afterwards.",
        optimizer_remark(source),
        *tf32_remark(settings),
        _torchrun(source),
    )
    return _export(source, tool, document, expressed=_BY_HAND, remarks=remarks)


def _lightning(source: ExportSource) -> Export:
    """Keyword arguments of `lightning.Trainer`, as LightningCLI's files have them (checked: lightning 2.6)."""
    settings, tool = source.settings, ExportTool.LIGHTNING
    if _is_divided(source):
        _refuse_parallelism(source, tool, "DDP", "Export it for accelerate, deepspeed or fsdp.")
    document = {
        "trainer": {
            "accelerator": "gpu" if source.device_kind == "cuda" else "cpu",
            "devices": settings.world_size // settings.num_nodes,
            "num_nodes": settings.num_nodes,
            "strategy": "ddp" if settings.world_size > 1 else "auto",
            "precision": {Precision.BF16: "bf16-mixed", Precision.FP16: "16-mixed"}.get(
                settings.precision, "32-true"
            ),
            "accumulate_grad_batches": settings.gradient_accumulation_steps,
        },
        "data": {"batch_size": settings.micro_batch_size},
    }
    remarks = (
        f"{optimizer_remark(source)} Return it from configure_optimizers.",
        *tf32_remark(settings),
    )
    return _export(source, tool, document, expressed=_BY_HAND, remarks=remarks)


_WRITERS: Mapping[ExportTool, Callable[[ExportSource], Export]] = {
    ExportTool.TRANSFORMERS: _transformers,
    ExportTool.ACCELERATE: _accelerate,
    ExportTool.DEEPSPEED: _deepspeed,
    ExportTool.FSDP: _fsdp,
    ExportTool.LIGHTNING: _lightning,
}
