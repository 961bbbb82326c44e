"""Peaks of text generation, from a trace of its first forwards: later ones repeat the last with more tokens.

A cache that grows by concatenation leaves gaps of all sizes in the caching allocator. So every forward is
played, and none is summed up by a factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from brimful.memory.allocator import CachingAllocator
from brimful.memory.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.trace import Event, EventKind, Trace

CAPTURED_FORWARDS = 5
"""Forwards that show how one differs from the next: the prefill, the first on its results, and three alike."""


_UNLIMITED = 1 << 62


class ForwardPeak(NamedTuple):
    """The most bytes live in one forward and what selects its token."""

    allocated_bytes: int
    op: int
    """Index in the trace of the latest op at that moment; -1 before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReplay:
    """The allocations of a generation, played on one device."""

    peaks: tuple[ForwardPeak, ...]
    """One for each forward; fewer if memory runs out."""
    peak_reserved_bytes: int
    """Peak bytes in segments; equal to allocated on a CPU, which caches nothing."""
    cache_flushes: int
    is_out_of_memory: bool
    """Whether a request failed at the capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowingForwards:
    """The forwards of a generation, in which each adds one token to a cache."""

    trace: Trace
    """The first forwards, counted by the `step` of its ops. Further ones run the events of its last, and each
    storage grows by what it grew by there."""
    cache_bytes: tuple[int, ...]
    """The key/value cache after each forward in the trace."""
    end: GrowingForwards | None = None
    """The last forwards, after a longer prompt, where some storages stop growing before, as in a sliding
    window; None where all grow to the end."""

    def cache_bytes_after(self, forward: int) -> int:
        """The key/value cache after a forward, which counts from 0."""
        sizes = self.cache_bytes
        if forward < len(sizes):
            return sizes[forward]
        grown = sizes[-1] + (forward + 1 - len(sizes)) * (sizes[-1] - sizes[-2])
        return grown if self.end is None else min(grown, self.end.cache_bytes[-1])

    @property
    def is_steady(self) -> bool:
        """Whether the last three forwards run alike, and grow by the same bytes from one to the next."""
        if self.trace.captured_steps < CAPTURED_FORWARDS:
            return False
        events, made = self._events(), self._made()
        alike = [_template(events[at], made[at], made[at - 1]) for at in (-3, -2, -1)]
        if self.end is not None:
            alike.append(_template(self.end._events()[-1], *reversed(self.end._made()[-2:])))
        if None in alike or any(each != alike[0] for each in alike):
            return False
        sizes = zip(*(self._sizes(made[at]) for at in (-3, -2, -1)), strict=True)
        return all(after - at == at - before for before, at, after in sizes)

    def play(
        self,
        forwards: int,
        device_kind: str,
        *,
        allocator: AllocatorSettings = DEFAULT_ALLOCATOR,
        capacity_bytes: int | None = None,
    ) -> GenerationReplay:
        """Play the events of a number of forwards, until the first request that fails.

        `capacity_bytes` is what the allocator can reserve; None is without limit.
        """
        memory = (
            CachingAllocator(allocator, capacity_bytes) if device_kind == "cuda" else _Uncached(capacity_bytes)
        )
        peaks: list[ForwardPeak] = []
        is_full = False
        for events in self._all_events(forwards):
            peak = ForwardPeak(memory.allocated_bytes, -1)
            for storage, size_bytes, op in events:
                if size_bytes is None:
                    memory.free(storage)
                elif memory.allocate(storage, size_bytes) is not None:
                    is_full = True
                    break
                elif memory.allocated_bytes > peak.allocated_bytes:
                    peak = ForwardPeak(memory.allocated_bytes, op)
            peaks.append(peak)
            if is_full:
                break
        return GenerationReplay(
            peaks=tuple(peaks),
            peak_reserved_bytes=memory.peak_reserved_bytes,
            cache_flushes=memory.cache_flushes,
            is_out_of_memory=is_full,
        )

    def _all_events(self, forwards: int) -> Iterator[Iterator[tuple[int, int | None, int]]]:
        """For each forward its events: the storage, its bytes or None where it is freed, the latest op."""
        storages, captured = self.trace.storages, self.trace.captured_steps
        events, made = self._events(), self._made()
        for each in events[:forwards]:
            yield (
                (e.storage, None if e.kind is EventKind.FREE else storages[e.storage].size_bytes, e.op)
                for e in each
            )
        if forwards <= captured:
            return
        template = _template(events[-1], made[-1], made[-2])
        assert template is not None, "the last forward frees what it or the one before made"
        earlier, latest = self._sizes(made[-2]), self._sizes(made[-1])
        most = [_UNLIMITED] * len(latest) if self.end is None else self.end._sizes(self.end._made()[-1])
        now = made[-1]
        for number in range(1, forwards - captured + 1):
            first = len(storages) + (number - 1) * len(latest)
            before, now = now, list(range(first, first + len(latest)))
            sizes = [
                min(b + number * (b - a), limit) for a, b, limit in zip(earlier, latest, most, strict=True)
            ]
            yield (
                ((before if is_older else now)[index], None if frees else sizes[index], event.op)
                for (frees, is_older, index), event in zip(template, events[-1], strict=True)
            )

    def _events(self) -> list[list[Event]]:
        """The events of each forward in the trace; the first has those before it too."""
        events: list[list[Event]] = [[] for _ in range(self.trace.captured_steps)]
        for event in self.trace.events:
            events[self.trace.ops[event.op].step if event.op >= 0 else 0].append(event)
        return events

    def _made(self) -> list[list[int]]:
        """The storages that each forward in the trace makes, in order."""
        return [[e.storage for e in events if e.kind is EventKind.ALLOCATE] for events in self._events()]

    def _sizes(self, storages: list[int]) -> list[int]:
        return [self.trace.storages[storage].size_bytes for storage in storages]


def _template(
    events: list[Event], made: list[int], made_before: list[int]
) -> list[tuple[bool, bool, int]] | None:
    """The events of a forward: whether each frees, and which storage of the forward before or of this one.

    None if it frees what was made earlier.
    """
    numbers = {storage: (True, index) for index, storage in enumerate(made_before)}
    numbers |= {storage: (False, index) for index, storage in enumerate(made)}
    if any(event.storage not in numbers for event in events):
        return None
    return [(event.kind is EventKind.FREE, *numbers[event.storage]) for event in events]


class _Uncached:
    """Memory of a CPU, where each block is released at once and has the bytes that were asked for."""

    cache_flushes = 0

    def __init__(self, capacity_bytes: int | None) -> None:
        self.allocated_bytes = self.peak_reserved_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[int, int] = {}

    def allocate(self, key: int, size_bytes: int) -> bool | None:
        """Take memory; True if there is too little."""
        if self._capacity_bytes is not None and self.allocated_bytes + size_bytes > self._capacity_bytes:
            return True
        self._sizes[key] = size_bytes
        self.allocated_bytes += size_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.allocated_bytes)
        return None

    def free(self, key: int) -> None:
        """Release memory."""
        self.allocated_bytes -= self._sizes.pop(key)
