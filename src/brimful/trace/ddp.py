"""Memory of a step on one rank in addition to that of a single process: DDP's gradient buckets.

FSDP2 is captured as a rank takes it; ZeRO is in `brimful.trace.zero`.

DDP averages gradients in buckets that it makes once. Under `gradient_as_bucket_view` a gradient is a view of
its bucket from the moment it is averaged, until the gradients are cleared; before that it has memory of its
own. So with one micro-batch each gradient is there beside its place in the bucket for a moment only, and with
several all of them are there beside the buckets, until the last micro-batch's backward pass is done.

Source: torch/csrc/distributed/c10d/reducer.cpp, mark_variable_ready_dense and initialize_buckets (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from msgspec import structs

from brimful.settings import Parallelism
from brimful.trace.records import Category, Event, EventKind, Phase, Storage, Trace
from brimful.trace.zero import of_one_zero_rank
from brimful.utils.quantities import MIB

BUCKET_BYTES = 25 * MIB
"""Bytes of gradients that DDP averages at once: DistributedDataParallel's bucket_cap_mb."""

FIRST_BUCKET_BYTES = 1 * MIB
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: small, so that averaging begins early."""

BUCKET = "DDP bucket"


def per_rank_trace(trace: Trace) -> Trace:
    """The step of one rank, from a trace whose settings divide the step among ranks.

    A trace of one rank, or one captured as a rank takes it, is returned as it is. Under DDP the buckets that
    stay are added, and gradients end in them.
    """
    if trace.settings.world_size == 1 or trace.settings.parallelism is Parallelism.FSDP2:
        return trace
    if trace.settings.parallelism.is_zero:
        return of_one_zero_rank(trace)
    gradients = {i for i, storage in enumerate(trace.storages) if storage.category is Category.GRADIENTS}
    # Each step makes new ones, and the buckets are made once; what setup makes the optimizer's state with is
    # not there beside the buckets.
    of_setup = {i for i in gradients if _is_of_setup(trace, trace.storages[i])}
    of_a_step = [
        i for i in gradients - of_setup if _step_of(trace, trace.storages[i]) == trace.captured_steps - 1
    ]
    buckets = [
        Storage(size_bytes=size, category=Category.GRADIENTS, op=None, label=f"{BUCKET} {number}")
        for number, size in enumerate(_bucket_bytes([trace.storages[i].size_bytes for i in sorted(of_a_step)]))
    ]
    first = len(trace.storages)
    made = [Event(kind=EventKind.ALLOCATE, storage=first + i, op=-1) for i in range(len(buckets))]
    return replace(
        trace,
        storages=(*(_emptied(s) if i in of_setup else s for i, s in enumerate(trace.storages)), *buckets),
        events=(*made, *_ending_in_buckets(trace, gradients - of_setup)),
    )


def _is_of_setup(trace: Trace, storage: Storage) -> bool:
    return storage.op is None or trace.ops[storage.op].phase is Phase.SETUP


def _emptied(storage: Storage) -> Storage:
    return structs.replace(storage, size_bytes=0)


def _step_of(trace: Trace, storage: Storage) -> int:
    return -1 if storage.op is None else trace.ops[storage.op].step


def _bucket_bytes(sizes: Iterable[int]) -> Iterator[int]:
    """Buckets are filled with gradients in the order in which they come, until one is over its limit."""
    limit, filled = FIRST_BUCKET_BYTES, 0
    for size in sizes:
        filled += size
        if filled >= limit:
            yield filled
            limit, filled = BUCKET_BYTES, 0
    if filled:
        yield filled


def _ending_in_buckets(trace: Trace, gradients: set[int]) -> Iterator[Event]:
    """The events, each gradient's own memory released when it is in its bucket."""
    ends = _last_backward_ops(trace) if trace.settings.gradient_accumulation_steps > 1 else {}
    waiting: list[tuple[int, int]] = []  # after which op, which gradient
    for event in trace.events:
        waiting, due = _parted(waiting, event.op)
        yield from (Event(kind=EventKind.FREE, storage=storage, op=op) for op, storage in due)
        is_gradient = event.storage in gradients
        if not (is_gradient and event.kind is EventKind.FREE):
            yield event
        if is_gradient and event.kind is EventKind.ALLOCATE:
            step = trace.ops[event.op].step if event.op >= 0 else -1
            waiting.append((ends.get(step, event.op), event.storage))
    yield from (Event(kind=EventKind.FREE, storage=storage, op=op) for op, storage in waiting)


def _parted(waiting: Sequence[tuple[int, int]], op: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Gradients that wait for a later op, and those whose op is done once `op` begins."""
    if not waiting or waiting[0][0] >= op:
        return list(waiting), []
    return [each for each in waiting if each[0] >= op], [each for each in waiting if each[0] < op]


def _last_backward_ops(trace: Trace) -> dict[int, int]:
    """The last op of backward by step."""
    return {op.step: index for index, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD}
