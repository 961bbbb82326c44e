"""The row of the hardware table of a device in this machine, with what was measured of it."""

from __future__ import annotations

import torch

from brimful.devices import Device, find_device, with_context
from brimful.profiling.calibrate import calibrate_cpu, with_kept_calibration
from brimful.profiling.cuda_context import best_context


def device_record(device: torch.device) -> Device:
    """What is known of a device of this machine.

    Args:
        device: A CPU, which is measured once and kept, or a CUDA device.

    Returns:
        Its row of the table, with what was measured of it on this machine and kept.

    Raises:
        UnknownNameError: The GPU is not in the table.
    """
    if device.type == "cpu":
        return calibrate_cpu()
    properties = torch.cuda.get_device_properties(device)
    row = find_device(properties.name, capacity_bytes=properties.total_memory)
    return with_kept_calibration(with_context(row, best_context(row)))
