"""The CPU of this machine as a device, with stated defaults that `profiling.calibrate_cpu` replaces."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations

from brimful.devices.contexts import NO_CONTEXT
from brimful.devices.device import Device, Dispatch

CPU_FP32_FLOPS_PER_SECOND_PER_CORE = 32e9
"""Default for an uncalibrated CPU: 2 GHz × 8 AVX2 lanes × 2 (fused multiply-add); assumed, not measured."""

CPU_MEMORY_BANDWIDTH_BYTES_PER_SECOND = 10e9
"""Default for an uncalibrated CPU: about half of one DDR4-2666 channel (21.3e9); assumed, not measured."""

CPU_LAUNCH_SECONDS = 7e-6
"""Default for an uncalibrated CPU: one small op with autograd took 6.8 µs in pytorch #41383."""


def memory_limits_bytes(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Memory limits of this process's control groups, as a container or a batch system sets them.

    Source: cgroups(7); "memory.max" of version 2, "memory.limit_in_bytes" of version 1, which applies as far as
    the groups around it permit.

    Args:
        membership: File that lists the groups of this process.
        mounts: Where the groups are mounted. In a container its own group may be at the root.

    Returns:
        All limits that are set, in bytes; empty without control groups.
    """
    return [limit_bytes for limit_bytes, _group, _files in _limited_groups(membership, mounts)]


def memory_left_bytes(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """Bytes that each memory limit of this process's control groups leaves now.

    A limit that is set counts in full where the group does not report its use. `membership` and `mounts` are
    those of `memory_limits_bytes`.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst: the current use includes
    the cache of files, of which the inactive part is reclaimed first; `docker stats` does not count it as used
    either.
    """
    return [
        max(limit_bytes - _used_bytes(group, files), 0)
        for limit_bytes, group, files in _limited_groups(membership, mounts)
    ]


class _Files(NamedTuple):
    """Names of a memory controller's files."""

    limit: str
    use: str
    inactive: str
    """The key in `memory.stat` of cached files that were not used lately, of the group and those within it."""


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("memory.max", "memory.current", "inactive_file")


def _limited_groups(membership: Path, mounts: Path) -> Iterator[tuple[int, Path, _Files]]:
    """Each limit that is set, with its group and the names of the group's files."""
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _hierarchy, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, files = (mounts / "memory", _VERSION_1) if controllers else (mounts, _VERSION_2)
            own = root / path.lstrip("/")
            for group in (own, *own.parents):
                with suppress(OSError, ValueError):  # no such group here, or "max"
                    yield int((group / files.limit).read_text()), group, files
                if group == root:
                    break


def _used_bytes(group: Path, files: _Files) -> int:
    """Bytes that a group uses, less its inactive cache of files; 0 if the group does not report it."""
    used_bytes = 0
    with suppress(OSError, ValueError):
        used_bytes = int((group / files.use).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == files.inactive:
                used_bytes -= int(value)
    return max(used_bytes, 0)


def cpu_device() -> Device:
    """This machine's CPU, with the memory that the system and its control groups permit."""
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return Device(
        name="cpu",
        kind="cpu",
        architecture=platform.machine(),
        compute_capability=None,
        sm_count=None,
        capacity_bytes=min([int(psutil.virtual_memory().total), *memory_limits_bytes()]),
        memory_bandwidth_bytes_per_second=CPU_MEMORY_BANDWIDTH_BYTES_PER_SECOND,
        fp32_flops_per_second=CPU_FP32_FLOPS_PER_SECOND_PER_CORE * cores,
        tf32_flops_per_second=None,
        fp16_flops_per_second=None,
        bf16_flops_per_second=None,
        host_link_bytes_per_second=None,
        context_bytes=NO_CONTEXT.context_bytes,
        context_low_bytes=NO_CONTEXT.low_bytes,
        context_high_bytes=NO_CONTEXT.high_bytes,
        context_source=NO_CONTEXT.source,
        launch_seconds=CPU_LAUNCH_SECONDS,
        dispatch=Dispatch.of_launch(CPU_LAUNCH_SECONDS),
        source="capacity from the operating system and its control groups; rates are defaults, not measured",
        confidence="low",
    )
