"""Devices by name: `data/gpus.csv`, each row with its source, and this machine's CPU.

A laptop's GPU, a MIG slice or a Max-Q card has other rates than the desktop card that its name contains: such
words in a name are never omitted.

The table holds the vendors' dense peak rates, without structured sparsity. `cost` has the fraction of a peak
that a training step reaches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from brimful.arguments import checks_arguments
from brimful.devices.contexts import NEWEST_TORCH, context_rows, cuda_context, nearest_context, with_context
from brimful.devices.data_rows import listed, read_rows
from brimful.devices.device import Device, Dispatch
from brimful.devices.this_machine import cpu_device
from brimful.errors import UnknownNameError, UsageError
from brimful.utils.quantities import GIB, format_bytes

UNMEASURED_USABLE_FRACTION = 0.9464
"""Fraction of a card's marketed memory that its driver reports, if the table has no report of that card.

The lowest of the 58 rows with both figures and no in-memory ECC (RTX 3070: 7753 of 8192 MiB); their median is
0.984. The lowest, because a capacity set too high becomes an out-of-memory error.
"""

UNMEASURED_USABLE_FRACTION_WITH_ECC = 0.9100
"""`UNMEASURED_USABLE_FRACTION` for cards whose ECC takes 1/16 of their GDDR memory: the lowest of 8 rows
(T4)."""

CUDA_LAUNCH_SECONDS = 8e-6
"""Least time per op in eager PyTorch on CUDA: the host's time to submit one, however quick the kernel.

8 µs for an add of 512 × 512 on an A100 (flagos-ai/Torch-FL #27, "submit"). It is time of the host, so the same
for all rows.
"""

CUDA_DISPATCH = Dispatch(forward_seconds=20e-6, backward_seconds=20e-6, optimizer_seconds=CUDA_LAUNCH_SECONDS)
"""Host time per op with Python, modules, views and autograd around it, on an uncalibrated machine.

Blocks that their host limits, as Liger-Kernel measured them: 28 µs per op in rotary embeddings on an A100's
host, 31 in sparse attention on an RTX 3090's, 19 in a mixture of experts on an H100's
(benchmarks/results/times_ops.json). No training step of timm takes less than 26 µs per op. Hosts differ, so
the lower end is taken.
"""

_NVLINK_JOINS_ALL = ("SXM", "H20", "B200", "B300")
"""Parts of the names of boards whose GPUs are all connected by NVLink."""


def known_devices() -> tuple[Device, ...]:
    """All GPUs of the hardware table, in its order."""
    return tuple(row.device for row in _table())


@checks_arguments
def find_device(name: str, *, capacity_bytes: int | None = None, torch_version: str | None = None) -> Device:
    """Find a device by name.

    Case, punctuation and vendor words ("NVIDIA", "GeForce") are ignored. Full names and aliases match first;
    then names that omit only the brand, the form factor or the memory size: "3090" is the RTX 3090, never the
    Ti. Among rows with the same memory size the slower one is used: "A100 40GB" is the PCIe card. A name that
    fits cards with different memory sizes is an error.

    Args:
        name: A common name or the driver's name, such as "RTX 3090" or "NVIDIA A100-SXM4-80GB"; "cpu" is this
            machine's CPU.
        capacity_bytes: Memory that the driver reports, if known: it distinguishes cards with the same name and
            replaces the table's figure.
        torch_version: Version of torch, such as "2.13.0", which decides the size of the CUDA context; None
            means the newest.

    Returns:
        The device from the table, or this machine's CPU with default rates.

    Raises:
        UnknownNameError: No row has this name; the message has the nearest names.
        UsageError: Several cards with different memory have this name, which the message lists; or
            `torch_version` is not a version.
    """
    device = cpu_device() if _squeezed(name) == "cpu" else _choose(name, _rows_named(name), capacity_bytes)
    if torch_version is not None:
        device = with_context(device, cuda_context(device, torch_version))
    return device if capacity_bytes is None else replace(device, capacity_bytes=capacity_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    device: Device
    aliases: tuple[str, ...]
    marketed_bytes: int

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.device.name, *self.aliases)


def _rows_named(name: str) -> tuple[_Row, ...]:
    """Rows with this name or alias; if there are none, rows that `name` is a sufficient part of."""
    exact = tuple(row for row in _table() if _squeezed(name) in map(_squeezed, row.labels))
    asked = _words(name)
    # Without a model word ("80GB", "RTX") unrelated cards would match.
    if exact or not any(_is_model_word(word) for word in asked):
        return exact
    return tuple(row for row in _table() if _is_sufficient_part(asked, row))


def _choose(name: str, rows: tuple[_Row, ...], capacity_bytes: int | None) -> Device:
    if not rows:
        is_this_machine = _squeezed(name) in _VENDOR
        hint = "For the GPU of this machine write cuda." if is_this_machine else _DESCRIBE_IT
        raise UnknownNameError("device", name, [row.device.name for row in _table()] + ["cpu"], hint=hint)
    if capacity_bytes is not None:
        gap = min(abs(row.device.capacity_bytes - capacity_bytes) for row in rows)
        rows = tuple(row for row in rows if abs(row.device.capacity_bytes - capacity_bytes) == gap)
    elif len({row.marketed_bytes for row in rows}) > 1:
        listed = ", ".join(f"{row.device.name} ({format_bytes(row.device.capacity_bytes)})" for row in rows)
        raise UsageError(f"device {name!r} is several cards with different memory: {listed}. Say which.")
    return min((row.device for row in rows), key=_speed)


def _speed(device: Device) -> tuple[float, float, float, int]:
    return (
        device.fp32_flops_per_second,
        device.fp16_flops_per_second or device.fp32_flops_per_second,
        device.memory_bandwidth_bytes_per_second,
        device.capacity_bytes,
    )


# Words of a label that a name may omit and still mean the same card. "Ti", "Super" and "Ada" are not among
# them.
_BRAND_AND_FORM = frozenset({"rtx", "gtx", "quadro", "pcie", "sxm", "nvl"})

_VENDOR = frozenset({"nvidia", "geforce", "tesla", "gpu", "graphics", "card"})

_DESCRIBE_IT = (
    'For the GPU of this machine write cuda; describe another: "name=…,memory=8GiB,bandwidth=300GB,tflops=9".'
)

_MEMORY_SIZE = re.compile(r"\d+gb")


def _is_sufficient_part(asked: frozenset[str], row: _Row) -> bool:
    size = f"{row.marketed_bytes // GIB}gb"
    for label in row.labels:
        words = _words(label) | {size}
        if asked <= words and all(word == size or word in _BRAND_AND_FORM for word in words - asked):
            return True
    return False


def _is_model_word(word: str) -> bool:
    return any(character.isdigit() for character in word) and not _MEMORY_SIZE.fullmatch(word)


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _words(name: str) -> frozenset[str]:
    """The words of a name that distinguish cards: "RTX3080ti 12 GB" is rtx, 3080, ti, 12gb."""
    text = re.sub(r"(\d+)\s*gi?b?\b", r"\1gb", name.lower())
    text = re.sub(r"\b(rtx|gtx)(?=\w)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    text = re.sub(r"\bmobile\b", "laptop", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - _VENDOR


@cache
def _table() -> tuple[_Row, ...]:
    return tuple(_row(cells) for cells in read_rows("gpus.csv"))


def _row(cells: dict[str, str]) -> _Row:
    marketed_bytes = int(cells["memory_bytes_marketed"])
    reported = cells["memory_bytes_usable"]
    source, confidence = cells["source"], cells["confidence"]
    if reported:
        capacity_bytes = int(reported)
    else:
        ecc = cells["ecc_in_memory"] == "yes"
        fraction = UNMEASURED_USABLE_FRACTION_WITH_ECC if ecc else UNMEASURED_USABLE_FRACTION
        capacity_bytes = int(marketed_bytes * fraction)
        source += f"; capacity taken as {fraction} of the marketed memory"
        confidence = "medium" if confidence == "high" else "low"
    major, minor = cells["compute_capability"].split(".")
    name, architecture = cells["name"], cells["architecture"]
    context = nearest_context(context_rows(), name, architecture, NEWEST_TORCH)
    device = Device(
        name=name,
        kind="cuda",
        architecture=architecture,
        compute_capability=(int(major), int(minor)),
        sm_count=int(cells["sm_count"]),
        capacity_bytes=capacity_bytes,
        memory_bandwidth_bytes_per_second=float(cells["memory_bandwidth_bytes_per_second"]),
        l2_bytes=int(cells["l2_bytes"] or 0),
        fp32_flops_per_second=float(cells["fp32_flops"]),
        tf32_flops_per_second=_optional(cells["tf32_flops"]),
        fp16_flops_per_second=_optional(cells["fp16_flops"]),
        bf16_flops_per_second=_optional(cells["bf16_flops"]),
        host_link_bytes_per_second=_optional(cells["host_link_bytes_per_second"]),
        nvlink_bytes_per_second=_optional(cells["nvlink_bytes_per_second"]),
        nvlink_joins_all=any(mark in name for mark in _NVLINK_JOINS_ALL),
        context_bytes=context.context_bytes,
        context_low_bytes=context.low_bytes,
        context_high_bytes=context.high_bytes,
        context_source=context.source,
        launch_seconds=CUDA_LAUNCH_SECONDS,
        dispatch=CUDA_DISPATCH,
        source=source,
        confidence=confidence,
        rates_spread=float(cells["rates_spread"] or 0.0),
    )
    return _Row(device=device, aliases=listed(cells["aliases"]), marketed_bytes=marketed_bytes)


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None
