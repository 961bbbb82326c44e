"""A step of one of several ranks under FSDP2, run without the others.

FSDP2 itself runs, on fake tensors and over torch's fake process group, which sends nothing. What it does beside
ops is recorded too: it makes and frees room for gathered parameters by resizing their storage, and
DTensor works out global shapes by running ops on fakes of its own, which no device does.

Private torch APIs used here: `distributed_c10d._new_process_group_helper` and `_world`,
`torch.testing._internal.distributed.fake_pg`,
`torch.distributed.fsdp._fully_shard`, `alloc_storage`, `free_storage` and `FSDPParam`,
`torch.distributed.tensor._sharding_prop.ShardingPropagator` (checked: torch 2.13, 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_parameters
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_groups
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from brimful.capture.recording.recorder import Recorder
from brimful.errors import CaptureError
from brimful.settings import Settings
from brimful.torch_utils.replaced import replaced

GATHERED = "gathered parameters"
"""Label of the memory of a unit's gathered parameters in a trace."""


_CAPTURED = "brimful capture"
"""Name of the process group and of the mesh of a capture, beside those of the process."""


_in_process_group: ContextVar[bool] = ContextVar("in_process_group", default=False)


@contextmanager
def permitted_in_process_group() -> Iterator[None]:
    """Let a rank of a process group capture FSDP2 on as many ranks; the others need not take part."""
    token = _in_process_group.set(True)
    try:
        yield
    finally:
        _in_process_group.reset(token)


@contextmanager
def fake_ranks(settings: Settings) -> Iterator[DeviceMesh]:
    """Make this process one of the settings' ranks, of which no other exists, and yield the ranks' mesh.

    Raises `CaptureError` in a process group, unless it has as many ranks and `permitted_in_process_group` is in
    force.
    """
    if dist.is_initialized():
        if not _in_process_group.get() or settings.world_size != dist.get_world_size():
            raise CaptureError(
                "FSDP2 cannot be planned for inside a process group. Plan before it is made, in one process, "
                "and train by the plan's file."
            )
        with _fake_group_beside_others(settings.world_size) as mesh:
            yield mesh
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.world_size)
    try:
        yield init_device_mesh("cpu", (settings.world_size,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _fake_group_beside_others(world_size: int) -> Iterator[DeviceMesh]:
    """Yield a mesh of ranks that send nothing, in a process that is a rank itself; no other rank takes part."""
    ranks = list(range(world_size))
    group, _store = distributed_c10d._new_process_group_helper(
        world_size,
        dist.get_rank(),
        ranks,
        dist.Backend("fake"),
        FakeStore(),
        _CAPTURED,  # type: ignore[arg-type]  # a str by any name
        timeout=timedelta(minutes=1),
    )
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in ranks}
    try:
        # Its name keeps it apart from the real mesh: DTensor caches layouts by mesh, and equal ones are one.
        yield DeviceMesh.from_group(group, "cpu", mesh_dim_names=(_CAPTURED,))
    finally:
        dist.destroy_process_group(group)


@contextmanager
def sharding_recorded(recorder: Recorder, settings: Settings) -> Iterator[None]:
    """Let the recorder see what FSDP2 allocates and frees, and not what DTensor only works out.

    With `offload_parameters` for a GPU, a shard is copied there before it is gathered, and a gradient is copied
    to the host as soon as it is reduced.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached
    allocate, free = fsdp_parameters.alloc_storage, fsdp_parameters.free_storage

    def seen_allocate(tensor: Tensor) -> None:
        allocate(tensor)
        recorder.ledger.track(tensor, GATHERED)

    def seen_free(tensor: Tensor) -> None:
        recorder.ledger.free_tensor(tensor)
        free(tensor)

    def unseen_propagate(propagator: ShardingPropagator, schema: Any) -> Any:
        with recorder.paused():
            return propagate(propagator, schema)

    sharded: Any = FSDPParam
    make_part, gather = sharded.to_sharded_dtensor, sharded.all_gather_inputs.fget

    def gradient_on_host(parameter: FSDPParam, tensor: Tensor) -> Any:
        if not hasattr(parameter, "sharded_param"):  # not a gradient, but its part while it is divided
            return make_part(parameter, tensor)
        with recorder.position.on_host():
            return make_part(parameter, tensor.clone())

    def gathered_from_host(parameter: FSDPParam) -> Any:
        own = parameter._sharded_param_data
        parameter._sharded_param_data = recorder.values.empty_copy(own)
        try:
            return gather(parameter)
        finally:
            parameter._sharded_param_data = own

    stand_ins: list[tuple[Any, str, Any]] = [
        (fsdp_parameters, "alloc_storage", seen_allocate),
        (fsdp_groups, "alloc_storage", seen_allocate),
        (fsdp_parameters, "free_storage", seen_free),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen_propagate),
    ]
    if settings.offload_parameters and not recorder.host_is_device:
        stand_ins.append((sharded, "to_sharded_dtensor", gradient_on_host))
        stand_ins.append((sharded, "all_gather_inputs", property(gathered_from_host)))
    with ExitStack() as stack:
        for where, name, stand_in in stand_ins:
            stack.enter_context(replaced(where, name, stand_in))
        yield
