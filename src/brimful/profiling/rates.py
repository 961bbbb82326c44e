"""Rates of a device of this machine: every kind of work by size, and of links, each timed.

Checked with torch 2.13 on CPUs, and with torch 2.11 on an H100.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations
import torch
from torch import Tensor

from brimful.devices import RateCurve
from brimful.devices.this_machine import memory_left_bytes
from brimful.profiling.probes import Pool, Probe, probes
from brimful.profiling.timing import Typical, typical_seconds
from brimful.utils.quantities import MIB
from brimful.utils.status import report

_POOL_BYTES = 64 * MIB
"""Least size of a pool: beyond the caches of most CPUs."""
_POOL_CACHES = 4
"""Size of a pool on a GPU, in sizes of its L2 cache. A choice."""
_LARGEST_POOL_BYTES = 512 * MIB
"""Largest size of a CPU's pool, of operands and of results: together beyond the last cache of any CPU of 2026
that one socket's cores share, but for AMD's with stacked cache (1152 MiB)."""
_POOL_MEMORY_FRACTION = 1 / 8
"""Most of the free memory that a pool may take. A choice."""
_VARIANTS_PER_POOL = 32
"""Most sets of operands of a pool of `_POOL_BYTES` that take turns; larger pools have more."""
_PROBE_SECONDS = 0.012
"""Time to spend on one size of one kind at a time, if nothing disturbs it."""
_LARGEST_RUN_SECONDS = 5e-3
"""A larger size is not tried after a run of this length if its rate is reached: longer runs seldom end before
another program has its turn."""
_LEAST_SIZES = 4
"""Minimum number of sizes to measure: a curve of one point gives all other amounts by its rate."""
_STEADY = 1.5
"""A rate is steady if it differs by less than this factor from that of the previous size. A small op may take a
time slice of another program, 4 to 8 ms: extrapolating from its rate would predict minutes for a large one. A
choice; sizes are two to eight times apart in work."""
_LINK_BYTES = 256 * MIB
_UPDATED_BYTES = 256 * MIB
"""Bytes of updated parameters: with their gradients and state 1 GiB, beyond nearly all caches."""
_ADAMW_TRAFFIC = 7
"""AdamW reads parameter, gradient and two of state, and writes all but the gradient."""

Progress = Callable[[str], None]
"""Called with what is measured next."""


def _report_measuring(what: str) -> None:
    report(f"measuring this machine once: {what}")


def measure_curves(
    where: torch.device, *, sweeps: int, progress: Progress | None = None
) -> tuple[tuple[RateCurve, ...], float]:
    """One curve for every kind of work that has a probe, and the fraction of sizes that were disturbed.

    Each sweep goes through all kinds, and the best of an amount's times counts. A size counts as disturbed if
    other work disturbed it in all sweeps.
    """
    pools: dict[torch.dtype, Pool] = {}
    measured: dict[str, dict[int, Typical]] = {}
    with torch.no_grad():
        for sweep in range(1, sweeps + 1):
            for probe in probes(where):
                kind = probe.kind.replace(":", " in ").replace("_", " ")
                (progress or _report_measuring)(f"{kind} ({sweep} of {sweeps})")
                if probe.dtype not in pools:
                    pools[probe.dtype] = Pool(where, probe.dtype, _pool_bytes(where, probe.dtype))
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


def _pool_bytes(where: torch.device, dtype: torch.dtype) -> int:
    """Size of a pool: on a CPU that of its last cache, for float32, in which all but products are timed."""
    if where.type == "cuda":
        cache_bytes = getattr(torch.cuda.get_device_properties(where), "L2_cache_size", 0)
        free_bytes, _ = torch.cuda.mem_get_info(where)
        return max(_POOL_BYTES, min(_POOL_CACHES * cache_bytes, int(free_bytes * _POOL_MEMORY_FRACTION / 2)))
    if where.type != "cpu" or dtype is not torch.float32:
        return _POOL_BYTES
    free_bytes = min([psutil.virtual_memory().available, *memory_left_bytes()])
    most = min(_LARGEST_POOL_BYTES, int(free_bytes * _POOL_MEMORY_FRACTION / 2))
    return max(_POOL_BYTES, min(last_cache_bytes(), most))


def last_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache of the first processor; 0 if the system does not report it.

    Source: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu: `size` is in KiB, such as "491520K".
    """
    sizes = [0]
    for path in caches.glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) * 1024)
    return max(sizes)


def _by_quiet_and_time(found: Typical) -> tuple[bool, float]:
    """Sort key by which undisturbed times come before disturbed ones, which are of the shortest round."""
    return not found.is_quiet, found.seconds


def measure_probe(probe: Probe, pool: Pool) -> dict[int, Typical]:
    """Typical times of a probe by amount of work, up to a size that runs long at its full rate.

    Larger sizes are skipped because some types have no fast kernels.
    """
    measured: dict[int, Typical] = {}
    rate_before = 0.0
    with probe.mode():
        for size in probe.sizes:
            before = pool.taken
            run, amount = probe.make(size, pool)
            most = _VARIANTS_PER_POOL * max(pool.numbers * pool.dtype.itemsize // _POOL_BYTES, 1)
            variants = min(most, pool.numbers // max(pool.taken - before, 1))
            runs = [run, *(probe.make(size, pool)[0] for _ in range(variants - 1))]
            found = measured[amount] = typical_seconds(runs, pool.device, most_seconds=_PROBE_SECONDS)
            rate = amount / found.seconds
            is_steady = rate_before / _STEADY < rate < rate_before * _STEADY
            is_reached = len(measured) >= _LEAST_SIZES and is_steady
            if found.seconds > _LARGEST_RUN_SECONDS and is_reached:
                break
            rate_before = rate
    return measured


def link_bytes_per_second(where: torch.device) -> tuple[float, float]:
    """Bytes per second to the device and back, one way at a time, from and to pinned memory.

    For a CPU, memory is copied within it, which tests use.
    """
    on_host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=where.type == "cuda")
    on_device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=where)

    def rate(target: Tensor, source: Tensor) -> float:
        copy = partial(target.copy_, source, non_blocking=True)
        return _LINK_BYTES / typical_seconds([copy], where, most_seconds=0.5).seconds

    return rate(on_device, on_host), rate(on_host, on_device)


def host_update_bytes_per_second() -> float:
    """Rate at which this machine's processors read and write memory in a fused AdamW's update."""
    parameter = torch.nn.Parameter(torch.zeros(_UPDATED_BYTES // 4))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes its state
    seconds = typical_seconds([optimizer.step], torch.device("cpu"), most_seconds=0.5).seconds
    return _ADAMW_TRAFFIC * _UPDATED_BYTES / seconds
