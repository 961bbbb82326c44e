"""Offloading on the host: the ops that copy, and the pinned memory that holds the copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from brimful.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The role of an op in copies between device and host."""

    way: str
    """The direction, "to host" or "to device"; the copies of each follow one another."""
    begins: bool = False
    """Whether a copy of the bytes that the op writes begins; else the op waits for those that have begun."""
    follows: str | None = None
    """Another direction, whose copies so far come before the one that begins."""
    host_waits: bool = False
    """Whether the host waits; else the device waits."""


TO_HOST = "brimful.to_host.default"
"""Copies the saved tensors of a unit to the host."""
TO_DEVICE = "brimful.to_device.default"
"""Copies the saved tensors of a unit back to the device."""

LINK_USES: Mapping[str, LinkUse] = MappingProxyType(
    {
        TO_HOST: LinkUse(way="to host", begins=True),
        "brimful.to_host_done.default": LinkUse(way="to host"),
        TO_DEVICE: LinkUse(way="to device", begins=True),
        "brimful.to_device_done.default": LinkUse(way="to device"),
        "brimful.send_to_host.default": LinkUse(way="to host", begins=True, follows="to device"),
        "brimful.arrived_on_host.default": LinkUse(way="to host", host_waits=True),
        "brimful.send_to_device.default": LinkUse(way="to device", begins=True),
    }
)
"""The ops of `transforms.host_link`, in a fixed order."""


LEAST_OFFLOADED_BYTES = 64 * 1024
"""Smaller storages stay on the device: all of a model's together are little, and each would take a copy."""


def chosen_to_leave(sizes_bytes: Sequence[int], most_bytes: int | None) -> list[int]:
    """Indices, ascending, of the storages that a unit sends to the host: the largest first as long as they fit.

    `sizes_bytes` are in the order in which the storages were saved. All together take at most `most_bytes`;
    None permits all.
    """
    left_bytes = sum(sizes_bytes) if most_bytes is None else most_bytes
    chosen = []
    for index in sorted(range(len(sizes_bytes)), key=lambda index: -sizes_bytes[index]):
        if sizes_bytes[index] <= left_bytes:
            chosen.append(index)
            left_bytes -= sizes_bytes[index]
    return sorted(chosen)


def pinned_bytes(size_bytes: int) -> int:
    """Bytes of pinned memory that a copy takes, at least 1: torch rounds to powers of two.

    Source: CachingHostAllocator.h, `PowerOf2Ceil`, as quoted in pytorch pull request 171662.
    """
    return 1 << (size_bytes - 1).bit_length()


def pinned_host_bytes(trace: Trace) -> int:
    """Bytes of pinned host memory that a step takes.

    All copies of a micro-batch are there when its backward begins. The memory is used again by the next one,
    and stays pinned to the end of training. So does what an optimizer on the host sends through.
    """
    of_micro_batch: Counter[tuple[int, int]] = Counter()
    for op in trace.ops:
        if op.name == TO_HOST:
            of_micro_batch[op.step, op.micro_batch] += pinned_bytes(op.written_bytes)
    return max(of_micro_batch.values(), default=0) + trace.host_staging_bytes
