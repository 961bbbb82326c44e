"""A device of this machine: its row of the hardware table or its properties, and what was measured of it."""

from __future__ import annotations

import torch

from brimful.devices import Device, device_with_properties, with_context
from brimful.profiling.calibrate import calibrate_cpu, with_kept_calibration
from brimful.profiling.cuda_context import best_context
from brimful.profiling.gpu_properties import read_properties


def device_record(device: torch.device) -> Device:
    """The record of a CPU or CUDA device of this machine, with what was measured of it here.

    A CPU is measured once and cached. A GPU has its row of the table, or what follows from its properties if it
    is not in the table, with its cached measurements. Raises `UsageError` if too little is known of a GPU that
    is not in the table, or it is a GPU of AMD.
    """
    return calibrate_cpu() if device.type == "cpu" else with_kept_calibration(local_gpu(device))


def local_gpu(device: torch.device) -> Device:
    """The record of a CUDA device of this machine, without its cached calibration.

    It has the best known size of the context. Raises `UsageError` as `device_record` does.
    """
    row = device_with_properties(read_properties(device))
    return with_context(row, best_context(row))


def local_gpu_named(name: str) -> torch.device | None:
    """The first GPU of this machine that the driver calls `name`; None if there is none.

    The name is one that the table does not have, as in the file of a plan.
    """
    if torch.version.hip is None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.get_device_properties(index).name == name:
                return torch.device("cuda", index)
    return None
