"""Memory over a step as files of other viewers: pytorch.org/memory_viz and ui.perfetto.dev.

A trace has an order and no times, so time is the number of the event: one microsecond each.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from brimful.memory import Moment
from brimful.trace import Category, EventKind, Op, Storage, Trace
from brimful.trace.modules import shown_module

_ALIGNED_BYTES = 512
"""Addresses are multiples of it, as the CUDA caching allocator's are; any would do."""


def memory_viz_snapshot(trace: Trace) -> bytes:
    """The allocations of a trace as the pickle of a memory snapshot, of plain dicts and lists.

    It has the keys that torch 2.13 writes for a profile (torch/cuda/_memory_viz.py, `_profile_to_snapshot`).
    Each block has an address of its own; its frames are the line of code, the op and the module that made it.
    """
    entries: list[dict[str, Any]] = []
    live: dict[int, dict[str, Any]] = {}
    address = _ALIGNED_BYTES
    for time, event in enumerate(trace.events):
        if event.kind is EventKind.ALLOCATE:
            storage = trace.storages[event.storage]
            op = None if event.op < 0 else trace.ops[event.op]
            block = {"addr": address, "size": storage.size_bytes, "stream": 0, "frames": _frames(storage, op)}
            block["category"] = str(storage.category)
            live[event.storage] = block
            entries.append({"action": "alloc", **block, "time_us": time})
            address += -(-max(storage.size_bytes, 1) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        else:
            block = live.pop(event.storage)
            entries += (
                {"action": each, **block, "time_us": time} for each in ("free_requested", "free_completed")
            )
    end = {"addr": 0, "size": 0, "stream": 0, "frames": [], "category": "unknown", "time_us": len(entries)}
    entries.append(
        {"action": "snapshot", **end}
    )  # the viewer fails where there are categories and not this one
    document = {"device_traces": [entries], "segments": [], "allocator_settings": {}}
    return pickle.dumps(document, protocol=4)  # the latest that the viewer reads


def _frames(storage: Storage, op: Op | None) -> list[dict[str, Any]]:
    """What made a block, innermost first."""
    frames = [{"name": f"{storage.category}: {storage.label}", "filename": "", "line": 0}]
    if op is not None:
        file, _, line = op.line.rpartition(":")
        frames.append({"name": op.name, "filename": file, "line": int(line) if line.isdecimal() else 0})
        frames.append({"name": f"{op.phase}: {shown_module(op.module)}", "filename": "", "line": 0})
    return frames


def perfetto_document(timeline: Sequence[Moment]) -> dict[str, Any]:
    """Moments as events in the JSON of Chrome's tracing: a counter by category, a slice for each phase."""
    process = {"pid": 1, "tid": 1}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", **process, "args": {"name": "memory in tensors, by event"}},
        {"name": "thread_name", "ph": "M", **process, "args": {"name": "phases"}},
    ]
    for moment in timeline:
        held = {str(category): size for category, size in zip(Category, moment.held_bytes, strict=True)}
        counter = {"name": "bytes", "ph": "C", **process, "ts": moment.position}
        events.append({**counter, "args": held})
    for (step, phase), group in groupby(timeline, key=lambda each: (each.step, each.phase)):
        moments = list(group)
        start, end = moments[0].position, moments[-1].position + 1
        arguments = {"step": step + 1, "peak_bytes": max(each.allocated_bytes for each in moments)}
        shown = {"name": str(phase), "ph": "X", **process, "ts": start, "dur": end - start}
        events.append({**shown, "args": arguments})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
