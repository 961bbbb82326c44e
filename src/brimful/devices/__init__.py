"""A device's name → a `Device`: memory, bandwidth, FLOP/s, CUDA context. Start reading at `table.find_device`.

`device` has the record; `table` finds one by name (`data/gpus.csv`); `contexts` has the CUDA context's memory
(`data/contexts.csv`); `rate_curves` holds measured rates by size; `this_machine` describes this machine's CPU.
`profiling` replaces table values by measured ones.
"""

from brimful.devices.contexts import cuda_context, with_context
from brimful.devices.device import MEASURED_BUSY, CudaContext, Device, Dispatch
from brimful.devices.rate_curves import RateCurve
from brimful.devices.table import find_device, known_devices
from brimful.devices.this_machine import memory_limits_bytes

__all__ = [
    "MEASURED_BUSY",
    "CudaContext",
    "Device",
    "Dispatch",
    "RateCurve",
    "cuda_context",
    "find_device",
    "known_devices",
    "memory_limits_bytes",
    "with_context",
]
