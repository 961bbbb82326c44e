"""Measurements of a device of this machine, cached, and applied to its row of the table.

Checked with torch 2.13 on CPUs, and with torch 2.11 on an H100.
"""

from __future__ import annotations

import platform
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta

from brimful import __version__
from brimful.codec import NonNegativeFloat, PositiveFloat, PositiveInt
from brimful.devices import MEASURED_BUSY, Device, Dispatch, RateCurve, find_device
from brimful.execution.host_allocator import keep_freed_memory
from brimful.profiling.cache import cache_directory, keep, read_kept
from brimful.profiling.dispatch import measure_dispatch
from brimful.profiling.rates import (
    Progress,
    host_update_bytes_per_second,
    link_bytes_per_second,
    measure_curves,
)

CACHE_FILE = "cpu.json"
GPU_CACHE_FILE = "gpus.json"

THOROUGH_SWEEPS = 3
"""How often `brimful calibrate` goes through all kinds. The best of the times counts: a machine has slow
seconds."""
QUICK_SWEEPS = 1
"""Number of sweeps where a prediction for "cpu" finds no cached measurement and must not take long."""
_BUSY_FRACTION = 0.1
"""A machine was busy if other work disturbed more than this fraction of all sizes. A choice."""
_BUSY_FOR_SECONDS = 3600.0
"""Age from which a measurement of a busy machine is repeated, as it may be quiet by then: a choice."""

MEASURED = "measured on this machine"

_Rate = Annotated[float, Meta(ge=1e6, le=1e18)]
"""Bytes or FLOPs per second. A choice: bfloat16 emulated on a CPU makes 1e9, a B200 1e16 at its fastest."""
_OpSeconds = Annotated[float, Meta(ge=1e-9, le=1.0)]
"""Time of the smallest op. A choice: launches took 1e-6 to 1e-5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one device; rates are achieved ones, at the largest size that was timed."""

    fp32_flops_per_second: _Rate
    fp16_flops_per_second: _Rate
    bf16_flops_per_second: _Rate
    memory_bandwidth_bytes_per_second: _Rate
    launch_seconds: _OpSeconds
    """Time of one small elementwise op."""
    to_device_bytes_per_second: _Rate | None
    """Rate from pinned memory; None on a CPU."""
    to_host_bytes_per_second: _Rate | None
    host_update_bytes_per_second: _Rate | None = None
    """Rate at which the host reads and writes memory in AdamW's update; None on a CPU, or where an earlier
    version measured."""
    dispatch: Dispatch
    curves: Annotated[tuple[RateCurve, ...], Meta(min_length=1)]
    sweeps: PositiveInt
    """How often all kinds were gone through."""
    disturbed_fraction: NonNegativeFloat
    """Fraction of the sizes of all kinds that other work on the machine never let run undisturbed."""
    measured_at_seconds: PositiveFloat
    """Since the epoch."""
    took_seconds: PositiveFloat

    @property
    def has_link_rates(self) -> bool:
        """Whether the link to the host was measured, as it is for every GPU."""
        return None not in (self.to_device_bytes_per_second, self.to_host_bytes_per_second)

    def applied_to(self, device: Device) -> Device:
        """The device with these rates; a GPU's peaks stay, as its curves come before them."""
        common = replace(
            device,
            launch_seconds=self.launch_seconds,
            dispatch=self.dispatch,
            curves=self.curves,
        )
        if device.kind == "cuda":
            assert self.to_device_bytes_per_second is not None
            assert self.to_host_bytes_per_second is not None
            slower = min(self.to_device_bytes_per_second, self.to_host_bytes_per_second)
            return replace(
                common,
                host_link_bytes_per_second=slower,
                measured_host_update_bytes_per_second=self.host_update_bytes_per_second,
                source=f"{device.source}; times {self.source}",
            )
        return replace(
            common,
            fp32_flops_per_second=self.fp32_flops_per_second,
            fp16_flops_per_second=self.fp16_flops_per_second,
            bf16_flops_per_second=self.bf16_flops_per_second,
            memory_bandwidth_bytes_per_second=self.memory_bandwidth_bytes_per_second,
            source=self.source,
            confidence="low" if self.was_busy else "medium",
        )

    @property
    def was_busy(self) -> bool:
        """Whether other work disturbed enough of the measurement to make its figures too slow."""
        return self.disturbed_fraction > _BUSY_FRACTION

    def is_poor(self, *, at_best: bool) -> bool:
        """Whether to measure again: it was made on a busy machine, and is an hour old, or `at_best` is set."""
        is_old = time.time() - self.measured_at_seconds > _BUSY_FOR_SECONDS
        return self.was_busy and (at_best or is_old)

    @property
    def source(self) -> str:
        """Source of the figures."""
        return MEASURED_BUSY if self.was_busy else MEASURED


def calibrate_cpu(
    *, remeasure: bool = False, sweeps: int = QUICK_SWEEPS, progress: Progress | None = None
) -> Device:
    """This machine's CPU: `find_device("cpu")` with measured rates.

    The measurement takes about six seconds, two more for each further sweep, and half a minute if other work
    slows it. It is cached in the user's cache directory, by CPU model, torch version and number of threads. If
    the cache cannot be read, the CPU is measured again; if it cannot be written, there is a warning.

    A cached measurement of fewer than `sweeps` sweeps over all kinds of work is repeated, and any if
    `remeasure`.
    """
    cpu = find_device("cpu")
    return _calibrated(cpu, torch.device("cpu"), remeasure=remeasure, sweeps=sweeps, progress=progress)


def calibrate_gpu(
    device: Device,
    where: torch.device,
    *,
    remeasure: bool = False,
    sweeps: int = THOROUGH_SWEEPS,
    progress: Progress | None = None,
) -> Device:
    """A GPU of this machine with measured rates, cached as `calibrate_cpu` caches those of the CPU.

    `where` is the torch device that `device` describes.
    """
    return _calibrated(device, where, remeasure=remeasure, sweeps=sweeps, progress=progress)


def with_kept_calibration(device: Device) -> Device:
    """The device with its cached measurements on this machine; unchanged if nothing is cached."""
    kept = kept_calibration(device)
    return device if kept is None else kept.applied_to(device)


def kept_calibration(device: Device) -> Calibration | None:
    """Cached measurements of a device with this version of torch; None if there are none."""
    kept = read_kept(*_CACHES[device.kind], Calibration).get(_cache_key(device))
    return kept if kept is None or device.kind == "cpu" or kept.has_link_rates else None


def measure_device(
    device: Device,
    where: torch.device,
    *,
    sweeps: int = THOROUGH_SWEEPS,
    progress: Progress | None = None,
) -> Calibration:
    """Measure all kinds of work on a torch device, then what is around them.

    `device` is the record of `where`. Times are typical ones, of runs that no other program disturbed where
    there were any.
    """
    tell = progress or (lambda _what: None)
    if where.type == "cpu":
        keep_freed_memory()  # as in the steps whose time is predicted
    start = time.perf_counter()
    curves, disturbed_fraction = measure_curves(where, sweeps=sweeps, progress=tell)
    by_kind = {curve.kind: curve for curve in curves}
    launch_seconds = by_kind["elementwise"].points[0][1]
    tell("Python and autograd")
    curved = replace(device, curves=curves, launch_seconds=launch_seconds)
    dispatch = measure_dispatch(curved, where)
    to_device = to_host = on_host = None
    if where.type == "cuda":
        tell("host link")
        to_device, to_host = link_bytes_per_second(where)
        tell("optimizer on the host")
        on_host = host_update_bytes_per_second()
    return Calibration(
        fp32_flops_per_second=_end_rate(by_kind["matmul:float32"]),
        fp16_flops_per_second=_end_rate(by_kind["matmul:float16"]),
        bf16_flops_per_second=_end_rate(by_kind["matmul:bfloat16"]),
        memory_bandwidth_bytes_per_second=_end_rate(by_kind["elementwise"]),
        launch_seconds=launch_seconds,
        to_device_bytes_per_second=to_device,
        to_host_bytes_per_second=to_host,
        host_update_bytes_per_second=on_host,
        dispatch=dispatch,
        curves=curves,
        sweeps=sweeps,
        disturbed_fraction=disturbed_fraction,
        measured_at_seconds=time.time(),
        took_seconds=time.perf_counter() - start,
    )


def cache_path(device_kind: str = "cpu") -> Path:
    """Path of the file in `cache_directory` that keeps the measurements of CPUs, or of GPUs."""
    return cache_directory() / _CACHES[device_kind][0]


_CACHES = {"cpu": (CACHE_FILE, "cpus"), "cuda": (GPU_CACHE_FILE, "gpus")}
"""File and section by kind of device."""


def _calibrated(
    device: Device, where: torch.device, *, remeasure: bool, sweeps: int, progress: Progress | None
) -> Device:
    calibration = None if remeasure else kept_calibration(device)
    is_asked_for = sweeps >= THOROUGH_SWEEPS  # a prediction makes do for an hour with what a busy machine gave
    if calibration is None or calibration.sweeps < sweeps or calibration.is_poor(at_best=is_asked_for):
        calibration = measure_device(device, where, sweeps=sweeps, progress=progress)
        file_name, section = _CACHES[device.kind]
        keep(file_name, section, _cache_key(device), calibration, what=f"the measured rates of {device.name}")
    return calibration.applied_to(device)


def _end_rate(curve: RateCurve) -> float:
    amount, seconds = curve.points[-1]
    return amount / seconds


def _cache_key(device: Device) -> str:
    """What decides the measured times; of a GPU's, the host decides those of Python, launches and the link."""
    used = f"torch {torch.__version__}; Python {platform.python_version()}; brimful {__version__}"
    if device.kind == "cuda":
        return f"{device.name}; {_cpu_model()}; {used}"
    return f"{_cpu_model()}; {torch.get_num_threads()} threads; {used}"


def _cpu_model() -> str:
    with suppress(OSError):  # Linux says it here, other systems through `platform`
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
