"""Memory that grows with every step: losses kept with their graphs, a buffer that outputs are added to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from brimful.trace import CUBLAS_WORKSPACE, Category, EventKind, Phase, Storage, Trace
from brimful.utils.quantities import format_bytes

_LEAST_BYTES = 4096
"""Growth by less is not reported, such as of a list of numbers for a plot: it is 1 GiB after 262,144 steps. A
choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that each step leaves held beyond what it found."""

    size_bytes: int
    line: str
    """Where the largest tensor kept is made, as "train.py:12"; "" if that is not known."""


def growth(trace: Trace) -> Growth | None:
    """By how much memory grows, where each of the last two captured steps left more held than it found.

    Gradients are not counted. The first step may make the optimizer's state, so it leaves at least what each
    step adds. A trace of one step shows nothing.
    """
    held, kept = _held_between_steps(trace) if trace.captured_steps > 1 else ([], set())
    if len(held) < 3:
        return None
    grown_bytes = min(held[-1] - held[-2], held[-2] - held[-3])
    if grown_bytes < _LEAST_BYTES:
        return None
    if not trace.is_own_loop:  # micro-batches after the captured ones keep as much
        grown_bytes = grown_bytes * trace.settings.gradient_accumulation_steps // trace.captured_micro_batches
    largest = max((trace.storages[index] for index in kept), key=lambda storage: storage.size_bytes)
    return Growth(size_bytes=grown_bytes, line="" if largest.op is None else trace.ops[largest.op].line)


def growth_notes(trace: Trace) -> tuple[str, ...]:
    """What is uncertain where memory grows with every captured step."""
    found = growth(trace)
    if found is None:
        return ()
    made = f" (the largest tensor kept was made in {found.line})" if found.line else ""
    return (
        f"memory that grew by {format_bytes(found.size_bytes)} in the last of {trace.captured_steps} steps"
        f"{made}: if it grows in every step, training takes more than predicted. Bound what a forward keeps in "
        "buffers and lists; of a loss keep loss.item() or loss.detach(), as else its graph is kept",
    )


def keeps_memory(trace: Trace) -> bool:
    """Whether the captured steps left more memory held than they found, gradients not counted.

    What a first step makes once, such as a table of positions, counts too; in `growth_notes` of two steps it
    does not.
    """
    held, _ = _held_between_steps(trace)
    return held[-1] - held[0] >= _LEAST_BYTES


def _held_between_steps(trace: Trace) -> tuple[list[int], set[int]]:
    """Bytes held before each step and, but for a job's own loop, after the last; storages that the last added.

    A loop's variables are freed when it ends, so that what is held then shows nothing.
    """
    live: set[int] = set()
    held: list[int] = []
    before: set[int] = set()
    events = iter(trace.events)
    event = next(events, None)
    for end in _first_ops(trace):
        before = live.copy()
        while event is not None and event.op < end:
            if event.kind is EventKind.FREE:
                live.discard(event.storage)
            elif _may_grow(trace.storages[event.storage]):
                live.add(event.storage)
            event = next(events, None)
        held.append(sum(trace.storages[storage].size_bytes for storage in live))
    return held, live - before


def _may_grow(storage: Storage) -> bool:
    """Whether each step may add such memory: cuBLAS makes its workspace once, and gradients are not counted."""
    return storage.category is not Category.GRADIENTS and storage.label != CUBLAS_WORKSPACE


def _first_ops(trace: Trace) -> Iterator[int]:
    """The index of the first op of each step after setup, and of the first op after the last step."""
    step = -1
    for index, op in enumerate(trace.ops):
        if op.phase is not Phase.SETUP and op.step > step:
            step = op.step
            if step < trace.captured_steps or not trace.is_own_loop:
                yield index
    if not trace.is_own_loop and step < trace.captured_steps:
        yield len(trace.ops)
