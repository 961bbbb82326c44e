"""The smallest device a trace runs on, and what other settings of the allocator would change about it."""

from __future__ import annotations

from dataclasses import dataclass

from brimful.memory.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.memory.attribution import replay_allocations
from brimful.memory.liveness import live_profile, rounding_bytes_of
from brimful.memory.pools import SEGMENT_ROUNDING_BYTES
from brimful.trace import Trace
from brimful.utils.quantities import MIB, round_up

ALTERNATIVES = (
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(max_split_size_bytes=128 * MIB),
    AllocatorSettings(max_split_size_bytes=512 * MIB),
    AllocatorSettings(roundup_power2_divisions=4),
)
"""Settings to try on any trace, each alone. The numbers are examples, not tuned."""
COLLECTING = AllocatorSettings(garbage_collection_threshold=0.8)
"""Settings to try where the capacity is known; 0.8 is the example in PyTorch's notes on CUDA."""
_RESOLUTION = 1024
"""The smallest capacity is found to one part in this many: finer than any estimate, in ten replays at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorWhatIf:
    """Reserved memory of a trace under some allocator settings."""

    settings: AllocatorSettings
    peak_reserved_bytes: int
    """Peak bytes in segments: within the capacity if the steps fit, else without a limit."""
    smallest_surviving_capacity_bytes: int
    """The smallest capacity at which the steps complete, see `smallest_surviving_capacity_bytes`."""
    cache_flushes: int
    """Number of times the whole cache must be released to fit the capacity; 0 if the steps do not fit."""
    fits: bool
    """Whether the steps complete within the capacity; True without one."""


def compare_allocators(trace: Trace, capacity_bytes: int | None = None) -> tuple[AllocatorWhatIf, ...]:
    """Predict reserved memory of a trace under PyTorch's defaults and under other allocator settings.

    The defaults come first, then `ALTERNATIVES`, then `COLLECTING` if there is a capacity, without which it
    does nothing. The result is empty for a CPU, which caches nothing. `capacity_bytes` is what the allocator
    can reserve; None is without limit.

    Each is replayed once or twice for the peak and some ten times for the smallest capacity, sixty times in
    all. Raises `UnknownNameError` if the trace's kind of device is unknown.
    """
    rounding_bytes_of(trace.device_kind)
    if trace.device_kind != "cuda":
        return ()
    collecting = () if capacity_bytes is None else (COLLECTING,)
    candidates = (DEFAULT_ALLOCATOR, *ALTERNATIVES, *collecting)
    return tuple(_what_if(trace, settings, capacity_bytes) for settings in candidates)


def smallest_surviving_capacity_bytes(
    trace: Trace,
    *,
    allocator: AllocatorSettings | None = None,
    unlimited_peak_reserved_bytes: int | None = None,
) -> int | None:
    """The smallest capacity at which a trace still runs, below its peak reserved bytes by what flushing saves.

    It is a multiple of 2 MiB, as segments are; None for a CPU, which caches nothing. It is found by bisection
    over up to ten replays, so it takes that much longer than `predict_memory`. A larger capacity need not be
    survived too, as flushing changes where blocks lie. This one is, and one smaller by a thousandth, or by 2
    MiB if that is more, is not.

    `allocator` has the CUDA allocator's settings; None takes those of the trace's own settings.
    `unlimited_peak_reserved_bytes` is what the trace reserves without limit, if that is known already. Raises
    `UnknownNameError` if the trace's kind of device is unknown.
    """
    rounding_bytes_of(trace.device_kind)
    if trace.device_kind != "cuda":
        return None
    allocator = allocator or AllocatorSettings.of(trace.settings)
    if unlimited_peak_reserved_bytes is None:
        unlimited_peak_reserved_bytes = replay_allocations(trace, allocator=allocator).peak_reserved_bytes
    return _smallest_surviving_capacity(trace, allocator, unlimited_peak_reserved_bytes)


def _what_if(trace: Trace, settings: AllocatorSettings, capacity_bytes: int | None) -> AllocatorWhatIf:
    unlimited = replay_allocations(trace, allocator=settings)
    limited = unlimited
    if capacity_bytes is not None:
        limited = replay_allocations(trace, allocator=settings, capacity_bytes=capacity_bytes)
    fits = limited.out_of_memory_at is None
    finished = limited if fits else unlimited
    return AllocatorWhatIf(
        settings=settings,
        peak_reserved_bytes=finished.peak_reserved_bytes,
        smallest_surviving_capacity_bytes=_smallest_surviving_capacity(
            trace, settings, unlimited.peak_reserved_bytes
        ),
        cache_flushes=finished.cache_flushes,
        fits=fits,
    )


def _smallest_surviving_capacity(
    trace: Trace, settings: AllocatorSettings, unlimited_peak_reserved_bytes: int
) -> int:
    """Bisection between what is live, which never is enough less a byte, and a capacity that is enough."""
    page_bytes = SEGMENT_ROUNDING_BYTES
    live_bytes = live_profile(trace, rounding_bytes_of(trace.device_kind)).peak_bytes
    too_few_pages = (live_bytes - 1) // page_bytes
    enough_pages = _enough_bytes(trace, settings, unlimited_peak_reserved_bytes) // page_bytes
    while enough_pages - too_few_pages > max(enough_pages // _RESOLUTION, 1):
        pages = (too_few_pages + enough_pages) // 2
        if _survives(trace, settings, pages * page_bytes):
            enough_pages = pages
        else:
            too_few_pages = pages
    return enough_pages * page_bytes


def _enough_bytes(trace: Trace, settings: AllocatorSettings, unlimited_peak_reserved_bytes: int) -> int:
    """A capacity that surely is enough, a multiple of 2 MiB.

    What is reserved without limit is one, unless segments given back early leave the blocks worse placed. Then
    it is the capacity whose threshold that is: there, nothing is given back early.
    """
    threshold = settings.garbage_collection_threshold
    if threshold is None or _survives(trace, settings, unlimited_peak_reserved_bytes):
        return unlimited_peak_reserved_bytes
    return round_up(int(unlimited_peak_reserved_bytes / threshold) + 1, SEGMENT_ROUNDING_BYTES)


def _survives(trace: Trace, settings: AllocatorSettings, capacity_bytes: int) -> bool:
    replay = replay_allocations(trace, allocator=settings, capacity_bytes=capacity_bytes)
    return replay.out_of_memory_at is None
