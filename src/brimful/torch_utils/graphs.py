"""Autograd's graphs: their leaves, how old their nodes are, what they save.

Private torch APIs used here: `grad_fn._raw_saved_…`, `grad_fn._saved_reduction`, `SavedTensor.data`,
`Node._sequence_nr` (checked: torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
_SAVED = "_raw_saved_"
_OF_FUNCTIONS = "_raw_saved_tensors"
MOST_NODES = 100_000
"""Nodes of a graph that are looked at. A choice: more take longer than a step."""
_LAST_NUMBER = 2**63
"""Autograd numbers nodes from 0; those that accumulate gradients, which steps share, are numbered above."""
_PASSED_ON = (
    *("AddBackward", "NegBackward", "ToCopyBackward", "SumBackward", "MeanBackward"),
    *("ReshapeBackward", "ViewBackward", "StackBackward", "CatBackward"),
)
"""Beginnings of nodes between a loss and its scaling."""


def storage_key(tensor: Tensor) -> int | None:
    """Names the storage of a tensor; None of tensors without, such as those that `torch.func` wraps."""
    try:
        return tensor.untyped_storage()._cdata
    except RuntimeError:
        return None


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Names of the storages of tensors."""
    found = {storage_key(each) for each in tensors if each.layout is torch.strided}
    return {key for key in found if key is not None}


def storages_of_model(model: nn.Module) -> set[int]:
    """Names of the storages of the parameters and buffers of a model."""
    return storages_of((*model.parameters(), *model.buffers()))


def grad_fn_of(tensor: Any) -> Any:
    """The node that made a tensor; None also where torch refuses to make that of a view whose base changed."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def nodes_of(tensors: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the graphs of tensors, each once."""
    left, seen = [grad_fn_of(each) for each in tensors if isinstance(each, Tensor)], set[Any]()
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            yield node


def reached_from(tensors: Iterable[Any]) -> tuple[list[Tensor], set[int]]:
    """The leaves that backward from tensors gives gradients, and the numbers of the other nodes."""
    leaves, numbers = [], set()
    for node in nodes_of(tensors):
        if node.name() == _ACCUMULATE_GRAD:
            leaves.append(node.variable)
        else:
            numbers.add(node._sequence_nr())
    return leaves, numbers


def saved_for_no_leaf(tensors: Iterable[Any], leaves: set[int]) -> set[int]:
    """Names of storages that graphs save only where gradients reach none of some leaves, given by id.

    Functions of the user's may have parameters that the graph does not show.
    """
    nodes, consumers = [*nodes_of(tensors)], dict[Any, list[Any]]()
    for node in nodes:
        for following, _ in node.next_functions:
            consumers.setdefault(following, []).append(node)
    left = [
        each
        for each in nodes
        if isinstance(each, BackwardCFunction)
        or (each.name() == _ACCUMULATE_GRAD and id(each.variable) in leaves)
    ]
    needed = set[Any]()
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += consumers.get(node, ())
    kept, others = set[int](), set[int]()
    for node in nodes:
        (kept if node in needed else others).update(storages_of(saved_by(node)[0] or ()))
    return others - kept


def ages_of(tensors: Iterable[Any]) -> tuple[int, int] | None:
    """The lowest and the highest number of the nodes of graphs; None without a graph."""
    numbers = [number for node in nodes_of(tensors) if (number := node._sequence_nr()) < _LAST_NUMBER]
    return (min(numbers), max(numbers)) if numbers else None


def scaling_of(loss: Any) -> tuple[bool, set[float]]:
    """Whether a loss is multiplied or is a sum of samples, and by what it, or a part of its sum, is divided."""
    left, seen, divisors = [grad_fn_of(loss)], set[Any](), set[Any]()
    is_mean = is_sum = False
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name, reduction = node.name(), getattr(node, "_saved_reduction", None)
        is_product = name.startswith(("DivBackward", "MulBackward"))
        saved = (saved_by(node)[0] or ()) if is_product else ()
        # `.item()` of a Python number's tensor fails under dispatch modes.
        factor: Any = saved[0].tolist() if len(saved) == 1 and not saved[0].dim() else None
        if factor == 1 or name.startswith(_PASSED_ON):  # Transformers and Accelerate scale by 1 too
            left += [following for following, _ in node.next_functions]
        elif factor is not None and name.startswith("DivBackward"):
            divisors.add(factor)
        elif is_product:
            return True, set()
        is_mean |= name.startswith("MeanBackward") or reduction == 1
        is_sum |= name.startswith(("SumBackward", "DotBackward")) or reduction == 2
    return is_sum and not is_mean, divisors


def saved_bytes(outputs: Iterable[Any], beside: Iterable[Tensor], first_node: int = 0) -> int:
    """Bytes that the graphs of outputs save from a node's number on, but for the tensors in `beside`."""
    known = {each.untyped_storage()._cdata for each in beside if each.layout is torch.strided}
    found: dict[int, int] = {}
    for node in nodes_of(outputs):
        for tensor in (saved_by(node)[0] or ()) if node._sequence_nr() >= first_node else ():
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(size for address, size in found.items() if address not in known)


def saved_by(node: Any) -> tuple[tuple[Tensor, ...] | None, bool]:
    """The tensors that a node saves, None if backward has freed them; and whether it saves something else.

    What hooks have packed, as checkpointing and offloading do, is not unpacked: that would recompute it.
    """
    found, is_packed = list[Tensor](), False
    for name in _saving(node.__class__):
        try:
            value = getattr(node, name)
            raw = value if isinstance(value, tuple | list) else (value,)
            if any(each.unpack_hook is not None for each in raw):
                is_packed = True
                found += [each.data for each in raw if isinstance(each.data, Tensor)]
                continue
            value = (
                getattr(node, name.removeprefix("_raw"), None) if name != _OF_FUNCTIONS else node.saved_tensors
            )
        except RuntimeError:
            return None, False
        found += [
            each
            for each in (value if isinstance(value, tuple | list) else (value,))
            if isinstance(each, Tensor)
        ]
    return tuple(found), is_packed


@cache
def _saving(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_SAVED))
