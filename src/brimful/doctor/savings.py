"""What would take less memory at the peak of a watched run, and about how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from brimful.doctor.evidence import Evidence
from brimful.memory import MemoryPrediction, live_profile
from brimful.memory.at_error import (
    Saving,
    activation_checkpointing,
    eight_bit_optimizer,
    smaller_micro_batches,
)
from brimful.trace import Category, EventKind, Phase
from brimful.trace.units import find_units, freed_bytes

LEAST_FRACTION = 0.05
"""Fraction of the peak that a change must save to be listed. A choice."""

_OF_BATCH = (Phase.FORWARD, Phase.BACKWARD)
"""Phases whose peak shrinks with the batch."""


def savings(memory: MemoryPrediction, evidence: Evidence) -> tuple[Saving, ...]:
    """Changes that take at least a twentieth less at the peak, the largest first."""
    failed = evidence.failed
    asked_bytes = 0 if failed is None else failed.requested_bytes or 0
    least_bytes = LEAST_FRACTION * (memory.peak_allocated_bytes - asked_bytes)
    found = [each for each in _savings(memory, evidence) if each.size_bytes >= least_bytes]
    return tuple(sorted(found, key=lambda each: -each.size_bytes))


def _savings(memory: MemoryPrediction, evidence: Evidence) -> Iterator[Saving]:
    held = dict(memory.breakdown)
    profile, ops = live_profile(evidence.trace, 1), evidence.trace.ops
    of_weights = {each.size_bytes for each in evidence.trace.storages if each.category is Category.PARAMETERS}
    before = {
        each.storage
        for each in evidence.trace.events
        if each.kind is EventKind.ALLOCATE and (each.op < 0 or ops[each.op].phase is Phase.SETUP)
    }
    for index, size_bytes in profile.held_bytes_at(profile.peak_position).items():
        storage = evidence.trace.storages[index]
        phase = None if storage.op is None else ops[storage.op].phase
        is_of_weight = phase is Phase.BACKWARD and storage.category is Category.TEMPORARIES
        is_of_weight &= storage.size_bytes in of_weights
        # Evaluations, data sets in memory and gradients of weights do not shrink with the batch.
        if index in before or is_of_weight or phase is Phase.EVALUATION:
            held[storage.category] -= size_bytes
    of_batch = held[Category.SAVED_TENSORS] + held[Category.INPUTS] + held[Category.TEMPORARIES]
    if memory.peak_phase in _OF_BATCH:
        halved = smaller_micro_batches(of_batch)
        gradients = {
            each.label: each.size_bytes
            for each in evidence.trace.storages
            if each.category is Category.GRADIENTS
        }
        # The first micro-batch leaves all gradients beside the second.
        beside = (
            max(sum(gradients.values()) - held[Category.GRADIENTS], 0) if evidence.micro_batches == 1 else 0
        )
        yield replace(halved, size_bytes=max(halved.size_bytes - beside, 0))
        inside = freed_bytes(evidence.trace, find_units(evidence.trace))
        yield activation_checkpointing(min(inside, held[Category.SAVED_TENSORS]))
    squares = sum(each.size_bytes for each in evidence.trace.storages if "exp_avg_sq" in each.label)
    updates = [op for op in evidence.trace.ops if op.phase is Phase.OPTIMIZER]
    if squares and updates and evidence.adam:
        is_half = max(updates, key=lambda op: op.read_bytes).dtype in ("bfloat16", "float16")
        yield eight_bit_optimizer(
            evidence.adam, held[Category.OPTIMIZER_STATE], squares // (2 if is_half else 4)
        )
