"""What would take less memory at the peak of a watched run, and about how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from brimful.doctor.evidence import Evidence
from brimful.memory import MemoryPrediction
from brimful.trace import Category, Phase
from brimful.trace.units import find_units, freed_bytes

LEAST_FRACTION = 0.05
"""Fraction of the peak that a change must save to be listed. A choice."""

_OF_BATCH = (Phase.FORWARD, Phase.BACKWARD)
"""Phases whose peak shrinks with the batch."""
_EIGHT_BIT_FRACTION = 2.03 / 8
"""State of AdamW in 8 bits beside float32's 8 bytes for each parameter: see `brimful.optimizers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change that takes less memory, whose amount follows from what the peak holds."""

    change: str
    size_bytes: int
    """About how much less; with another peak elsewhere in the step it is less than that."""


def savings(memory: MemoryPrediction, evidence: Evidence) -> tuple[Saving, ...]:
    """Changes that take at least a twentieth less at the peak, the largest first."""
    failed = evidence.failed
    asked_bytes = 0 if failed is None else failed.requested_bytes or 0
    least_bytes = LEAST_FRACTION * (memory.peak_allocated_bytes - asked_bytes)
    found = [each for each in _savings(memory, evidence) if each.size_bytes >= least_bytes]
    return tuple(sorted(found, key=lambda each: -each.size_bytes))


def _savings(memory: MemoryPrediction, evidence: Evidence) -> Iterator[Saving]:
    held = dict(memory.breakdown)
    of_batch = held[Category.SAVED_TENSORS] + held[Category.INPUTS] + held[Category.TEMPORARIES]
    if memory.peak_phase in _OF_BATCH:
        yield Saving(
            change="micro-batches half as large, two of them accumulated: the same gradients of a mean loss",
            size_bytes=of_batch // 2,
        )
        yield Saving(
            change="activation checkpointing of the repeated blocks: the same results, a forward more",
            size_bytes=min(
                freed_bytes(evidence.trace, find_units(evidence.trace)), held[Category.SAVED_TENSORS]
            ),
        )
    if any("exp_avg_sq" in each.label for each in evidence.trace.storages):
        yield Saving(
            change="AdamW in 8 bits (bitsandbytes): state rounded by blocks",
            size_bytes=int(held[Category.OPTIMIZER_STATE] * (1 - _EIGHT_BIT_FRACTION)),
        )
