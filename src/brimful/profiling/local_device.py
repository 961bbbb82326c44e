"""A device of this machine: its row of the hardware table or its properties, and what was measured of it."""

from __future__ import annotations

import torch

from brimful.devices import Device, device_with_properties, with_context
from brimful.profiling.calibrate import calibrate_cpu, with_kept_calibration
from brimful.profiling.cuda_context import best_context
from brimful.profiling.gpu_properties import read_properties


def device_record(device: torch.device) -> Device:
    """What is known of a device of this machine.

    Args:
        device: A CPU, which is measured once and kept, or a CUDA device.

    Returns:
        Its row of the table, or what follows from the properties of a GPU that is not in the table, with what
        was measured of it on this machine and kept.

    Raises:
        UsageError: The GPU is not in the table and too little is known of it, or it is a GPU of AMD.
    """
    return calibrate_cpu() if device.type == "cpu" else with_kept_calibration(local_gpu(device))


def local_gpu(device: torch.device) -> Device:
    """A GPU of this machine, without its kept calibration.

    Args:
        device: A CUDA device.

    Returns:
        As `device_record`, with the best known size of its context.
    """
    row = device_with_properties(read_properties(device))
    return with_context(row, best_context(row))


def local_gpu_named(name: str) -> torch.device | None:
    """The GPU of this machine that `local_gpu` names so; None if there is none.

    Args:
        name: A GPU's name that the table does not have, as in the file of a plan.

    Returns:
        The first such device.
    """
    if torch.version.hip is None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_properties(index).name == name:
                return torch.device("cuda", index)
    return None
