"""What this machine's CPU really does: arithmetic, memory bandwidth and the cost of one op, measured once.

Checked with torch 2.13.
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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from brimful.hardware import Device, find_device
from brimful.units import MIB

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CACHE_VERSION = 1
CACHE_FILE = "cpu.json"

# Up to one layer of a mid-sized model: (1024, 1024) @ (1024, 4096), 8.6 GFLOP. Smaller ones are for types
# without fast kernels: float16 ran at 1 GFLOP/s where float32 ran at 170 (AMD EPYC, 2 cores).
_MATMUL_SIZES = (128, 256, 512, 1024)
_MATMUL_SECONDS_AT_MOST = 0.3
_BANDWIDTH_TENSOR_BYTES = 64 * MIB
_OPS_IN_CHAIN = 200
_REPEATS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRates:
    """What `calibrate_cpu` measures; the rates are achieved ones."""

    fp32_flops_per_second: float
    fp16_flops_per_second: float
    bf16_flops_per_second: float
    memory_bandwidth_bytes_per_second: float
    launch_seconds: float


def calibrate_cpu(*, remeasure: bool = False) -> Device:
    """This machine's CPU with measured rates.

    The measurement takes about three seconds and is kept in the user's cache directory, for this CPU model,
    torch version and number of threads. Where the cache cannot be read, it is made anew; where it cannot be
    written, that is a warning. Other work on the machine slows what is measured.

    Args:
        remeasure: Measure even if there is a kept measurement.

    Returns:
        `find_device("cpu")` with measured rates, and "measured on this machine" as source.
    """
    key = _cache_key()
    kept = read_kept(CACHE_FILE, "cpus", _kept_rates)
    rates = None if remeasure else kept.get(key)
    if rates is None:
        rates = measure_cpu()
        write_kept(CACHE_FILE, "cpus", kept | {key: rates}, what="the CPU's measured rates")
    return replace(find_device("cpu"), **asdict(rates), source="measured on this machine", confidence="medium")


def measure_cpu() -> CpuRates:
    """Measure this CPU with all of torch's threads; each figure is a median."""
    return CpuRates(
        fp32_flops_per_second=_matmul_flops_per_second(torch.float32),
        fp16_flops_per_second=_matmul_flops_per_second(torch.float16),
        bf16_flops_per_second=_matmul_flops_per_second(torch.bfloat16),
        memory_bandwidth_bytes_per_second=_memory_bandwidth_bytes_per_second(),
        launch_seconds=_launch_seconds(),
    )


def cache_path() -> Path:
    """Where measurements of the CPU are kept, in `cache_directory`."""
    return cache_directory() / CACHE_FILE


def cache_directory() -> Path:
    """Where all measurements of this machine are kept.

    Returns:
        `$XDG_CACHE_HOME/brimful`, else `~/.cache/brimful`; it need not exist yet.

    Raises:
        RuntimeError: There is no home directory.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "brimful"


Record = TypeVar("Record", bound="DataclassInstance")


def read_kept(file_name: str, section: str, record: Callable[[dict[str, Any]], Record]) -> dict[str, Record]:
    """Measurements kept earlier; none if the file is missing, broken or of another version.

    Args:
        file_name: In the cache directory.
        section: The document's part that holds them.
        record: Makes a record of an entry's values; an entry it raises ValueError or TypeError for is left out.

    Returns:
        The records, each under the key it was kept with.
    """
    try:
        document = json.loads((cache_directory() / file_name).read_text(encoding="utf-8"))
        if document["version"] != CACHE_VERSION:
            return {}
        entries = dict(document[section])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    kept = {}
    for key, values in entries.items():
        with suppress(ValueError, TypeError):
            kept[key] = record(values)
    return kept


def write_kept(file_name: str, section: str, kept: Mapping[str, DataclassInstance], *, what: str) -> None:
    """Keep measurements for later; where the file cannot be written, that is a warning.

    Args:
        file_name: In the cache directory; is replaced as a whole.
        section: The document's part that holds them.
        kept: All records to be kept.
        what: Names them in the warning.
    """
    document = {"version": CACHE_VERSION, section: {key: asdict(record) for key, record in kept.items()}}
    try:
        path = cache_directory() / file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read meanwhile: it must see the old file or the new one.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(document, file, indent=2)
        Path(file.name).replace(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        warnings.warn(f"{what} could not be kept: {error}", stacklevel=3)


def _matmul_flops_per_second(dtype: torch.dtype) -> float:
    """2·m·k·n / seconds with m = k = size, n = 4·size, at the largest size that does not take long."""
    for size in _MATMUL_SIZES:
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, 4 * size).to(dtype)
        durations = _durations(partial(torch.mm, a, b))
        # The next size does 2³ times the work. The quickest run tells, so that a hiccup does not.
        if 8 * min(durations) > _MATMUL_SECONDS_AT_MOST:
            break
    return 2 * size * size * 4 * size / statistics.median(durations)


def _memory_bandwidth_bytes_per_second() -> float:
    """Bytes read and written by a product and a copy, over their time; results go to fresh buffers.

    Fresh, because a training step allocates its activations: the first touch of a new page is part of the cost.
    """
    a = torch.randn(_BANDWIDTH_TENSOR_BYTES // 4)
    b = torch.randn(_BANDWIDTH_TENSOR_BYTES // 4)

    def multiply_and_copy() -> None:
        (a * b).clone()  # reads a, b, their product; writes the product, the copy

    return 5 * _BANDWIDTH_TENSOR_BYTES / statistics.median(_durations(multiply_and_copy))


def _launch_seconds() -> float:
    """Time of one small elementwise op: the mean over a chain, half of it forward and half backward."""
    x = torch.randn(64, requires_grad=True)
    factor = torch.randn(64)

    def chain() -> None:
        y = x
        for _ in range(_OPS_IN_CHAIN):
            y = y * factor
        y.sum().backward()
        x.grad = None

    return statistics.median(_durations(chain)) / (2 * _OPS_IN_CHAIN)


def _durations(run: Callable[[], object]) -> list[float]:
    run()  # first calls choose kernels and grow heaps
    durations = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return durations


def _cache_key() -> str:
    return f"{_cpu_model()}; torch {torch.__version__}; {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    with suppress(OSError):  # Linux says it here, other systems through `platform`
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _kept_rates(values: dict[str, Any]) -> CpuRates:
    rates = CpuRates(**values)
    if not all(rate > 0 for rate in asdict(rates).values()):
        raise ValueError(f"{rates} cannot be")
    return rates
