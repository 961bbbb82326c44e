"""A trace that was read from a file → what is wrong with it: its indices, its order, its units.

The types of fields are checked by `file_format` before.
"""

from __future__ import annotations

from itertools import accumulate

from brimful.settings import Span
from brimful.trace.records import EventKind, Phase, Trace
from brimful.utils.quantities import format_bytes

_MOST_BYTES = 1 << 62
"""Most bytes of all storages together: beyond any device, and rounded up they still fit 64 bits."""


def find_inconsistency(trace: Trace) -> str | None:
    """The first field that does not fit the others, and why; None if all fit."""
    return _wrong_op(trace) or _wrong_storage(trace) or _wrong_event(trace) or _wrong_unit(trace)


def _wrong_op(trace: Trace) -> str | None:
    """What is wrong with an op in its place; None if nothing is."""
    step = 0
    for number, op in enumerate(trace.ops):
        last_step = trace.captured_steps - (op.phase is not Phase.EVALUATION)
        if not step <= op.step <= last_step:
            return f"field `ops.rows[{number}].step`: expected {step} to {last_step}, got {op.step}"
        if op.micro_batch >= trace.captured_micro_batches:
            most = trace.captured_micro_batches - 1
            return f"field `ops.rows[{number}].micro_batch`: expected at most {most}, got {op.micro_batch}"
        if op.made_ops_ago > number:
            return f"field `ops.rows[{number}].made_ops_ago`: expected at most {number}, got {op.made_ops_ago}"
        step = op.step
    return None


def _wrong_storage(trace: Trace) -> str | None:
    for number, storage in enumerate(trace.storages):
        if storage.op is not None and storage.op >= len(trace.ops):
            return f"field `storages.rows[{number}].op`: expected less than {len(trace.ops)}, got {storage.op}"
        if storage.kernel is not None and not storage.kernel.is_known:
            return f"field `storages.rows[{number}].kernel`: its name or its numbers are unknown"
    for number, index in enumerate(trace.global_batch):
        if index >= len(trace.storages):
            return f"field `global_batch[{number}]`: expected less than {len(trace.storages)}, got {index}"
    if sum(max(storage.size_bytes, storage.most_bytes or 0) for storage in trace.storages) > _MOST_BYTES:
        return f"field `storages`: they have more than {format_bytes(_MOST_BYTES)} together"
    return None


def _wrong_event(trace: Trace) -> str | None:
    live: set[int] = set()
    allocated: set[int] = set()
    op_count, storage_count, latest = len(trace.ops), len(trace.storages), -1
    for number, event in enumerate(trace.events):
        storage = event.storage
        if not latest <= event.op < op_count:
            return f"field `events.rows[{number}].op`: expected {latest} to {op_count - 1}, got {event.op}"
        if storage >= storage_count:
            return f"field `events.rows[{number}].storage`: expected less than {storage_count}, got {storage}"
        if event.kind is EventKind.FREE:
            if storage not in live:
                return f"field `events.rows[{number}]`: storage {storage} is freed, and is not allocated then"
            live.remove(storage)
        elif storage in allocated:
            return f"field `events.rows[{number}]`: storage {storage} is allocated a second time"
        else:
            live.add(storage)
            allocated.add(storage)
        latest = event.op
    return None


def _wrong_unit(trace: Trace) -> str | None:
    """A run of modules that are not siblings, or that did not run, cannot be a unit of this trace."""
    spans = {number: Span.parse(unit.fqn) for number, unit in enumerate(trace.settings.units)}
    if not any(spans.values()):
        return None
    known = {path for fqn, _ in trace.module_classes for path in accumulate(fqn.split("."), "{}.{}".format)}
    for number, span in spans.items():
        for child in () if span is None else (span.first, span.last):
            assert span is not None
            if "." in child or f"{span.parent}.{child}".removeprefix(".") not in known:
                return f"field `settings.units[{number}].fqn`: no module of the trace is called {child!r} there"
    return None
