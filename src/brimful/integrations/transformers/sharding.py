"""How a Transformers `Trainer` divides its model among processes: DDP, or FSDP2 as Accelerate lays it.

Accelerate itself shards the captured model: transformer blocks, the embedding, and the last norm with the
output layer are gathered as units of their own. Under mixed precision it gathers parameters in that type,
averages gradients in it, and runs no autocast, so a plan for FSDP2 has the precision of the parameters.

Private API used here: `accelerate.utils.fsdp_utils.fsdp2_prepare_model` and `fsdp2_apply_ac`. Checked with
accelerate 1.15 and transformers 5.23.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from accelerate.utils import DistributedType
from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import Trainer

from brimful.errors import UsageError
from brimful.integrations.transformers.modules import trained_module
from brimful.settings import Parallelism

_DDP = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
_OTHER_DIMENSIONS = ("dp_replicate_size", "tp_size", "cp_size", "sp_size")
"""Fields of Accelerate's `ParallelismConfig` that divide or repeat more than FSDP2's shards."""


def shards(trainer: Trainer) -> bool:
    """Whether a trainer shards its model by FSDP2."""
    return bool(trainer.accelerator.distributed_type == DistributedType.FSDP)


def parallelism_of(trainer: Trainer) -> Parallelism:
    """How several processes of a trainer train one model."""
    return Parallelism.FSDP2 if shards(trainer) else Parallelism.DDP


def reshards_after_forward(trainer: Trainer) -> bool:
    """Whether gathered parameters of blocks are freed after their forward."""
    return bool(_plugin(trainer).reshard_after_forward)


def check_parallelism(trainer: Trainer) -> None:
    """Raise `UsageError` for trainers whose processes train in a way that is not planned.

    These use DeepSpeed, FSDP1, or FSDP2 with what a capture does not follow.
    """
    kind = trainer.accelerator.distributed_type
    if trainer.args.deepspeed or kind == DistributedType.DEEPSPEED:
        raise UsageError(
            "the trainer uses DeepSpeed, whose engine cannot be captured and whose buckets its own "
            'configuration decides. TrainingArguments(fsdp=True, fsdp_config={"version": 2}) divides '
            "parameters, gradients and optimizer state as ZeRO 3 does, and is planned. Without deepspeed, "
            "`bf.plan(job(trainer), world_size=…, parallelism='zero3')` plans ZeRO as `bf.fit` trains it."
        )
    if kind == DistributedType.FSDP:
        _check_fsdp(trainer)
    elif kind not in _DDP:
        raise UsageError(
            f"the trainer runs with {kind.value}; plans for trainers are made for one process, DDP and FSDP2."
        )
    elif trainer.args.fsdp and trainer.args.world_size > 1:
        warnings.warn(
            "Accelerate trains by DDP on a CPU, although TrainingArguments ask for FSDP: the plan is for DDP.",
            stacklevel=4,
        )


def shard_of(trainer: Trainer) -> Callable[[nn.Module, DeviceMesh], object] | None:
    """A function that shards a copy of a trainer's model as `train()` will shard the model; None under DDP."""
    if not shards(trainer):
        return None

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        plugin = copy.copy(_plugin(trainer))
        plugin.cpu_ram_efficient_loading = False  # of weights, which a capture does not have
        accelerator: Any = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            mixed_precision=trainer.accelerator.mixed_precision,
            is_main_process=False,
            device=mesh.device_type,
            parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
            torch_device_mesh=_Whole(mesh),
        )
        plugin.set_auto_wrap_policy(model)
        if plugin.activation_checkpointing:
            fsdp2_apply_ac(accelerator, model)
        fsdp2_prepare_model(accelerator, model)

    return shard


def sharding_notes(trainer: Trainer) -> tuple[str, ...]:
    """A note for a plan under FSDP2 on the type in which parameters are gathered, if it is set."""
    policy = _plugin(trainer).mixed_precision_policy if shards(trainer) else None
    if policy is None or policy.param_dtype is None:
        return ()
    kind = str(policy.param_dtype).removeprefix("torch.")
    return (f"FSDP2 gathers parameters in {kind} and averages gradients in it, without autocast",)


def reduce_each_micro_batch(trainer: Trainer) -> Callable[[], None]:
    """Have FSDP2 average and shard gradients after each micro-batch; returns what undoes it.

    Accelerate does so after the last micro-batch alone, and holds whole gradients of all parameters until then.
    """
    if not shards(trainer):
        return lambda: None
    options, name = trainer.accelerator.gradient_state.plugin_kwargs, "sync_each_batch"
    before = options.get(name, False)
    options[name] = True
    return partial(options.update, {name: before})


class _Whole:
    """A mesh whose selections are all the whole mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __getitem__(self, _names: object) -> DeviceMesh:
        return self._mesh


def _plugin(trainer: Trainer) -> Any:
    return trainer.accelerator.state.fsdp_plugin


def _check_fsdp(trainer: Trainer) -> None:
    plugin, dimensions = _plugin(trainer), trainer.accelerator.parallelism_config
    others = [name for name in _OTHER_DIMENSIONS if (getattr(dimensions, name, 1) or 1) > 1]
    reasons = {
        'FSDP1. Set fsdp_config={"version": 2}': plugin.fsdp_version != 2,
        "FSDP2 with cpu_offload. Leave cpu_offload out of fsdp_config": isinstance(
            plugin.cpu_offload, CPUOffloadPolicy
        ),
        f"FSDP2 with {' and '.join(others)}. Leave them out of the ParallelismConfig": bool(others),
        "fp16 under FSDP2, whose loss scaler is not captured. Set bf16=True": bool(trainer.args.fp16),
        "FSDP2 and a reference model. Use precompute_ref_log_probs=True, or train by DDP": (
            getattr(trainer, "ref_model", None) is not None
        ),
        "FSDP2 and a loss module beside the model. Train by DDP": (
            trained_module(trainer) is not trainer.model
        ),
        "FSDP2 in one process, which divides nothing. Start more by torchrun --nproc-per-node, or leave fsdp "
        "out of TrainingArguments": trainer.args.world_size == 1,
        "a model that FSDP2 has sharded already. Plan before `train()`": isinstance(trainer.model, FSDPModule),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UsageError(f"a plan cannot be made for a trainer with {reason}.")
