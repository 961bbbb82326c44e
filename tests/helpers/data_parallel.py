"""Trains small models on two ranks with a plan in force and without, and compares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from brimful.settings import Action, Settings, UnitAction, op_kind
from brimful.transforms import apply_units
from helpers.models import GPT, Block, ResNet
from helpers.trained_alike import Loss, mean_square, saved_bytes

STEPS = 2


class Decoder(nn.Module):
    """GPT whose blocks are a Sequential, with a branch that no batch takes if `branches`."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(3)))
        self.branch = nn.Linear(16, 16) if branches else None
        self.head = nn.Linear(16, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def units(recomputed: Iterable[str], saved: Mapping[str, tuple[str, ...]]) -> Settings:
    """Settings with some units recomputed and of some the results of ops saved."""
    actions = [UnitAction(fqn=unit, action=Action.RECOMPUTE) for unit in recomputed]
    actions += [UnitAction(fqn=unit, action=Action.SAVE, saved=ops) for unit, ops in saved.items()]
    return Settings(micro_batch_size=1, units=tuple(actions))


@dataclass(frozen=True)
class Case:
    """One way to train in parallel, and one plan."""

    model: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module]
    """What makes a model data-parallel."""
    settings: Settings
    applies_after: bool = False
    """The plan is applied to the model within the wrapper."""
    synchronises_once: bool = True
    """Gradients go between ranks in the last micro-batch only, so that they are added up in the same order as
    without sharding; else in every one."""
    loss: Loss = next_token
    batch: Callable[[], Tensor] = lambda: torch.randint(40, (2, 12))


@dataclass(frozen=True)
class Found:
    """What came of a case on one rank."""

    plain: dict[str, Tensor]
    """Losses, gradients, parameters and buffers of all steps, whole."""
    planned: dict[str, Tensor]
    unsharded: dict[str, Tensor]
    """Of the baseline of a copy on each rank, its gradients averaged over the ranks."""
    saved_bytes: tuple[int, int]
    """What a forward leaves for backward: plain, planned."""
    all_gathers: tuple[int, int]
    """In one forward and backward: plain, planned."""
    products: tuple[int, int]
    """Linear layers that ran in one forward and backward: plain, planned."""


def find_ddp() -> dict[str, Found]:
    """What comes of each case of DDP on this rank."""
    return {name: _find(case) for name, case in ddp_cases().items()}


def find_fsdp() -> dict[str, Found]:
    """What comes of each case of FSDP2 on this rank."""
    return {name: _find(case) for name, case in fsdp_cases().items()}


def _find(case: Case) -> Found:
    torch.manual_seed(0)
    model = case.model()
    torch.manual_seed(10 + dist.get_rank())
    batches = [case.batch() for _ in range(2)]
    alone, plain, planned = (copy.deepcopy(model) for _ in range(3))
    plain = case.wrap(plain)
    if case.applies_after:
        planned = case.wrap(planned)
        apply_units(getattr(planned, "module", planned), case.settings)
    else:
        apply_units(planned, case.settings)
        planned = case.wrap(planned)
    trained = [_train(each, batches, case) for each in (plain, planned, alone)]
    counts = [_count(each, batches[0], case) for each in (plain, planned)]
    return Found(
        plain=trained[0],
        planned=trained[1],
        unsharded=trained[2],
        saved_bytes=(counts[0].saved_bytes, counts[1].saved_bytes),
        all_gathers=(counts[0].all_gathers, counts[1].all_gathers),
        products=(counts[0].products, counts[1].products),
    )


def _train(model: nn.Module, batches: list[Tensor], case: Case) -> dict[str, Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with _synchronising(model, is_last or not case.synchronises_once):
                value = case.loss(model, batch)
                (value / len(batches)).backward()
            found[f"loss {index} of step {step}"] = value.detach().clone()
        if not isinstance(model, (DistributedDataParallel, FSDPModule)):
            _average(model)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found |= _whole(f"gradient of step {step}", gradients)
        optimizer.step()
        optimizer.zero_grad()
        found |= _whole(f"parameter of step {step}", dict(model.named_parameters()))
        found |= _whole(f"buffer of step {step}", dict(model.named_buffers()))
    return found


def _synchronising(model: nn.Module, synchronises: bool) -> AbstractContextManager[Any]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(synchronises)
    elif isinstance(model, DistributedDataParallel) and not synchronises:
        return model.no_sync()
    return nullcontext()


def _average(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _whole(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"{kind}: {name.removeprefix('module.')}": (
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        )
        .detach()
        .clone()
        for name, tensor in tensors.items()
    }


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.saved_bytes = self.all_gathers = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = op_kind(str(func))
        self.all_gathers += kind.startswith("c10d._allgather")
        self.products += kind == "addmm"
        return func(*args, **(kwargs or {}))


def _count(model: nn.Module, batch: Tensor, case: Case) -> _Count:
    with saved_bytes() as saved, _Count() as count:
        case.loss(model, batch).backward()
    model.zero_grad()
    count.saved_bytes = saved.total_bytes
    return count


# The cases.


def _ddp(**options: bool) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def _fsdp(*, nested: bool = False, **options: Any) -> Callable[[nn.Module], nn.Module]:
    """Each block by itself, and the root; if `nested` the blocks' MLPs too."""

    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            if nested:
                fully_shard(block.mlp, **options)
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return wrap


_BLOCKS = units(["blocks.0"], {"blocks.1": ("addmm#0", "addmm#2", "bernoulli_#1")})
_PARTS = units(["blocks.0.attention", "blocks.1.mlp[1..3]"], {"blocks.2": ("addmm#2", "addmm#0")})
_SEVERAL = units(["blocks[0..1]"], {"blocks.2": ("addmm#1",)})
_SEGMENT = Settings(
    micro_batch_size=1,
    units=(
        UnitAction(fqn="blocks.0", action=Action.RECOMPUTE),
        *(UnitAction(fqn=f"blocks.{i}", action=Action.NEST) for i in (1, 2)),
    ),
)
_STAGES = units(["layer1.0", "layer3"], {"layer2[0..1]": ("native_batch_norm#0", "convolution#1")})


def _images(*, after: bool = False, **options: bool) -> Case:
    batch = partial(torch.randn, 4, 3, 16, 16)
    case = Case(ResNet, _ddp(**options), _STAGES, applies_after=after, loss=mean_square, batch=batch)
    return replace(case, synchronises_once=False)


def ddp_cases() -> dict[str, Case]:
    """Every option of DDP that changes how it follows backward, the plan applied before and after wrapping."""
    unused = _ddp(find_unused_parameters=True)
    with_branch = partial(Decoder, branches=True)
    return {
        "tied weight": Case(GPT, _ddp(), _BLOCKS),
        "tied weight, applied after": Case(GPT, _ddp(), _BLOCKS, applies_after=True),
        "tied weight, static graph": Case(GPT, _ddp(static_graph=True), _BLOCKS, synchronises_once=False),
        "tied weight, synchronised each time": Case(GPT, _ddp(), _BLOCKS, synchronises_once=False),
        "nested": Case(GPT, _ddp(), _SEGMENT),
        "nested, static graph, applied after": Case(
            GPT, _ddp(static_graph=True), _SEGMENT, applies_after=True, synchronises_once=False
        ),
        "unused branch": Case(with_branch, unused, _BLOCKS),
        "unused branch, applied after": Case(with_branch, unused, _BLOCKS, applies_after=True),
        "batch norm": _images(),
        "batch norm, find unused": _images(find_unused_parameters=True),
        "batch norm, static graph, applied after": _images(static_graph=True, after=True),
    }


def fsdp_cases() -> dict[str, Case]:
    """Units that are sharded modules, parts of one, and several."""
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return {
        "tied weight": Case(GPT, _fsdp(), _BLOCKS),
        "tied weight, applied after": Case(GPT, _fsdp(), _BLOCKS, applies_after=True),
        "kept gathered": Case(Decoder, _fsdp(reshard_after_forward=False), _BLOCKS),
        "parts of a shard": Case(Decoder, _fsdp(), _PARTS, applies_after=True),
        "shards in a shard": Case(Decoder, _fsdp(nested=True), _BLOCKS),
        "a unit of several shards": Case(Decoder, _fsdp(), _SEVERAL),
        "a unit of several shards, applied after": Case(Decoder, _fsdp(), _SEVERAL, applies_after=True),
        "nested": Case(GPT, _fsdp(), _SEGMENT),
        "nested in one shard": Case(GPT, fully_shard, _SEGMENT, applies_after=True),
        "synchronised each time": Case(Decoder, _fsdp(), _BLOCKS, synchronises_once=False),
        "bf16": Case(Decoder, _fsdp(mp_policy=bf16), _BLOCKS),
    }
