"""A device's name → a `Device`: memory, bandwidth, FLOP/s, CUDA context. Start reading at `table.find_device`.

`device` has the record; `table` finds one by name (`data/gpus.csv`); `properties` and `described` make one that
is not in the table, with `derived` and `peaks`; `contexts` has the CUDA context's memory (`data/contexts.csv`);
`torch_builds` says which torch has kernels for it; `rate_curves` holds measured rates by size; `this_machine`
describes this machine's CPU. `profiling` replaces table values by measured ones.
"""

from brimful.devices.contexts import cuda_context, with_context
from brimful.devices.described import described_device, is_description
from brimful.devices.device import MEASURED_BUSY, NATIVE_LOOP_SECONDS, CudaContext, Device, Dispatch
from brimful.devices.properties import GpuProperties, device_with_properties
from brimful.devices.rate_curves import RateCurve
from brimful.devices.table import find_device, known_devices
from brimful.devices.this_machine import memory_limits_bytes
from brimful.devices.torch_builds import cannot_run_torch, torch_builds_note

__all__ = [
    "MEASURED_BUSY",
    "NATIVE_LOOP_SECONDS",
    "CudaContext",
    "Device",
    "Dispatch",
    "GpuProperties",
    "RateCurve",
    "cannot_run_torch",
    "cuda_context",
    "described_device",
    "device_with_properties",
    "find_device",
    "is_description",
    "known_devices",
    "memory_limits_bytes",
    "torch_builds_note",
    "with_context",
]
