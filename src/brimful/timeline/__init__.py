"""What a trace takes of memory over time: live bytes, the caching allocator simulated, who holds the peak."""

from brimful.timeline.allocator import (
    DEFAULT_ALLOCATOR,
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    round_allocation,
)
from brimful.timeline.liveness import LiveProfile, live_profile, rounding_bytes_of
from brimful.timeline.memory import (
    FailedAllocation,
    HeldStorage,
    MemoryPrediction,
    Replay,
    predict_memory,
    replay_allocations,
    smallest_surviving_capacity_bytes,
)

__all__ = [
    "DEFAULT_ALLOCATOR",
    "AllocatorSettings",
    "CachingAllocator",
    "FailedAllocation",
    "HeldStorage",
    "LiveProfile",
    "MemoryPrediction",
    "OutOfMemory",
    "Replay",
    "live_profile",
    "predict_memory",
    "replay_allocations",
    "round_allocation",
    "rounding_bytes_of",
    "smallest_surviving_capacity_bytes",
]
