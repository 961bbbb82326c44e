"""What devices can do: memory, bandwidth and arithmetic rates, each row of the table with its source.

The table is `data/gpus.csv`. It holds the vendors' dense peak rates (no structured sparsity); what part of a
peak a training step reaches is `cost`'s business. The CPU of this machine is a device too, with stated
defaults that `measuring.calibrate_cpu` replaces by measurements.
"""

from __future__ import annotations

import csv
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Literal

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations

from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Precision
from brimful.units import GIB, MIB, format_bytes

UNMEASURED_USABLE_FRACTION = 0.9669
"""Part of a card's marketed memory that its driver reports, where the table has no report of that card.

The lowest of the 26 rows with both figures and no in-memory ECC (RTX 5070 Ti: 15842 of 16384 MiB); their median
is 0.987. The lowest, because a capacity set too high becomes an out-of-memory error.
"""

UNMEASURED_USABLE_FRACTION_WITH_ECC = 0.9162
"""The same for cards whose error correction takes 1/16 of their GDDR memory: the lowest of 6 rows (A10)."""

CUDA_CONTEXT_BYTES = 600 * MIB
"""What a CUDA context with torch is taken to occupy outside the allocator: a default, not a measurement.

Published: 287 MB lazily loaded and 667 MB eagerly (pytorch #86509), 300 to 400 MB (pytorch #107667), 426 MiB
on an RTX 6000 Ada with torch 2.10 (unsloth-zoo #1053). Lazy loading grows it with each kernel's first use,
hence the upper end. Before CUDA 11.7 it was above 1000 MB (pytorch #107667): 1343 MB on a V100 in "Efficient
Training on a Single GPU" (Transformers 4.25).
"""

CUDA_LAUNCH_SECONDS = 8e-6
"""Least time per op in eager PyTorch on CUDA: the host's time to submit one, however quick the kernel.

8 µs for an add of 512 × 512 on an A100 (flagos-ai/Torch-FL #27, "submit"). It is the host's, so the same for
all rows.
"""

CPU_FP32_FLOPS_PER_SECOND_PER_CORE = 32e9
"""Default for a CPU nobody calibrated: 2 GHz × 8 AVX2 lanes × 2 (fused multiply-add); assumed, not measured."""

CPU_MEMORY_BANDWIDTH_BYTES_PER_SECOND = 10e9
"""Default for a CPU nobody calibrated: about half of one DDR4-2666 channel (21.3e9); assumed, not measured."""

CPU_LAUNCH_SECONDS = 7e-6
"""Default for a CPU nobody calibrated: one small op with autograd took 6.8 µs in pytorch #41383."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One kind of GPU, or the CPU of this machine.

    Rates are dense peaks on CUDA and achieved rates on a calibrated CPU. None means that the hardware lacks the
    format, or that nobody knows.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    architecture: str
    """NVIDIA's name of the generation, such as "Ampere"; the machine type of a CPU."""
    compute_capability: tuple[int, int] | None
    """None on a CPU."""
    sm_count: int | None
    """Streaming multiprocessors; None on a CPU."""
    capacity_bytes: int
    """Memory as the driver reports it; less than marketed."""
    memory_bandwidth_bytes_per_second: float
    fp32_flops_per_second: float
    tf32_flops_per_second: float | None
    fp16_flops_per_second: float | None
    """Tensor cores with float32 accumulation, as PyTorch's matmuls use them."""
    bf16_flops_per_second: float | None
    host_link_bytes_per_second: float | None
    """Realistic rate between host and device, one way; None on a CPU."""
    context_bytes: int
    """What a CUDA context with torch takes outside the allocator; a stated default, no measurement."""
    launch_seconds: float
    """Least time per op in eager PyTorch."""
    source: str
    """Where the row is from."""
    confidence: str
    """"high", "medium" or "low"."""

    def flops_per_second(self, dtype: str, precision: Precision = Precision.FP32) -> float | None:
        """The rate of arithmetic in `dtype`.

        On CUDA without tensor cores for a half type the float32 rate stands, because matmuls that accumulate
        in float32 run at it: Pascal has no tensor cores (NVIDIA Tesla P100 whitepaper; its doubled half2 rate
        is for accumulating in half), and bfloat16 before Ampere is converted in software
        (`torch.cuda.is_bf16_supported`, `including_emulation`).

        Args:
            dtype: Name of the torch type the arithmetic is done in, such as "float32".
            precision: Whether float32 matmuls may round to TF32; without TF32 hardware it changes nothing.

        Returns:
            Operations per second; None for a type this table has no rate for.
        """
        if dtype == "float32":
            tf32 = self.tf32_flops_per_second if precision is Precision.TF32 else None
            return self.fp32_flops_per_second if tf32 is None else tf32
        halves = {"float16": self.fp16_flops_per_second, "bfloat16": self.bf16_flops_per_second}
        if dtype not in halves:
            return None
        half = halves[dtype]
        return self.fp32_flops_per_second if half is None and self.kind == "cuda" else half

    def check_precision(self, precision: Precision) -> None:
        """Check that training in `precision` is meaningful here.

        Args:
            precision: What is asked for.

        Raises:
            UsageError: It is not; the message says which are.
        """
        if not self.supports(precision):
            able = ", ".join(str(p) for p in Precision if self.supports(p))
            raise UsageError(f"{self.name} has no {precision}. It has: {able}.")

    def supports(self, precision: Precision) -> bool:
        """Whether training in `precision` is meaningful here.

        On CUDA: FP16 everywhere; BF16 and TF32 from compute capability 8.0 (NVIDIA A100 whitepaper). On a CPU
        autocast knows both half types, which need not be faster; there is no TF32.
        """
        if self.compute_capability is None:
            return precision is not Precision.TF32
        if precision in (Precision.BF16, Precision.TF32):
            return self.compute_capability >= (8, 0)
        return True


def known_devices() -> tuple[Device, ...]:
    """All GPUs of the table, in its order."""
    return tuple(row.device for row in _table())


def find_device(name: str, *, capacity_bytes: int | None = None) -> Device:
    """The device meant by `name`.

    Upper and lower case, punctuation and vendor words ("NVIDIA", "GeForce") do not matter. A full name or
    alias is taken first; then a part that leaves out only the brand, the form or the size of the memory:
    "3090" is the RTX 3090, never the Ti. Of rows with one memory size the slower is taken: "A100 40GB" is the
    PCIe card. A part that leaves the memory size open is refused.

    Args:
        name: A name people or drivers use, such as "RTX 3090" or "NVIDIA A100-SXM4-80GB"; "cpu" is this
            machine.
        capacity_bytes: What the driver reports, where known: it tells cards of one name apart and replaces
            the table's figure.

    Returns:
        The row, or this machine's CPU with stated default rates.

    Raises:
        UnknownNameError: No row has this name; says the nearest.
        UsageError: Several rows with different memory have it; lists them.
    """
    device = _cpu() if _squeezed(name) == "cpu" else _choose(name, _rows_named(name), capacity_bytes)
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
    """Rows with this name or alias; failing that, rows that `name` is a sufficient part of."""
    exact = tuple(row for row in _table() if _squeezed(name) in map(_squeezed, row.labels))
    asked = _words(name)
    # Without a model word ("80GB", "RTX") unrelated cards would match.
    if exact or not any(_is_model_word(word) for word in asked):
        return exact
    return tuple(row for row in _table() if _is_sufficient_part(asked, row))


def _choose(name: str, rows: tuple[_Row, ...], capacity_bytes: int | None) -> Device:
    if not rows:
        raise UnknownNameError("device", name, [row.device.name for row in _table()] + ["cpu"])
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


# Words of a label that may be left out without meaning another card. "Ti", "Super" or "Ada" may not.
_BRAND_AND_FORM = frozenset({"rtx", "gtx", "quadro", "pcie", "sxm", "nvl"})
_VENDOR = frozenset({"nvidia", "geforce", "tesla", "gpu", "graphics", "card"})
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
    """The words of a name that tell cards apart: "RTX3080ti 12 GB" is rtx, 3080, ti, 12gb."""
    text = re.sub(r"(\d+)\s*gi?b?\b", r"\1gb", name.lower())
    text = re.sub(r"\b(rtx|gtx)(?=\w)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(ti|super)\b", r" \1", text)
    text = re.sub(r"\bsxm\d\b", "sxm", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - _VENDOR


@cache
def _table() -> tuple[_Row, ...]:
    text = resources.files("brimful").joinpath("data", "gpus.csv").read_text(encoding="utf-8")
    return tuple(_row(cells) for cells in csv.DictReader(text.splitlines()))


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
    device = Device(
        name=cells["name"],
        kind="cuda",
        architecture=cells["architecture"],
        compute_capability=(int(major), int(minor)),
        sm_count=int(cells["sm_count"]),
        capacity_bytes=capacity_bytes,
        memory_bandwidth_bytes_per_second=float(cells["memory_bandwidth_bytes_per_second"]),
        fp32_flops_per_second=float(cells["fp32_flops"]),
        tf32_flops_per_second=_optional(cells["tf32_flops"]),
        fp16_flops_per_second=_optional(cells["fp16_flops"]),
        bf16_flops_per_second=_optional(cells["bf16_flops"]),
        host_link_bytes_per_second=_optional(cells["host_link_bytes_per_second"]),
        context_bytes=CUDA_CONTEXT_BYTES,
        launch_seconds=CUDA_LAUNCH_SECONDS,
        source=source,
        confidence=confidence,
    )
    return _Row(device=device, aliases=_listed(cells["aliases"]), marketed_bytes=marketed_bytes)


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None


def _listed(cell: str) -> tuple[str, ...]:
    aliases: Iterable[str] = (alias.strip() for alias in cell.split(";"))
    return tuple(alias for alias in aliases if alias)


def _cpu() -> Device:
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return Device(
        name="cpu",
        kind="cpu",
        architecture=platform.machine(),
        compute_capability=None,
        sm_count=None,
        capacity_bytes=int(psutil.virtual_memory().total),
        memory_bandwidth_bytes_per_second=CPU_MEMORY_BANDWIDTH_BYTES_PER_SECOND,
        fp32_flops_per_second=CPU_FP32_FLOPS_PER_SECOND_PER_CORE * cores,
        tf32_flops_per_second=None,
        fp16_flops_per_second=None,
        bf16_flops_per_second=None,
        host_link_bytes_per_second=None,
        context_bytes=0,
        launch_seconds=CPU_LAUNCH_SECONDS,
        source="capacity from the operating system; rates are defaults, not measured",
        confidence="low",
    )
