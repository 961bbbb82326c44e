"""What a device of this machine really does: every kind of work by size, links, launches and Python, kept.

Checked with torch 2.13 on a CPU; the few lines for CUDA alone were not run on a GPU.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
from msgspec import Meta
from torch import Tensor

from brimful.codec import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    from_builtins,
    from_json_document,
    parse_json,
    read_regular_file,
    to_json_document,
)
from brimful.devices import MEASURED_BUSY, Device, Dispatch, RateCurve, find_device
from brimful.errors import FileFormatError
from brimful.profiling.dispatch import measure_dispatch
from brimful.profiling.probes import Pool, Probe, probes
from brimful.profiling.timing import Typical, typical_seconds
from brimful.quantities import MIB
from brimful.status import report

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CACHE_VERSION = 2
CACHE_FILE = "cpu.json"
GPU_CACHE_FILE = "gpus.json"

_POOL_BYTES = 64 * MIB
"""Beyond the caches of most CPUs and GPUs."""
_VARIANTS = 32
"""Most sets of operands that take turns."""
_PROBE_SECONDS = 0.012
"""To spend on one size of one kind at a time, if nothing disturbs it."""
THOROUGH_SWEEPS = 3
"""How often `brimful calibrate` goes through all kinds. The best of the times counts: a machine has slow
seconds."""
QUICK_SWEEPS = 1
"""The same where a prediction for "cpu" finds nothing kept and must not take long."""
_LARGEST_RUN_SECONDS = 5e-3
"""A larger size is not tried after a run of this length if its rate is reached: longer runs seldom end before
another program has its turn."""
_LEAST_SIZES = 4
"""That many are tried always: a curve of one point tells all other amounts by its rate."""
_STEADY = 1.5
"""A rate that is reached differs by less from that of the size before. A small op may take a time slice of
another program, 4 to 8 ms: to stop there and go on at its rate would make a large one take minutes. A choice;
sizes are two to eight times apart in work."""
_FRESH_BYTES = 64 * MIB
"""A block that malloc does not keep when it is freed; `cost.page_faults` says why."""
_FRESH_SECONDS = 0.4
_LINK_BYTES = 256 * MIB
_UPDATED_BYTES = 256 * MIB
"""Of parameters: with their gradients and state 1 GiB, beyond nearly all caches."""
_ADAMW_TRAFFIC = 7
"""Reads parameter, gradient and two of state, and writes all but the gradient."""

_BUSY_FRACTION = 0.1
"""A choice."""
_BUSY_FOR_SECONDS = 3600.0
"""After which what was measured on a busy machine is measured again, as it may be quiet by then: a choice."""

MEASURED = "measured on this machine"

Progress = Callable[[str], None]
"""Is told what is measured next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured of one device; rates are achieved ones, at the largest size that was timed."""

    fp32_flops_per_second: PositiveFloat
    fp16_flops_per_second: PositiveFloat
    bf16_flops_per_second: PositiveFloat
    memory_bandwidth_bytes_per_second: PositiveFloat
    launch_seconds: PositiveFloat
    """One small elementwise op."""
    page_fault_seconds_per_byte: NonNegativeFloat
    """0 on a GPU."""
    to_device_bytes_per_second: PositiveFloat | None
    """From pinned memory; None on a CPU."""
    to_host_bytes_per_second: PositiveFloat | None
    host_update_bytes_per_second: PositiveFloat | None = None
    """At which the host reads and writes memory in AdamW's update; None on a CPU, or where an earlier version
    measured."""
    dispatch: Dispatch
    curves: Annotated[tuple[RateCurve, ...], Meta(min_length=1)]
    sweeps: PositiveInt
    """How often all kinds were gone through."""
    disturbed_fraction: NonNegativeFloat
    """Of the sizes of all kinds: those that other work on the machine never let run undisturbed."""
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
            page_fault_seconds_per_byte=self.page_fault_seconds_per_byte,
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
        """Whether other work disturbed so much of the measurement that its figures are too slow."""
        return self.disturbed_fraction > _BUSY_FRACTION

    def is_poor(self, *, at_best: bool) -> bool:
        """Whether it should be made anew: it was made on a busy machine, an hour ago or `at_best`."""
        is_old = time.time() - self.measured_at_seconds > _BUSY_FOR_SECONDS
        return self.was_busy and (at_best or is_old)

    @property
    def source(self) -> str:
        """Where the figures are from."""
        return MEASURED_BUSY if self.was_busy else MEASURED


def calibrate_cpu(
    *, remeasure: bool = False, sweeps: int = QUICK_SWEEPS, progress: Progress | None = None
) -> Device:
    """This machine's CPU with measured rates.

    The measurement takes some six seconds, two more for each further sweep, and half a minute beside other
    work, which slows what is measured. It is kept in the user's cache directory, for this CPU model, torch
    version and number of threads. Where the cache cannot be read, it is made anew; where it cannot be written,
    that is a warning.

    Args:
        remeasure: Measure even if there is a kept measurement.
        sweeps: How often all kinds are gone through; a kept measurement of fewer is made anew.
        progress: Is told what is measured next.

    Returns:
        `find_device("cpu")` with measured rates, and "measured on this machine" as source.
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
    """A GPU of this machine with measured rates, kept as those of the CPU are.

    Args:
        device: Its row of the table.
        where: The torch device that it is.
        remeasure: Measure even if there is a kept measurement.
        sweeps: How often all kinds are gone through; a kept measurement of fewer is made anew.
        progress: Is told what is measured next.

    Returns:
        The row with what was measured.
    """
    return _calibrated(device, where, remeasure=remeasure, sweeps=sweeps, progress=progress)


def with_kept_calibration(device: Device) -> Device:
    """The device with what was measured for it on this machine and kept, if there is anything.

    Args:
        device: A GPU of the table or the CPU.

    Returns:
        It is not measured if nothing is kept; then it stays as it is.
    """
    kept = kept_calibration(device)
    return device if kept is None else kept.applied_to(device)


def kept_calibration(device: Device) -> Calibration | None:
    """What was measured for a device with this version of torch; None if nothing is kept."""
    return _read(device).get(_cache_key(device))


def measure_device(
    device: Device,
    where: torch.device,
    *,
    sweeps: int = THOROUGH_SWEEPS,
    progress: Progress | None = None,
) -> Calibration:
    """Measure all kinds of work on a torch device, then what is around them.

    Args:
        device: The row that `where` belongs to.
        where: A CPU or CUDA device of this machine.
        sweeps: How often all kinds are gone through.
        progress: Is told what is measured next.

    Returns:
        Typical times, of runs that no other program disturbed where there were any.
    """
    tell = progress or (lambda _what: None)
    start = time.perf_counter()
    curves, disturbed_fraction = measure_curves(where, sweeps=sweeps, progress=tell)
    by_kind = {curve.kind: curve for curve in curves}
    launch_seconds = by_kind["elementwise"].points[0][1]
    tell("fresh memory")
    fault_seconds = page_fault_seconds_per_byte() if where.type == "cpu" else 0.0
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
        page_fault_seconds_per_byte=fault_seconds,
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


def _report_measuring(what: str) -> None:
    report(f"measuring this machine once: {what}")


def measure_curves(
    where: torch.device, *, sweeps: int, progress: Progress | None = None
) -> tuple[tuple[RateCurve, ...], float]:
    """One curve for every kind of work that there is a probe for.

    Args:
        where: A torch device.
        sweeps: How often all are gone through; the best of an amount's times counts.
        progress: Is told what is measured next.

    Returns:
        The curves, and the part of the sizes that other work disturbed in all sweeps.
    """
    pools: dict[torch.dtype, Pool] = {}
    measured: dict[str, dict[int, Typical]] = {}
    with torch.no_grad():
        for sweep in range(1, sweeps + 1):
            for probe in probes(where):
                kind = probe.kind.replace(":", " in ").replace("_", " ")
                (progress or _report_measuring)(f"{kind} ({sweep} of {sweeps})")
                if probe.dtype not in pools:
                    pools[probe.dtype] = Pool(where, probe.dtype, _POOL_BYTES)
                found = measure_probe(probe, pools[probe.dtype])
                best = measured.setdefault(probe.kind, found)
                for amount, one in found.items():
                    best[amount] = min(one, best.get(amount, one), key=_by_quiet_and_time)
    curves = tuple(
        RateCurve.through(
            kind, [(amount, each.seconds) for amount, each in found.items()], is_arithmetic=":" in kind
        )
        for kind, found in measured.items()
    )
    sizes = [each for found in measured.values() for each in found.values()]
    return curves, statistics.fmean(not each.is_quiet for each in sizes)


def _by_quiet_and_time(found: Typical) -> tuple[bool, float]:
    """What nothing disturbed comes first: of what is disturbed the shortest round counts, not a typical one."""
    return not found.is_quiet, found.seconds


def measure_probe(probe: Probe, pool: Pool) -> dict[int, Typical]:
    """A probe's sizes by amount, up to one that runs long at its full rate: some types have no fast kernels."""
    measured: dict[int, Typical] = {}
    rate_before = 0.0
    with probe.mode():
        for size in probe.sizes:
            before = pool.taken
            run, amount = probe.make(size, pool)
            variants = min(_VARIANTS, pool.numbers // max(pool.taken - before, 1))
            runs = [run, *(probe.make(size, pool)[0] for _ in range(variants - 1))]
            found = measured[amount] = typical_seconds(runs, pool.device, most_seconds=_PROBE_SECONDS)
            rate = amount / found.seconds
            is_steady = rate_before / _STEADY < rate < rate_before * _STEADY
            is_reached = len(measured) >= _LEAST_SIZES and is_steady
            if found.seconds > _LARGEST_RUN_SECONDS and is_reached:
                break
            rate_before = rate
    return measured


def page_fault_seconds_per_byte() -> float:
    """What the first touch of memory adds to a product of tensors, per byte of the result."""
    cpu = torch.device("cpu")
    x, y, out = (torch.rand(_FRESH_BYTES // 4) for _ in range(3))
    warm = typical_seconds([partial(torch.mul, x, y, out=out)], cpu, most_seconds=_FRESH_SECONDS).seconds
    fresh = typical_seconds([partial(torch.mul, x, y)], cpu, most_seconds=_FRESH_SECONDS).seconds
    return max(fresh - warm, 0.0) / _FRESH_BYTES


def link_bytes_per_second(where: torch.device) -> tuple[float, float]:
    """Rates to the device and back, from and to pinned memory.

    Args:
        where: A CUDA device; for a CPU memory is copied within it, which tests use.

    Returns:
        Bytes per second, one way at a time.
    """
    on_host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=where.type == "cuda")
    on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=where)

    def rate(target: Tensor, source: Tensor) -> float:
        copy = partial(target.copy_, source, non_blocking=True)
        return _LINK_BYTES / typical_seconds([copy], where, most_seconds=0.5).seconds

    return rate(on_device, on_host), rate(on_host, on_device)


def host_update_bytes_per_second() -> float:
    """At which this machine's processors read and write memory in a fused AdamW's update."""
    parameter = torch.nn.Parameter(torch.zeros(_UPDATED_BYTES // 4))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes its state
    seconds = typical_seconds([optimizer.step], torch.device("cpu"), most_seconds=0.5).seconds
    return _ADAMW_TRAFFIC * _UPDATED_BYTES / seconds


def cache_path(device_kind: str = "cpu") -> Path:
    """Where measurements of CPUs are kept, or of GPUs, in `cache_directory`."""
    return cache_directory() / _CACHES[device_kind][0]


def cache_directory() -> Path:
    """Where all measurements of this machine are kept.

    Returns:
        `$XDG_CACHE_HOME/brimful`, else `~/.cache/brimful`; it need not exist yet.

    Raises:
        RuntimeError: There is no home directory.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "brimful"


_MOST_SHOWN = 100
"""Characters of an entry's key that a warning shows. A choice."""

Record = TypeVar("Record", bound="DataclassInstance")


def read_kept(file_name: str, section: str, record: type[Record]) -> dict[str, Record]:
    """Measurements kept earlier; none if the file is missing or of another version.

    What is damaged is a warning, and is not used.

    Args:
        file_name: In the cache directory.
        section: The document's part that holds them.
        record: What an entry is.

    Returns:
        The records, each under the key it was kept with.
    """
    try:
        path = cache_directory() / file_name
    except RuntimeError:  # there is no home directory
        return {}
    if not os.path.lexists(path):
        return {}
    where = f"the cache of measurements {path}"
    kept: dict[str, Record] = {}
    damage: list[FileFormatError] = []
    try:
        content = parse_json(read_regular_file(path, what="cache of measurements"), where=where)
        document = from_builtins(content, dict[str, Any], where=where)
        if document.get("version") != CACHE_VERSION:
            return {}
        entries = from_builtins(document.get(section), dict[str, Any], where=f"{where}: field `{section}`")
        for key, values in entries.items():
            try:
                kept[key] = from_json_document(values, record, where=f"{where}: {key[:_MOST_SHOWN]!r}")
            except FileFormatError as error:
                damage.append(error)
    except FileFormatError as error:
        damage.append(error)
    if damage:
        warnings.warn(f"{damage[0]} It is not used; what is needed is measured again.", stacklevel=3)
    return kept


def write_kept(file_name: str, section: str, kept: Mapping[str, DataclassInstance], *, what: str) -> None:
    """Keep measurements for later; where the file cannot be written, that is a warning.

    Args:
        file_name: In the cache directory; is replaced as a whole.
        section: The document's part that holds them.
        kept: All records to be kept.
        what: Names them in the warning.
    """
    document = {
        "version": CACHE_VERSION,
        section: {key: to_json_document(record) for key, record in kept.items()},
    }
    try:
        path = cache_directory() / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it must see the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        Path(file.name).replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        warnings.warn(f"{what} could not be kept: {error}", stacklevel=3)


_CACHES = {"cpu": (CACHE_FILE, "cpus"), "cuda": (GPU_CACHE_FILE, "gpus")}
"""File and section by kind of device."""


def _calibrated(
    device: Device, where: torch.device, *, remeasure: bool, sweeps: int, progress: Progress | None
) -> Device:
    key, kept = _cache_key(device), _read(device)
    calibration = None if remeasure else kept.get(key)
    is_asked_for = sweeps >= THOROUGH_SWEEPS  # a prediction makes do for an hour with what a busy machine gave
    if calibration is None or calibration.sweeps < sweeps or calibration.is_poor(at_best=is_asked_for):
        calibration = measure_device(device, where, sweeps=sweeps, progress=progress)
        file_name, section = _CACHES[device.kind]
        write_kept(file_name, section, kept | {key: calibration}, what=f"the measured rates of {device.name}")
    return calibration.applied_to(device)


def _read(device: Device) -> dict[str, Calibration]:
    file_name, section = _CACHES[device.kind]
    kept = read_kept(file_name, section, Calibration)
    return {key: each for key, each in kept.items() if device.kind == "cpu" or each.has_link_rates}


def _end_rate(curve: RateCurve) -> float:
    amount, seconds = curve.points[-1]
    return amount / seconds


def _cache_key(device: Device) -> str:
    if device.kind == "cuda":
        return f"{device.name}; torch {torch.__version__}"
    return f"{_cpu_model()}; torch {torch.__version__}; {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    with suppress(OSError):  # Linux says it here, other systems through `platform`
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
