"""Allocations as numbers: from torch's own memory history, from a capture, to a file, through the simulator.

A history is a list of entries with "action", "addr" and "size", as in `torch.cuda.memory._snapshot()`. Here it
becomes a string of actions and a list of numbers, one each per entry:

| action | number |
|---|---|
| A allocate | requested bytes; allocations are counted from 0 |
| F free | the number of its allocation |
| S segment from the device | bytes |
| R segment given back | bytes |
| O out of memory | requested bytes |

Addresses, stacks and times are left out. Private torch APIs: `torch.cuda.memory._record_memory_history`,
`_snapshot` (read in 2.13; not run on a GPU yet).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from brimful.memory import CachingAllocator, round_allocation
from brimful.trace import EventKind, Trace

LARGEST_FILE_BYTES = 100_000
"""Small enough for a repository."""
MOST_BLOCKS_LISTED = 48

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocations:
    """A history in numbers."""

    actions: str
    values: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return zip(self.actions, self.values, strict=True)

    def first(self, count: int) -> Allocations:
        """The first `count` entries."""
        return Allocations(actions=self.actions[:count], values=self.values[:count])


def start_history() -> None:
    """Record every allocation of this process from now on, without stacks; what was recorded is dropped."""
    torch.cuda.init()  # makes the allocators that are told to record
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")


def stop_history(device: torch.device) -> list[Entry]:
    """What was recorded on `device`; recording ends."""
    torch.cuda.synchronize(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    entries: list[Entry] = torch.cuda.memory._snapshot()["device_traces"][index]
    torch.cuda.memory._record_memory_history(enabled=None)
    return entries


def captured_history(trace: Trace) -> list[Entry]:
    """The history that the simulated allocator would record of a capture."""
    allocator = CachingAllocator()
    entries: list[Entry] = []
    reserved = 0
    for event in trace.events:
        size = trace.storages[event.storage].size_bytes
        if event.kind is EventKind.FREE:
            allocator.free(event.storage)
            entries.append({"action": "free_completed", "addr": event.storage, "size": size})
            continue
        allocator.allocate(event.storage, size)
        if allocator.reserved_bytes > reserved:
            grown = allocator.reserved_bytes - reserved
            entries.append({"action": "segment_alloc", "addr": -len(entries), "size": grown})
            reserved = allocator.reserved_bytes
        if size:
            entries.append({"action": "alloc", "addr": event.storage, "size": size})
    return entries


def in_numbers(entries: list[Entry]) -> Allocations:
    """A history without addresses. What was allocated before it began is left out when it is freed."""
    actions: list[str] = []
    values: list[int] = []
    live: dict[int, int] = {}
    allocated = 0
    others = {"segment_alloc": "S", "segment_free": "R", "oom": "O"}
    for entry in entries:
        action = entry["action"]
        if action == "alloc":
            live[entry["addr"]] = allocated
            allocated += 1
            actions.append("A")
            values.append(entry["size"])
        elif action == "free_completed" and entry["addr"] in live:
            actions.append("F")
            values.append(live.pop(entry["addr"]))
        elif action in others:
            actions.append(others[action])
            values.append(entry["size"])
    return Allocations(actions="".join(actions), values=tuple(values))


def replay(allocations: Allocations) -> dict[str, Any]:
    """Recorded segments beside those of `brimful.memory.CachingAllocator` given the same requests.

    Args:
        allocations: From the first allocation of a process on.

    Returns:
        Peak of reserved bytes and segments held at the end, measured and replayed, and the first entry at which
        the two hold different amounts; None where they never do.
    """
    allocator = CachingAllocator()
    reserved = peak = segments = count = 0
    parted_at = None
    for position, (action, value) in enumerate(allocations):
        if action == "A":
            allocator.allocate(count, value)
            count += 1
            if parted_at is None and allocator.reserved_bytes != reserved:
                parted_at = position
        elif action == "F":
            allocator.free(value)
        elif action == "S":
            reserved, segments = reserved + value, segments + 1
            peak = max(peak, reserved)
        elif action == "R":
            reserved, segments = reserved - value, segments - 1
    return {
        "measured_peak_reserved_bytes": peak,
        "replayed_peak_reserved_bytes": allocator.peak_reserved_bytes,
        "measured_segments": segments,
        "replayed_segments": allocator.segment_count,
        "parted_at": parted_at,
    }


def write(path: Path, allocations: Allocations, about: dict[str, Any]) -> None:
    """Write a history as gzipped JSON of at most `LARGEST_FILE_BYTES`, cut at its end where it is longer."""
    kept, raw = len(allocations), b""
    while kept:
        part = allocations.first(kept)
        document = {
            "brimful_allocations": 1,
            **about,
            "entries_recorded": len(allocations),
            "entries_kept": kept,
            "actions": part.actions,
            "values": part.values,
        }
        raw = gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)
        if len(raw) <= LARGEST_FILE_BYTES:
            break
        kept = kept * 9 // 10
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def read(path: Path) -> tuple[Allocations, dict[str, Any]]:
    """The history that `write` wrote, and all else in its file."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    actions, values = document.pop("actions"), tuple(document.pop("values"))
    return Allocations(actions=actions, values=values), document


def parts_between(allocations: Allocations, marker_bytes: int) -> list[dict[str, Any]]:
    """What happened between marks, a mark being an allocation of `marker_bytes`, freed at once.

    Args:
        allocations: Of one thread.
        marker_bytes: A size that nothing else has.

    Returns:
        For each stretch between two marks: `peak_bytes`, the most held above its start; `kept_bytes`, what is
        held more at its end; `temporary_bytes`, the most held at one time in blocks both made and freed in it;
        `blocks`, the sizes asked for in it, in order, negative for those freed in it. All other figures are
        sums of sizes rounded to 512 bytes.
    """
    sizes = [value for action, value in allocations if action == "A"]
    marks = [number for number, size in enumerate(sizes) if size == marker_bytes]
    freed_at: dict[int, int] = {}
    made_at: list[int] = []
    for position, (action, value) in enumerate(allocations):
        if action == "A":
            made_at.append(position)
        elif action == "F":
            freed_at[value] = position
    entries = list(allocations)
    parts = []
    for mark, next_mark in pairwise(marks):
        start, stop = freed_at.get(mark, made_at[mark]) + 1, made_at[next_mark]
        parts.append(_part(entries, start, stop, mark + 1, sizes, freed_at))
    return parts


def _part(
    entries: list[tuple[str, int]],
    start: int,
    stop: int,
    number: int,
    sizes: list[int],
    freed_at: dict[int, int],
) -> dict[str, Any]:
    """One stretch, from `start` up to `stop`, whose first allocation has `number`."""
    first = number
    level = peak = inside = most_inside = 0
    blocks = []
    for action, value in entries[start:stop]:
        if action == "A":
            rounded = round_allocation(value)
            passes = freed_at.get(number, stop) < stop
            level += rounded
            inside += rounded if passes else 0
            blocks.append(-value if passes else value)
            number += 1
        elif action == "F":
            rounded = round_allocation(sizes[value])
            level -= rounded
            inside -= rounded if value >= first else 0
        peak, most_inside = max(peak, level), max(most_inside, inside)
    return {
        "peak_bytes": peak,
        "kept_bytes": level,
        "temporary_bytes": most_inside,
        "blocks": blocks[:MOST_BLOCKS_LISTED],
        "blocks_made": len(blocks),
    }
