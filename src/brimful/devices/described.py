"""A GPU that the user describes: "name=…,memory=8GiB,bandwidth=300GB,tflops=9" → its `Device`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeVar, cast, get_args

from brimful.devices.derived import Figures, derived_device
from brimful.devices.device import Device
from brimful.devices.peaks import Capability, MemoryType
from brimful.errors import UnknownNameError, UsageError
from brimful.utils.quantities import GIB, KIB, MIB, format_bytes, parse_bytes

ASSUMED_CAPABILITY: Capability = (8, 6)
"""The compute capability of a description without one: the oldest that has bf16, and TF32 at the least ratios.
It decides which precisions there are, cuBLAS's workspace and the context's size. A choice, which the device's
source states."""

DESCRIPTION_KEYS = (
    *("name", "memory", "bandwidth", "tflops"),
    *("memory_type", "sms", "clock", "capability", "l2", "fp16_tflops", "bf16_tflops", "tf32_tflops"),
    *("link", "nvlink"),
)
"""The keys of a description; `name`, `memory`, `bandwidth`, and one of `tflops` and `sms` are needed."""

_EXAMPLE = '"name=My GPU,memory=8GiB,bandwidth=300GB,tflops=9"'


def is_description(device: str) -> bool:
    """Whether a device is described, and not named."""
    return "=" in device


def described_device(description: str) -> Device:
    """The device that a description means.

    Args:
        description: Pairs `key=value`, separated by commas. `name`; `memory`, as the driver reports it, such as
            7.8GiB; `bandwidth` of the memory per second, such as 300GB; `tflops`, the float32 peak outside
            tensor cores. Optional: `memory_type` (HBM or GDDR), `capability` (8.6), `sms`, the multiprocessors,
            `clock` in MHz, `l2` (24MiB), `fp16_tflops`, `bf16_tflops` and `tf32_tflops`, dense with float32
            accumulation, `link` to the host and `nvlink` to all other GPUs, per second and direction (12.5GB).

    Returns:
        A device whose source has what was given, and the rule for each figure that was not. It has low
        confidence and wider intervals of time unless all rates are given.

    Raises:
        UsageError: A key is missing, unknown, repeated, or has a value that cannot be.
    """
    given = _pairs(description)
    missing = [key for key in ("name", "memory", "bandwidth") if key not in given]
    missing += ["tflops (or sms)"] if not {"tflops", "sms"} & set(given) else []
    if missing:
        raise UsageError(
            f"the described device {_shown(description)} has no {', '.join(missing)}. Write {_EXAMPLE}; "
            f"optional keys: {', '.join(DESCRIPTION_KEYS[4:])}."
        )
    capability = _read(given, "capability", _capability)
    source = f"described by the user ({', '.join(key for key in DESCRIPTION_KEYS if key in given)})"
    if capability is None:
        source += f"; compute capability {ASSUMED_CAPABILITY[0]}.{ASSUMED_CAPABILITY[1]} assumed"
    memory_bytes, bandwidth = _read(given, "memory", _memory), _read(given, "bandwidth", _rate)
    assert memory_bytes is not None
    assert bandwidth is not None
    return derived_device(
        Figures(
            name=given["name"],
            capacity_bytes=memory_bytes,
            memory_bandwidth_bytes_per_second=bandwidth,
            compute_capability=capability or ASSUMED_CAPABILITY,
            sm_count=_read(given, "sms", _count),
            clock_hertz=_read(given, "clock", _megahertz),
            fp32_flops_per_second=_read(given, "tflops", _teraflops),
            tf32_flops_per_second=_read(given, "tf32_tflops", _teraflops),
            fp16_flops_per_second=_read(given, "fp16_tflops", _teraflops),
            bf16_flops_per_second=_read(given, "bf16_tflops", _teraflops),
            memory_type=_read(given, "memory_type", _memory_type),
            l2_bytes=_read(given, "l2", _l2),
            host_link_bytes_per_second=_read(given, "link", _rate),
            nvlink_bytes_per_second=_read(given, "nvlink", _rate),
            source=source,
        )
    )


def _pairs(description: str) -> dict[str, str]:
    given: dict[str, str] = {}
    for pair in description.split(","):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise UsageError(
                f"{_shown(pair.strip())} in the described device {_shown(description)} is not key=value. "
                f"Write {_EXAMPLE}."
            )
        key = key.lower().replace("-", "_")
        if key not in DESCRIPTION_KEYS:
            raise UnknownNameError("key of a described device", key, DESCRIPTION_KEYS)
        if key in given:
            raise UsageError(f"the described device {_shown(description)} has {key} twice.")
        given[key] = value
    return given


T = TypeVar("T")


def _read(given: dict[str, str], key: str, read: Callable[[str], T]) -> T | None:
    """The value of a key, which errors name; None without it."""
    if key not in given:
        return None
    try:
        return read(given[key])
    except ValueError as error:
        raise UsageError(f"{key}={given[key]} of the described device: {error}") from None


_MOST_TERAFLOPS, _LEAST_TERAFLOPS = 1e5, 0.01
_MOST_BYTES_PER_SECOND, _LEAST_BYTES_PER_SECOND = 1e15, 1e8
_MOST_MEMORY_BYTES, _LEAST_MEMORY_BYTES = 16 << 40, 256 * MIB
_MOST_L2_BYTES, _LEAST_L2_BYTES = 8 * GIB, 16 * KIB
"""Beyond what any GPU of the table has by a factor of 40 or more, below its least memory by 15: an error of
units. A choice."""

_MOST_MAJOR_CAPABILITY = 20
"""The table has compute capabilities from 3.7 to 12.1. A choice."""


def _memory(text: str) -> int:
    return _in_range(parse_bytes(text, is_budget=False), _LEAST_MEMORY_BYTES, _MOST_MEMORY_BYTES, "memory")


def _l2(text: str) -> int:
    if re.match(r"\s*0+(\.0*)?\s*([A-Za-z]|$)", text):
        raise ValueError("without an L2 cache, or where its size is not known, do not write l2.")
    return _in_range(parse_bytes(text, is_budget=False), _LEAST_L2_BYTES, _MOST_L2_BYTES, "L2 cache")


def _in_range(size_bytes: int, least_bytes: int, most_bytes: int, what: str) -> int:
    if not least_bytes <= size_bytes <= most_bytes:
        raise ValueError(
            f"not the size of a GPU's {what}, which is between {format_bytes(least_bytes)} and "
            f"{format_bytes(most_bytes)}."
        )
    return size_bytes


def _memory_type(text: str) -> MemoryType:
    for known in get_args(MemoryType):
        if re.fullmatch(rf"{known}\d?[A-Z]?", text, re.IGNORECASE):
            return cast("MemoryType", known)
    raise ValueError(f"{text} is not a type of memory. Write HBM or GDDR.")


def _rate(text: str) -> float:
    rate = float(parse_bytes(re.sub(r"\s*/\s*s(ec)?$", "", text.strip(), flags=re.IGNORECASE), is_budget=False))
    if not _LEAST_BYTES_PER_SECOND <= rate <= _MOST_BYTES_PER_SECOND:
        raise ValueError(f"{text} per second is not the rate of a GPU. Write one such as 300GB.")
    return rate


def _teraflops(text: str) -> float:
    number = _number(text)
    if not _LEAST_TERAFLOPS <= number <= _MOST_TERAFLOPS:
        raise ValueError(f"{text} is not a GPU's rate in TFLOPS. Write a number such as 9 or 29.8.")
    return number * 1e12


def _megahertz(text: str) -> float:
    number = _number(re.sub(r"\s*mhz$", "", text.strip(), flags=re.IGNORECASE))
    if not 100 <= number <= 10_000:
        raise ValueError(f"{text} is not a clock in MHz. Write one such as 1710.")
    return number * 1e6


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:6]) <= 10_000:
        raise ValueError(f"{text} is not a number of multiprocessors. Write one such as 28.")
    return int(text)


def _capability(text: str) -> Capability:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None or not 3 <= int(match[1]) <= _MOST_MAJOR_CAPABILITY:
        raise ValueError(
            f"{text} is not a compute capability, which is between 3.0 and {_MOST_MAJOR_CAPABILITY}.9. "
            "Write one such as 8.6."
        )
    return int(match[1]), int(match[2])


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number.")
    return number


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
