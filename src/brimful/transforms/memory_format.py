"""A memory format → a model, its gradients and its optimizer's state in it, undoably; and batches in it.

4-d and 5-d floating-point tensors are converted as `module.to(memory_format=…)` does. Values do not change, and
neither do the keys of a `state_dict`. Start reading at `apply_memory_format`.

Fused kernels on a CPU take parameter, gradient and state for rows of numbers in the same order, and update
wrong numbers where their layouts differ (torch 2.13). So state follows its parameter here, loaded state too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from brimful.batches import map_tensors, named_tensors
from brimful.errors import UsageError
from brimful.job import Batch
from brimful.optimizers import has_gaps, is_of_bitsandbytes
from brimful.settings import MemoryFormat, Parallelism, Settings
from brimful.torch_utils.wrapper_tensors import is_wrapper_tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class AppliedFormat:
    """A memory format in force on a model until `remove`.

    Parameters, buffers and gradients are converted in place; a format of None converts nothing. Raises
    `UsageError` if a tensor to convert is divided among ranks, or in the buckets of DDP.
    """

    def __init__(self, model: nn.Module, memory_format: MemoryFormat | None) -> None:
        self._memory_format = memory_format
        self._strides: list[tuple[Tensor, tuple[int, ...]]] = []
        """Each tensor that was converted, with its strides before."""
        self._optimizer: Optimizer | None = None
        self._stop_following: Callable[[], None] = lambda: None
        if memory_format is None:
            return
        found = [tensor for tensor in _convertible(model) if not _is_laid_out(tensor, memory_format)]
        _check_convertible(model, found, memory_format)
        for tensor in found:
            self._strides.append((tensor, tensor.stride()))
            _lay_out(tensor, partial(in_memory_format, memory_format=memory_format))

    def follow(self, optimizer: Optimizer) -> None:
        """Convert the optimizer's state with the parameters, now and whenever state is loaded.

        Raises `UsageError` if the optimizer cannot update parameters in this format.
        """
        if self._memory_format is None:
            return
        if self._memory_format is not MemoryFormat.CONTIGUOUS and is_of_bitsandbytes(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} makes every parameter contiguous before it updates it, so "
                f"memory_format={str(self._memory_format)!r} would be undone. Use another optimizer, such as "
                "adamw, or memory_format='contiguous'."
            )
        self._optimizer = optimizer
        follow_parameters(optimizer)
        self._stop_following = optimizer.register_load_state_dict_post_hook(follow_parameters).remove

    def remove(self) -> None:
        """Restore the layout of every tensor; calling it again does nothing."""
        self._stop_following()
        was_converted = bool(self._strides)
        while self._strides:
            tensor, strides = self._strides.pop()
            _lay_out(tensor, partial(_with_strides, strides=strides))
        if self._optimizer is not None and was_converted:
            follow_parameters(self._optimizer)


def apply_memory_format(
    model: nn.Module, settings: Settings, optimizer: Optimizer | None = None
) -> AppliedFormat:
    """Convert a model to the memory format of `settings`; `remove` of the result undoes it.

    Tensors that share memory with others of the model stay as they are.

    Args:
        model: The model; before it is wrapped by DDP or sharded by FSDP2.
        settings: Their `memory_format`, and how ranks share the model.
        optimizer: Its state is converted too. None if it is made later; see `AppliedFormat.follow`.

    Returns:
        What `remove` undoes.

    Raises:
        UsageError: The format cannot be used with the parallelism, the wrapper or the optimizer; the model then
            stays as it was.
    """
    _check_parallelism(settings)
    applied = AppliedFormat(model, settings.memory_format)
    try:
        if optimizer is not None:
            applied.follow(optimizer)
    except BaseException:
        applied.remove()
        raise
    return applied


def in_memory_format(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """A tensor in a memory format: itself if it is laid out so already, or is not a 4-d or 5-d float."""
    if not _may_be_converted(tensor):
        return tensor
    if memory_format is MemoryFormat.CONTIGUOUS:
        return tensor.to(memory_format=torch.contiguous_format).contiguous()
    return tensor.to(memory_format=_CHANNELS_LAST[tensor.dim()])


def batch_in_format(
    batch: Batch,
    memory_format: MemoryFormat | None,
    converted: Callable[[str, Tensor], None] = lambda _path, _tensor: None,
) -> Batch:
    """A copy of a batch on the device whose tensors are in a memory format; None returns the batch itself.

    `converted` is called with the path and the result of each tensor that is copied.
    """
    if memory_format is None:
        return batch
    paths = iter([path for path, _tensor in named_tensors(batch)])

    def change(tensor: Tensor) -> Tensor:
        path, changed = next(paths), in_memory_format(tensor, memory_format)
        if changed is not tensor:
            converted(path, changed)
        return changed

    return map_tensors(batch, change)


@torch.no_grad()
def follow_parameters(optimizer: Optimizer) -> None:
    """Lay out the optimizer's state of each 4-d and 5-d parameter as the parameter is.

    Entries of the parameter's shape are replaced in the state. Raises `UsageError` if the state is quantized in
    blocks of adjacent numbers.
    """
    for parameter, state in list(optimizer.state.items()):
        if not (isinstance(parameter, Tensor) and isinstance(state, dict) and _may_be_converted(parameter)):
            continue
        for name, value in state.items():
            if _lies_otherwise(value, parameter):
                if not value.is_floating_point():
                    raise UsageError(
                        f"the state {name!r} of {type(optimizer).__name__} is quantized in the order in which "
                        f"its parameter lay, and the parameter now lies otherwise. Load it under the memory "
                        "format that it was made in, or start with a new optimizer."
                    )
                state[name] = _with_strides(value, parameter.stride())


def _check_parallelism(settings: Settings) -> None:
    ways = {Parallelism.FSDP2: "FSDP2 shards contiguous parameters only"}
    if settings.memory_format is MemoryFormat.CHANNELS_LAST and settings.divides_state:
        why = ways.get(settings.parallelism, "DeepSpeed lays parameters out in one contiguous row")
        raise UsageError(
            f"memory_format='channels_last' cannot be used under {settings.parallelism} with "
            f"{settings.world_size} ranks: {why}. Use memory_format='contiguous' (or 'preserve'), or train by "
            "DDP (parallelism='ddp')."
        )


def _check_convertible(model: nn.Module, found: list[Tensor], memory_format: MemoryFormat) -> None:
    if not found:
        return
    if any(isinstance(tensor, DTensor) for tensor in found):
        raise UsageError(
            f"memory_format={str(memory_format)!r} cannot be applied to a model that FSDP2 has sharded: "
            "fully_shard takes contiguous parameters only."
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UsageError(
            f"memory_format={str(memory_format)!r} is to be applied to a model inside DistributedDataParallel, "
            f"whose buckets of gradients have the layout of {len(found)} parameters or buffers as they were. "
            "Convert the model before it is wrapped: model.to(memory_format=torch.channels_last)."
        )


def _convertible(model: nn.Module) -> Iterator[Tensor]:
    """4-d and 5-d parameters and buffers that share their memory with no other tensor of the model."""
    found = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    tensors = [each for each in found if not nn.parameter.is_lazy(each) and not is_wrapper_tensor(each)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    shared = Counter(tensor.untyped_storage()._cdata for tensor in plain if tensor.layout is torch.strided)
    for tensor in tensors:
        if _may_be_converted(tensor) and (
            isinstance(tensor, DTensor) or shared[tensor.untyped_storage()._cdata] == 1
        ):
            yield tensor


def _may_be_converted(tensor: Tensor) -> bool:
    return (
        tensor.dim() in _CHANNELS_LAST
        and tensor.layout is torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
    )


def _is_laid_out(tensor: Tensor, memory_format: MemoryFormat) -> bool:
    """Whether converting a tensor would return it; by strides, so that size 1 counts as in torch's kernels."""
    like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return in_memory_format(like, memory_format) is like


def _lay_out(tensor: Tensor, convert: Callable[[Tensor], Tensor]) -> None:
    """Convert a tensor and its gradient in place, as `nn.Module.to` does."""
    with torch.no_grad():
        tensor.data = convert(tensor.data)
        if tensor.is_leaf and tensor.grad is not None:
            tensor.grad.data = convert(tensor.grad.data)


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of a tensor with other strides."""
    made = torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _lies_otherwise(value: Any, parameter: Tensor) -> bool:
    """Whether an entry of the state has a parameter's shape and other strides."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
        return False
    return value.stride() != parameter.stride() and not has_gaps(parameter)
