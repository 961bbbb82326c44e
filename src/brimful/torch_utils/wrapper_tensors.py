"""Tensors made of others, which torch calls wrapper subclasses: torchao's quantised weights, for one.

Their memory is that of their inner tensors, such as `qdata` and `scale`; they have no storage of their own.

Private torch APIs used here: `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, `Tensor._is_param`
(checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type


def is_wrapper_tensor(value: object) -> bool:
    """Whether a value is a tensor made of others; a sharded tensor is not, see `batches.own_part`."""
    return is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor)


@cache
def calls_ops_on_parts(kind: type) -> bool:
    """Whether tensors of a class run an op as others on their inner tensors, or on this rank's shard."""
    return is_traceable_wrapper_subclass_type(kind)


def with_inner_tensors(named: Mapping[str, Any]) -> dict[str, Any]:
    """Replace tensors made of others by these: `weight` by `weight.qdata` and `weight.scale` in its place."""
    found: dict[str, Any] = {}
    for name, value in named.items():
        if is_wrapper_tensor(value):
            parts, _context = value.__tensor_flatten__()
            found |= with_inner_tensors({f"{name}.{part}": getattr(value, part) for part in parts})
        else:
            found[name] = value
    return found


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that have a tensor's memory: its inner tensors, or the tensor itself."""
    return list(with_inner_tensors({"": tensor}).values()) if is_wrapper_tensor(tensor) else [tensor]


def remade(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor or parameter of the same class made of other inner tensors; it requires a gradient as before.

    `change` makes a tensor of the same shape from each inner one.
    """
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {}
    for name in names:
        inner = getattr(wrapper, name)
        parts[name] = remade(inner, change) if is_wrapper_tensor(inner) else change(inner)
    made: Any = type(wrapper).__tensor_unflatten__(parts, context, wrapper.shape, wrapper.stride())
    if isinstance(tensor, nn.Parameter):
        made._is_param = True  # what makes it an nn.Parameter
    result: Tensor = made.requires_grad_(tensor.requires_grad)
    return result
