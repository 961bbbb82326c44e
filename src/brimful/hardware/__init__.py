"""What devices can do: from a name to a `Device`. Start reading at `table.find_device`.

`device.py` has the record; `table.py` finds one by name (`data/gpus.csv`); `contexts.py` says what a context
takes (`data/contexts.csv`); `this_machine.py` has this machine's CPU. `measuring` replaces defaults.
"""

from brimful.hardware.contexts import cuda_context, with_context
from brimful.hardware.device import MEASURED_BUSY, CudaContext, Device, Dispatch
from brimful.hardware.table import find_device, known_devices
from brimful.hardware.this_machine import memory_limits_bytes

__all__ = [
    "MEASURED_BUSY",
    "CudaContext",
    "Device",
    "Dispatch",
    "cuda_context",
    "find_device",
    "known_devices",
    "memory_limits_bytes",
    "with_context",
]
