"""A name → its device, with measurements made on this machine; and the function that measures."""

from __future__ import annotations

import torch

from brimful.arguments import checks_arguments
from brimful.devices import Device, described_device, find_device, is_description, with_context
from brimful.errors import UnknownNameError, UsageError
from brimful.execution.random_state import undisturbed
from brimful.execution.setup import choose_device, is_of_this_machine
from brimful.profiling.calibrate import (
    THOROUGH_SWEEPS,
    calibrate_cpu,
    calibrate_gpu,
    with_kept_calibration,
)
from brimful.profiling.cuda_context import best_context, measure_context
from brimful.profiling.local_device import device_record, local_gpu, local_gpu_named
from brimful.profiling.rates import Progress

DeviceLike = str | int | torch.device | Device
"""A device, or its name; see `resolve_device`."""


def resolve_device(device: DeviceLike) -> Device:
    """Find a device.

    Args:
        device: A name from the hardware table ("RTX 3090"), a `Device`, a description of a GPU
            ("name=…,memory=8GiB,bandwidth=300GB,tflops=9", see `devices.described_device`), or a device of this
            machine as in torch: "cpu", which is measured once and cached, "cuda", "cuda:1", a `torch.device`,
            the index of a GPU, or "auto" for the GPU if there is one, else the CPU.

    Returns:
        The device, with the cached measurements of this machine.

    Raises:
        UnknownNameError: The table has no such device, and it is not a GPU of this machine.
        UsageError: This machine does not have the device, a description is wrong, or too little is known of a
            GPU of this machine that the table does not have.
    """
    if isinstance(device, Device):
        return device
    if is_of_this_machine(device):
        return device_record(choose_device(device, None))
    if not isinstance(device, str):
        raise UsageError(
            f'the device is {device!r} ({type(device).__name__}). Name one, such as "RTX 3090", "cuda:0" or '
            '"cpu", or give a torch.device or a brimful.devices.Device.'
        )
    if is_description(device):
        return with_best_context(described_device(device))
    try:
        named = find_device(device)
    except UnknownNameError:
        here = local_gpu_named(device)
        if here is None:
            raise
        return device_record(here)
    return with_kept_calibration(with_best_context(named))


def with_best_context(device: Device) -> Device:
    """The device with the cached measurement of its CUDA context, or else the published figures."""
    return with_context(device, best_context(device))


@undisturbed()
@checks_arguments
def calibrate(*, remeasure: bool = False, progress: Progress | None = None) -> tuple[Device, ...]:
    """Measure this machine, for better predictions of time: its CPU and, if torch can use one, its GPU.

    It measures matmuls by type and size, convolutions, attention, memory bandwidth by size and kind of work,
    launches, and the overhead of Python and autograd per op and per recomputed region; on a GPU also the link
    to the host and the memory of the CUDA context. The results are cached in the user's cache directory. From
    then on predictions for "cpu", and for that GPU by any name, use them.

    Args:
        remeasure: Measure even what is cached.
        progress: Called with the name of each measurement before it starts.

    Returns:
        The measured devices, the CPU first.
    """
    cpu = calibrate_cpu(remeasure=remeasure, sweeps=THOROUGH_SWEEPS, progress=progress)
    if not torch.cuda.is_available():
        return (cpu,)
    where = torch.device("cuda", torch.cuda.current_device())
    row = local_gpu(where)
    if remeasure or not best_context(row).is_measured:
        if progress is not None:
            progress("CUDA context")
        measure_context(where)
    return cpu, calibrate_gpu(with_best_context(row), where, remeasure=remeasure, progress=progress)
