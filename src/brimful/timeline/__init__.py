"""What a trace takes of memory over time: live bytes, the caching allocator simulated, who holds the peak."""

from brimful.timeline.allocator import CachingAllocator, OutOfMemory, round_allocation
from brimful.timeline.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.timeline.capacity import (
    AllocatorWhatIf,
    compare_allocators,
    smallest_surviving_capacity_bytes,
)
from brimful.timeline.host import (
    LEAST_OFFLOADED_BYTES,
    LINK_USES,
    TO_DEVICE,
    TO_HOST,
    LinkUse,
    chosen_to_leave,
    pinned_bytes,
    pinned_host_bytes,
)
from brimful.timeline.liveness import LiveProfile, live_profile, rounding_bytes_of
from brimful.timeline.memory import (
    FailedAllocation,
    HeldStorage,
    MemoryPrediction,
    ModuleShare,
    Replay,
    least_allocated_bytes,
    most_held_bytes,
    most_reserved_bytes,
    predict_memory,
    replay_allocations,
)

__all__ = [
    "DEFAULT_ALLOCATOR",
    "LEAST_OFFLOADED_BYTES",
    "LINK_USES",
    "TO_DEVICE",
    "TO_HOST",
    "AllocatorSettings",
    "AllocatorWhatIf",
    "CachingAllocator",
    "FailedAllocation",
    "HeldStorage",
    "LinkUse",
    "LiveProfile",
    "MemoryPrediction",
    "ModuleShare",
    "OutOfMemory",
    "Replay",
    "chosen_to_leave",
    "compare_allocators",
    "least_allocated_bytes",
    "live_profile",
    "most_held_bytes",
    "most_reserved_bytes",
    "pinned_bytes",
    "pinned_host_bytes",
    "predict_memory",
    "replay_allocations",
    "round_allocation",
    "rounding_bytes_of",
    "smallest_surviving_capacity_bytes",
]
