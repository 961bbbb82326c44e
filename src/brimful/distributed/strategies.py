"""How ranks train one model: alone, by DDP, by FSDP2, by DeepSpeed's ZeRO.

Each of these wraps what is computed with the model, not the model: so a job's loss is given the model itself,
with all its methods and attributes, and the wrapper sees all that is computed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from brimful.distributed.deepspeed import WholeZeroModel, ZeroEngine
from brimful.distributed.fsdp import Around, Sharded, check_optimizer
from brimful.distributed.gather import WholeModel
from brimful.distributed.ranks import Ranks
from brimful.errors import UsageError
from brimful.execution.precision import autocast
from brimful.job import Batch, Job
from brimful.settings import Parallelism, Precision, Settings, fp16_is_divided
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor

T = TypeVar("T")


class DataParallel:
    """Data-parallel behaviour of a step; this base class is for a single rank."""

    is_sharded = False
    saves_parts = False
    """Whether each rank saves its own shards of the model and of the optimizer state."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The job's loss, computed so that gradients are reduced over ranks."""
        return self._job.loss(model, batch)

    def synchronising(self, is_last: bool) -> AbstractContextManager[object]:
        """Context for a micro-batch's forward and backward: DDP reduces gradients only in the last one."""
        return nullcontext()

    def computed(self, model: nn.Module, compute: Callable[[nn.Module], T]) -> T:
        """The result of `compute` on the model, without gradients."""
        return compute(model)

    clip: Callable[[Optimizer, float | None], Tensor] | None = None
    """Clips gradients, as `StepHooks.clip`; None clips those of the parameters."""

    def divided(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer that steps the parameters, made from a new one."""
        return optimizer

    def whole_model(self, model: nn.Module, folder: Path | None) -> nn.Module:
        """A module with the model's `state_dict` of unsharded tensors; a collective call.

        `folder` is for files of gathered tensors on the first rank, which keeps them; None on the others.
        """
        return model

    def held_tensors(self) -> Sequence[Tensor]:
        """Tensors held between steps, other than the model, the optimizer, and tensors that a step's ops read.

        DDP's buckets are read by ops, so that memory measurements find them.
        """
        return ()

    def close(self) -> None:
        """Release what connects this rank to the others."""


class _Replicated(DataParallel):
    """DDP: every rank has the whole model."""

    def __init__(self, job: Job, model: nn.Module, ranks: Ranks) -> None:
        super().__init__(job)
        has_wrappers = any(map(is_wrapper_tensor, model.parameters()))
        if has_wrappers:  # DDP would flatten them, as torchao's cannot be
            ranks.broadcast_parameters(model)
        # A branch that no sample takes on one rank may be taken on another, which would wait for ever if unused
        # parameters were not looked for.
        self._ddp: DistributedDataParallel | None = DistributedDataParallel(
            Around(model),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
            init_sync=not has_wrappers,
        )

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._ddp is not None
        value: Tensor = self._ddp(lambda inner: self._job.loss(inner, batch))
        return value

    def synchronising(self, is_last: bool) -> AbstractContextManager[object]:
        assert self._ddp is not None
        return nullcontext() if is_last else self._ddp.no_sync()

    def close(self) -> None:
        self._ddp = None
        gc.collect()  # what communicates is to be freed before the process group is


class _Sharded(DataParallel):
    """FSDP2: each rank has a shard of every parameter, and gathers those of a unit while it runs."""

    is_sharded = saves_parts = True

    def __init__(
        self, job: Job, model: nn.Module, settings: Settings, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(job)
        mesh = init_device_mesh(device.type, (ranks.count,))
        self._sharded: Sharded | None = Sharded(model, mesh, settings, job.shard)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._sharded is not None
        return self._sharded.computed(lambda inner: self._job.loss(inner, batch))

    def computed(self, model: nn.Module, compute: Callable[[nn.Module], T]) -> T:
        assert self._sharded is not None
        return self._sharded.computed(compute)

    def divided(self, optimizer: Optimizer) -> Optimizer:
        check_optimizer(optimizer)
        return optimizer

    def whole_model(self, model: nn.Module, folder: Path | None) -> nn.Module:
        return WholeModel(model, folder)

    def close(self) -> None:
        self._sharded = None
        gc.collect()


class _Zero(DataParallel):
    """DeepSpeed's ZeRO: each rank has its part of the optimizer state, of gradients, of parameters."""

    is_sharded = True

    def __init__(self, job: Job, model: nn.Module, settings: Settings, device: torch.device) -> None:
        super().__init__(job)
        self._model, self._settings, self._device = model, settings, device
        self._engine: ZeroEngine | None = None

    def divided(self, optimizer: Optimizer) -> Optimizer:
        self._engine = ZeroEngine(self._model, optimizer, self._settings.parallelism, self._device)
        return self._engine.optimizer

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self._engine is not None

        def compute(inner: nn.Module) -> Tensor:
            with autocast(inner, self._settings.precision):  # DeepSpeed disables an outer autocast
                return self._job.loss(inner, batch)

        return self._engine.loss(compute)

    def synchronising(self, is_last: bool) -> AbstractContextManager[object]:
        assert self._engine is not None
        return self._engine.synchronising(is_last)

    def clip(self, optimizer: Optimizer, max_norm: float | None) -> Tensor:
        """Set the norm for DeepSpeed's step, which clips by it, and return the gradient's norm."""
        assert self._engine is not None
        self._engine.optimizer.max_norm = max_norm
        return self._engine.gradient_norm()

    def computed(self, model: nn.Module, compute: Callable[[nn.Module], T]) -> T:
        assert self._engine is not None
        return self._engine.computed(compute)

    def whole_model(self, model: nn.Module, folder: Path | None) -> nn.Module:
        if self._settings.parallelism is not Parallelism.ZERO3:
            return model
        return WholeZeroModel(model, is_kept=folder is not None)

    def held_tensors(self) -> Sequence[Tensor]:
        assert self._engine is not None
        return self._engine.held_tensors()

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


def data_parallel(
    job: Job, model: nn.Module, settings: Settings, device: torch.device, ranks: Ranks
) -> DataParallel:
    """The data-parallel behaviour of a step under the settings.

    `model` is on this rank's `device`, equal on each rank. Under FSDP2 its parameters are replaced by shards,
    so the optimizer has to be made afterwards. Raises `UsageError` if the settings or the model cannot be
    trained this way.
    """
    if not ranks.is_distributed:
        return DataParallel(job)
    if settings.parallelism is Parallelism.DDP:
        return _Replicated(job, model, ranks)
    engine = "DeepSpeed's ZeRO" if settings.parallelism.is_zero else "FSDP2"
    if settings.precision is Precision.FP16:
        raise fp16_is_divided(settings.parallelism)
    if any(map(is_wrapper_tensor, model.parameters())):
        raise UsageError(
            "the model has weights that torchao quantised, or other tensors made of tensors, and "
            f"{engine} cannot shard them. Train by DDP."
        )
    if settings.offloaded or settings.chunked_loss is not None:
        raise UsageError(
            f"offloading and a loss in chunks are not supported under {engine}. Plan with "
            "offload_activations=False and chunked_loss=False, or train by DDP."
        )
    ranks.broadcast_parameters(model)
    if settings.parallelism.is_zero:
        return _Zero(job, model, settings, device)
    return _Sharded(job, model, settings, device, ranks)
