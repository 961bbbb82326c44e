"""Modules that only wrap another one, for a compiler or for data parallelism, seen through by name.

`torch.compile(model)` calls a model's weights "_orig_mod.head.weight", `DistributedDataParallel(model)`
"module.head.weight". A plain name is the one without wrappers. A module is a wrapper by its class alone, so a
submodule that someone calls "module" keeps its name.

Private torch API used here: `torch.utils._pytree` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from brimful.errors import UsageError
from brimful.torch_utils.replaced import replaced
from brimful.torch_utils.wrapper_tensors import with_inner_tensors
from brimful.utils.quantities import format_bytes

_COMPILED = ("torch._dynamo.eval_frame", "OptimizedModule")
_INNER = {
    _COMPILED: "_orig_mod",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointWrapper",
    ): "_checkpoint_wrapped_module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
    ("lightning_fabric.wrappers", "_FabricModule"): "_forward_module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
}
"""Attribute of the wrapped module, by module and name of the wrapper's class (torch 2.13, lightning 2.6,
deepspeed 0.19). Names avoid importing what a model does not use."""
_INNER_NAMES = frozenset(_INNER.values())


def plain_namer(model: nn.Module) -> Callable[[str], str]:
    """A function that returns the plain name of a module, parameter or buffer, without wrappers.

    It takes a name as in `named_modules`, `named_parameters` or `state_dict` of the model.
    """
    inner = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if (name := _inner_name(module)) is not None
    }

    def plain_name(name: str) -> str:
        path, kept = "", []
        for part in name.split("."):
            path = f"{path}.{part}" if path else part
            if path not in inner:
                kept.append(part)
        return ".".join(kept)

    return plain_name if inner else str


def plain_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by plain name, in the order of `named_modules`.

    A compiled module is its compiling wrapper; other wrappers are omitted.
    """
    plain_name = plain_namer(model)
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        name = plain_name(path)
        if name not in found or not _is_compiled(found[name]):
            found[name] = module
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers; the module itself if it has none."""
    name = _inner_name(module)
    return module if name is None else unwrapped(getattr(module, name))


def plain_state(model: nn.Module) -> dict[str, Any]:
    """A model's `state_dict` by plain names, with the inner tensors of those that are made of others."""
    plain_name = plain_namer(model)
    return {plain_name(name): value for name, value in with_inner_tensors(model.state_dict()).items()}


def wrapped_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state by the names that `model.load_state_dict` expects.

    The state has plain names, or those of a wrapped model's `state_dict`; names that the model does not have
    are unchanged.
    """
    plain_name = plain_namer(model)
    own = {plain_name(name): name for name in with_inner_tensors(model.state_dict())}
    return {own.get(resolved(name, own), name): value for name, value in state.items()}


def resolved(name: str, known: Container[str]) -> str:
    """Resolve a name, which may come from a wrapped model, to a plain name.

    The result is the name itself, if it is among the plain names `known`; else the known name that omits the
    fewest parts named like wrapped modules in wrappers; else the name itself.
    """
    parts = name.split(".")
    inner = [index for index, part in enumerate(parts) if part in _INNER_NAMES]
    for count in range(len(inner) + 1):
        for removed in combinations(inner, count):
            candidate = ".".join(part for index, part in enumerate(parts) if index not in removed)
            if candidate in known:
                return candidate
    return name


def _inner_name(module: nn.Module) -> str | None:
    for cls in type(module).__mro__:
        name = _INNER.get((cls.__module__, cls.__qualname__))
        if name is not None and isinstance(getattr(module, name, None), nn.Module):
            return name
    return None


def _is_compiled(module: nn.Module) -> bool:
    return (type(module).__module__, type(module).__qualname__) == _COMPILED


def check_runs_on_one_device(model: nn.Module, *, job: str) -> None:
    """Refuse a model that spreads a batch over several GPUs of one process, which is not predicted.

    A model that is or contains an `nn.DataParallel`, except on one given GPU, raises UsageError, which names
    the job.
    """
    for name, module in model.named_modules():
        if _spreads(module):
            what = f"{name!r} in the model of {job!r}" if name else f"the model of {job!r}"
            raise _data_parallel_error(f"{what} is an nn.DataParallel")


@contextmanager
def runs_on_one_device(*, job: str) -> Iterator[None]:
    """Refuse what `check_runs_on_one_device` refuses where the job's loss or loop calls it."""
    forward = nn.DataParallel.forward

    def checked(module: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
        if _spreads(module):
            gather = partial(module.module, *inputs, **kwargs)
            raise _data_parallel_error(f"the code of {job!r} calls an nn.DataParallel", gather)
        return forward(module, *inputs, **kwargs)

    def refused(
        module: nn.Module,
        inputs: Any,
        _device_ids: Any = None,
        _output_device: Any = None,
        _dim: int = 0,
        module_kwargs: Mapping[str, Any] | None = None,
        **_others: Any,
    ) -> Any:
        given = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
        gather = partial(module, *given, **(module_kwargs or {}))
        raise _data_parallel_error(f"the code of {job!r} calls nn.parallel.data_parallel", gather)

    with replaced(nn.DataParallel, "forward", checked), replaced(nn.parallel, "data_parallel", refused):
        yield


def _spreads(module: nn.Module) -> bool:
    return isinstance(module, nn.DataParallel) and len(module.device_ids) != 1


def _data_parallel_error(found: str, gather: Callable[[], Any] | None = None) -> UsageError:
    """The error of a module that spreads a batch; `gather` computes its output for the whole batch."""
    gathered = None
    if gather is not None:
        with suppress(Exception):  # the output is for its size alone
            gathered = gather()
    gathered_bytes = sum(each.nbytes for each in tree_leaves(gathered) if isinstance(each, Tensor))
    size = f" ({format_bytes(gathered_bytes)} for this batch)" if gathered_bytes else ""
    return UsageError(
        f"{found}, which divides each batch over all GPUs of one process. Beside its own part GPU 0 then holds "
        f"the outputs of the whole batch{size}, as much for their gradients, and the optimizer state. That is "
        "not predicted, planned or trained. Give the module inside (`.module`), for one GPU, or for several "
        "with world_size=N (--world-size N) and DistributedDataParallel: one process per GPU, which all hold "
        "the same."
    )
