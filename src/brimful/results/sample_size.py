"""How large the samples of a batch are: recorded with a plan, compared with the batches of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from brimful.codec import NonNegativeInt


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """The size of one entry of a batch for each of its samples."""

    name: str
    """Expression that reaches it, such as `batch["input_ids"]`."""
    shape: tuple[NonNegativeInt | None, ...] = ()
    """The shape in the batch, with None in the place of the samples; empty where samples differ in shape."""
    elements: Annotated[float, Meta(ge=0)]
    """Elements for each sample; the mean where samples differ."""


def larger_entries(found: Sequence[SampleSize], than: Sequence[SampleSize]) -> tuple[SampleSize, ...]:
    """The entries of `found` that have more elements for each sample than those of the same names in `than`.

    Entries that only one of the two has are not compared.
    """
    others = {size.name: size.elements for size in than}
    return tuple(size for size in found if size.elements > others.get(size.name, size.elements))


def describe_growth(low: Sequence[SampleSize], high: Sequence[SampleSize]) -> tuple[str, str, str] | None:
    """Where two batches differ most, with both values: ("dimension 1 of batch", "8", "200").

    The result is None if no entry of `high` is larger.
    """
    larger = larger_entries(high, low)
    if not larger:
        return None
    before = {size.name: size for size in low}
    most = max(larger, key=lambda size: size.elements / max(before[size.name].elements, 1.0))
    least = before[most.name]
    if len(least.shape) == len(most.shape):
        for dim, (few, many) in enumerate(zip(least.shape, most.shape, strict=True)):
            if few is not None and many is not None and many > few:
                return f"dimension {dim} of {most.name}", str(few), str(many)
    return f"{most.name}, in elements for each sample,", f"{least.elements:.4g}", f"{most.elements:.4g}"
