"""Walks the tensors in batches; `layout.py` says where their samples are.

A `Batch` is a nest of dicts, lists, tuples, named tuples and dataclasses (also mapping classes such as
transformers' `BatchEncoding`) with tensors at its leaves. Objects with a method `to` belong to the nest: their
attributes are entries. For PyTorch Geometric's objects their methods `apply` and `to_dict` are used.

The walk is our own: `torch.utils._pytree` is private, and it takes a mapping class or a dataclass for
one leaf unless its library has registered it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from brimful.job import Batch

_Leaf = TypeVar("_Leaf")


class SampleList(list[Any]):
    """A part of a list of samples, marked as such: the shapes of its few tensors may agree by accident."""


class SampleTuple(tuple[Any, ...]):
    """A part of a tuple of samples; see `SampleList`."""

    __slots__ = ()


def map_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """A copy of a nest with every tensor replaced by `change(tensor)`; other leaves are passed on unchanged."""
    return map_leaves(batch, Tensor, change)


def map_leaves(
    batch: Batch, kind: type[_Leaf], change: Callable[[_Leaf], Any], *, into_objects: bool = True
) -> Batch:
    """A copy of a nest with every leaf of class `kind` replaced by `change(leaf)`; other leaves are passed on.

    Containers and objects are copied, so `batch` stays as it was. `into_objects` says whether the attributes of
    objects with a method `to` belong to the nest.
    """
    return map_where(batch, lambda entry: isinstance(entry, kind), change, into_objects=into_objects)


def map_where(
    batch: Batch,
    is_leaf: Callable[[Any], bool],
    change: Callable[[Any], Any],
    *,
    into_objects: bool = True,
) -> Batch:
    """`map_leaves` with every entry for which `is_leaf` is true as a leaf, containers included."""

    def changed(entry: Any) -> Any:
        return map_where(entry, is_leaf, change, into_objects=into_objects)

    if is_leaf(batch):
        return change(batch)
    if isinstance(batch, MutableMapping):
        mapping = copy.copy(batch)  # keeps the class and whatever else the object holds
        for key, entry in batch.items():
            mapping[key] = changed(entry)
        return mapping
    if isinstance(batch, Mapping):
        return {key: changed(entry) for key, entry in batch.items()}
    if isinstance(batch, list):
        kind: type[list[Any]] = SampleList if isinstance(batch, SampleList) else list
        return kind(changed(entry) for entry in batch)
    if isinstance(batch, tuple):
        entries = [changed(entry) for entry in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*entries)
        return SampleTuple(entries) if isinstance(batch, SampleTuple) else tuple(entries)
    if into_objects and is_applicable(batch):
        return copy.copy(batch).apply(changed)
    names = _attributes(batch) if into_objects or _is_dataclass_instance(batch) else ()
    if not names:
        return batch
    copied = copy.copy(batch)
    for name in names:
        # past a frozen dataclass's own __setattr__: `copied` is still ours alone
        object.__setattr__(copied, name, changed(getattr(batch, name)))
    return copied


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an op's arguments or results: nests of tuples, lists and dicts, walked quickly."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; any other tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    part: Any = getattr(tensor, "ds_tensor", None)  # DeepSpeed's
    return tensor if part is None else _without_padding(tensor, part)


def _without_padding(parameter: Any, part: Any) -> Tensor:
    """A rank's part of a parameter that DeepSpeed partitions, without the padding, whose values are arbitrary.

    Source: partition_parameters.py, `ds_tensor`, `ds_numel`, `ds_zero_partition_rank` (checked: 0.19.8).
    """
    begin = parameter.ds_zero_partition_rank * part.ds_numel
    own: Tensor = part.narrow(0, 0, min(max(parameter.ds_numel - begin, 0), part.ds_numel))
    return own


def to_device(batch: Batch, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
    """`batch` with every tensor on `device`; a tensor that is there already is not copied."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def named_tensors(batch: Batch, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch with the expression that reaches it, such as `batch["images"][0]`."""
    return named_where(batch, lambda entry: isinstance(entry, Tensor), path)


def named_where(batch: Batch, is_leaf: Callable[[Any], bool], path: str = "batch") -> Iterator[tuple[str, Any]]:
    """The leaves that `map_where` would change, in its order, with the expressions that reach them."""
    if is_leaf(batch):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, entry in batch.items():
            name = f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]"
            yield from named_where(entry, is_leaf, name)
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        for name, entry in zip(batch._fields, batch, strict=True):
            yield from named_where(entry, is_leaf, f"{path}.{name}")
    elif isinstance(batch, list | tuple):
        for index, entry in enumerate(batch):
            yield from named_where(entry, is_leaf, f"{path}[{index}]")
    elif is_applicable(batch):
        yield from named_where(batch.to_dict(), is_leaf, path)
    else:
        for name in _attributes(batch):
            yield from named_where(getattr(batch, name), is_leaf, f"{path}.{name}")


def is_record(value: Any) -> bool:
    """Whether a value has entries by name: a mapping, a dataclass or an object with a method `to`."""
    return isinstance(value, Mapping) or is_applicable(value) or bool(_attributes(value))


def is_applicable(value: Any) -> bool:
    """Whether a value applies functions to its own tensors, as PyTorch Geometric's data do.

    Source: torch_geometric/data/data.py, `BaseData.apply`, `BaseData.to_dict` (checked: 2.9).
    """
    return _has_to(value) and all(callable(getattr(value, name, None)) for name in ("apply", "to_dict"))


def _attributes(value: Any) -> tuple[str, ...]:
    """Names of attributes that belong to a nest: those of a dataclass, or of an object with a method `to`."""
    if _is_dataclass_instance(value):
        return tuple(field.name for field in dataclasses.fields(value))
    if not _has_to(value) or not hasattr(value, "__dict__"):
        return ()
    return tuple(name for name, entry in vars(value).items() if entry is not value)


def _has_to(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module | type):
        return False
    return callable(getattr(type(value), "to", None))


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
