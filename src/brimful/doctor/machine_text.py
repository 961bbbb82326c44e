"""This machine, for a reader and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from brimful.doctor.machine import Machine, MachineGpu
from brimful.profiling.nvml import Holder
from brimful.report.layout import Listing, Part, Remark, Report, Row, as_text
from brimful.utils.quantities import format_bytes, format_seconds


def machine_text(machine: Machine) -> str:
    """GPUs, who holds their memory, and what is odd."""
    return as_text(Report(heading="this machine", parts=tuple(_parts(machine))))


def machine_document(machine: Machine) -> dict[str, Any]:
    """GPUs, who holds their memory, and what is odd, as JSON."""
    document = asdict(machine)
    for holder in (each for gpu in document["gpus"] for each in gpu["holders"]):
        del holder["process"]  # its command begins with it
    return document


def holder_text(holder: Holder) -> str:
    """A process, as "pid 4711, user anna, for 2 h 05 min: python train.py"."""
    known = [f"pid {holder.pid}"]
    if holder.user is not None:
        known.append(f"user {holder.user}")
    if holder.age_seconds is not None:
        known.append(f"for {format_seconds(holder.age_seconds)}")
    return f"{', '.join(known)}: {holder.command or 'not seen from here, as of another container'}"


def _parts(machine: Machine) -> Iterator[Part]:
    cuda = machine.driver_cuda
    runs = "" if cuda is None else f", CUDA up to {cuda[0]}.{cuda[1]}"
    yield Row("driver", f"{machine.driver}{runs}" if machine.driver else "no NVIDIA driver is found")
    built = "not for CUDA" if machine.torch_cuda is None else f"for CUDA {machine.torch_cuda}"
    yield Row("torch", f"{machine.torch}, built {built}")
    limit = machine.memory_limit_bytes
    limited = "" if limit is None else f", of which a control group permits {format_bytes(limit)}"
    free, whole = format_bytes(machine.memory_available_bytes), format_bytes(machine.memory_bytes)
    yield Row("host", f"{free} of {whole} free{limited}; {machine.cores} cores")
    for name, value in machine.settings.items():
        yield Row("environment", f"{name}={value}")
    if not machine.gpus:
        yield Row("GPUs", "none")
    for gpu in machine.gpus:
        free = "the driver does not report its memory"
        if gpu.free_bytes is not None and gpu.total_bytes is not None:
            free = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        title = f"GPU {gpu.index}, {gpu.name}: {free}"
        yield Listing(title=title, line="    {:>9}  {}", rows=tuple(_rows(gpu)))
    for each in machine.odd:
        yield Remark("odd", each)


def _rows(gpu: MachineGpu) -> Iterator[tuple[str, str]]:
    for holder in gpu.holders:
        yield "?" if holder.held_bytes is None else format_bytes(holder.held_bytes), holder_text(holder)
        if holder.is_own:
            yield "", f"→ brimful doctor machine --kill {holder.pid}   (asks first, then as kill {holder.pid})"
    if gpu.unlisted_bytes:
        yield format_bytes(gpu.unlisted_bytes), "not listed by the driver: other containers, a desktop, itself"
