"""Whether data are one batch with all samples, or batches to iterate over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeGuard

from torch import Tensor

from brimful.batches.tensors import is_applicable, is_record
from brimful.job import Batch, Samples


def is_one_batch(data: Batch | Iterable[Batch]) -> bool:
    """Whether `data` is one batch with all samples, rather than an iterable of batches."""
    if are_samples(data):
        return False
    if isinstance(data, list):
        return any(isinstance(entry, Tensor) for entry in data)
    if isinstance(data, Tensor | tuple | Mapping) or is_applicable(data) or dataclasses.is_dataclass(data):
        return True
    return is_record(data) and not hasattr(type(data), "__iter__")  # a loader may have a method `to`


def are_samples(data: object) -> TypeGuard[Samples]:
    """Whether data make their batches themselves; a loader may have a list named `batches`."""
    return isinstance(data, Samples) and callable(data.batches)
