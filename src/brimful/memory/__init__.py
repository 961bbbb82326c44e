"""A trace → peak memory: live bytes, the CUDA caching allocator simulated, which tensors hold the peak.

It does not import torch. Start reading at `attribution.predict_memory`.

| module | input → output |
|---|---|
| `liveness` | a trace → live bytes over time |
| `allocator`, `allocator_settings`, `pools` | allocations and frees → reserved bytes, as torch does |
| `smallest_capacity` | a trace → the smallest device memory on which the step completes |
| `attribution` | a trace → peaks, split by category and module |
| `timeline` | a trace → what memory holds from moment to moment |
| `pinned_host` | a trace → pinned host memory of offloaded tensors |
"""

from brimful.memory.allocator import CachingAllocator, OutOfMemory, round_allocation
from brimful.memory.allocator_settings import DEFAULT_ALLOCATOR, AllocatorSettings
from brimful.memory.attribution import (
    FailedAllocation,
    HeldStorage,
    MemoryPrediction,
    ModuleShare,
    least_allocated_bytes,
    most_held_bytes,
    most_reserved_bytes,
    predict_memory,
    replay_allocations,
)
from brimful.memory.decoding import CAPTURED_FORWARDS, ForwardPeak, GenerationReplay, GrowingForwards
from brimful.memory.liveness import live_profile, rounding_bytes_of
from brimful.memory.pinned_host import (
    LINK_USES,
    TO_DEVICE,
    TO_HOST,
    chosen_to_leave,
    pinned_bytes,
    pinned_host_bytes,
)
from brimful.memory.smallest_capacity import (
    AllocatorWhatIf,
    compare_allocators,
    smallest_surviving_capacity_bytes,
)
from brimful.memory.timeline import Moment, memory_timeline

__all__ = [
    "CAPTURED_FORWARDS",
    "DEFAULT_ALLOCATOR",
    "LINK_USES",
    "TO_DEVICE",
    "TO_HOST",
    "AllocatorSettings",
    "AllocatorWhatIf",
    "CachingAllocator",
    "FailedAllocation",
    "ForwardPeak",
    "GenerationReplay",
    "GrowingForwards",
    "HeldStorage",
    "MemoryPrediction",
    "ModuleShare",
    "Moment",
    "OutOfMemory",
    "chosen_to_leave",
    "compare_allocators",
    "least_allocated_bytes",
    "live_profile",
    "memory_timeline",
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
