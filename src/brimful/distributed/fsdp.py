"""FSDP2 on a model: each rank has its part of every parameter, and gathers a unit's while the unit runs.

FSDP2 wraps what is computed with the model, not the model, so that the computation is given the model itself,
with all its methods and attributes.

Gradients are reduced and sharded after each micro-batch, not only after the last: else each rank would hold
all of them meanwhile, which FSDP2 is used to avoid.

Parameters that are gathered with the whole model are held from its forward to the end of backward in any case:
they would be gathered again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from brimful.errors import UsageError
from brimful.optimizers import is_of_bitsandbytes
from brimful.settings import Settings

T = TypeVar("T")

Shard = Callable[[nn.Module, DeviceMesh], object]
"""Calls `fully_shard` on a model and its modules; `Job.shard`."""


class Sharded:
    """A model whose parameters are sharded over ranks.

    Args:
        model: Equal on each rank. Its parameters are replaced by shards (`DTensor`), so an optimizer has to be
            made afterwards.
        mesh: The ranks, in one dimension.
        settings: Say what is gathered when.
        shard: `Job.shard`, in place of `sharded_units`; then `compute` is to call the model itself.

    Raises:
        UsageError: `shard` omits the model itself, settings ask for what it decides, blocks share parameters,
            or BatchNorm's would be of another type than its statistics.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, settings: Settings, shard: Shard | None = None
    ) -> None:
        before = sum(1 for _ in model.parameters())
        if shard is None:
            self._root: Callable[[Any], Any] = _sharded_by_blocks(model, mesh, settings)
        else:
            _check_own_calls(settings)
            shard(model, mesh)
            if not isinstance(model, FSDPModule):
                raise UsageError(
                    "Job.shard did not call fully_shard on the model itself. Call it last, on the model that "
                    "it is given: fully_shard(model, mesh=mesh)."
                )
            self._root = partial(_call_with, model)
        after = sum(1 for _ in model.parameters())
        if after != before:
            raise UsageError(
                "blocks of this model share parameters with each other or with what is outside: FSDP2 would "
                f"make {after} parameters of its {before}. Train it by DDP."
            )

    def computed(self, compute: Callable[[nn.Module], T]) -> T:
        """The result of `compute` on the model with gathered parameters; a collective call."""
        found: T = self._root(compute)
        return found


def _sharded_by_blocks(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> nn.Module:
    """Shard a model so that its repeated blocks are gathered one by one, and all else with the root."""
    if settings.param_dtype is not None:
        _check_statistics(model)
    policies: dict[str, Any] = {"mp_policy": _precision_policy(settings)}
    if settings.offload_parameters:
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in sharded_units(model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, **policies)
    return cast(nn.Module, fully_shard(Around(model), mesh=mesh, **policies))


def _check_own_calls(settings: Settings) -> None:
    """Refuse settings that `Job.shard` decides by its arguments of `fully_shard`."""
    arguments = {
        f"param_dtype={settings.param_dtype!r}": (
            settings.param_dtype is not None, "mp_policy=MixedPrecisionPolicy(param_dtype=…)"
        ),
        "offload_parameters=True": (settings.offload_parameters, "offload_policy=CPUOffloadPolicy()"),
    }  # fmt: skip
    for asked, (is_asked, argument) in arguments.items():
        if is_asked:
            raise UsageError(
                f"{asked} has no effect on Job.shard, which calls fully_shard itself. Pass {argument} there, "
                "or leave shard out."
            )


def _call_with(model: nn.Module, compute: Callable[[nn.Module], T]) -> T:
    return compute(model)


class Around(nn.Module):
    """A model whose forward runs any computation with it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[nn.Module], T]) -> T:
        """The result of `compute` on the model."""
        return compute(self.model)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise `UsageError` if an optimizer cannot update sharded parameters."""
    if isinstance(optimizer, torch.optim.Adafactor):
        raise UsageError(
            "Adafactor is not trained under FSDP2: it takes means over rows and columns, which torch does not "
            "do in place of divided matrices. Take another optimizer, or train by DDP."
        )
    if is_of_bitsandbytes(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} is not trained under FSDP2: bitsandbytes' kernels do not take the "
            "parts that a parameter is divided into. Take 'adamw', or train by DDP."
        )


def _check_statistics(model: nn.Module) -> None:
    """Refuse BatchNorm: its kernels require parameters of the type of its statistics, which nothing casts."""
    for fqn, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.weight is not None and module.running_mean is not None:
            raise UsageError(
                f"{fqn} is a BatchNorm, whose parameters are not gathered in another type than its running "
                "statistics have. Leave param_dtype out."
            )


def _precision_policy(settings: Settings) -> MixedPrecisionPolicy:
    """FSDP2's precision policy. Autocast stays on too, so that ops it runs in float32 still do."""
    if settings.param_dtype is None:
        return MixedPrecisionPolicy()
    gathered = getattr(torch, settings.param_dtype)
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)


def sharded_units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters FSDP2 gathers together: a model's repeated blocks.

    They are the children of each outermost list or sequence that has several children of one class with
    parameters; all else is gathered with the whole model. Empty if nothing is repeated.
    """
    found: list[nn.Module] = []
    for child in model.children():
        blocks = [block for block in child.children() if any(True for _ in block.parameters())]
        is_row = isinstance(child, nn.ModuleList | nn.Sequential)
        if is_row and len(blocks) > 1 and len({type(block) for block in blocks}) == 1:
            found += blocks
        else:
            found += sharded_units(child)
    return list(dict.fromkeys(found))
