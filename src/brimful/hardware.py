"""What devices can do: memory, bandwidth and arithmetic rates, each row of the table with its source.

The table is `data/gpus.csv`. It holds the vendors' dense peak rates (no structured sparsity); what part of a
peak a training step reaches is `cost`'s business. The CPU of this machine is a device too, with stated
defaults that `measuring.calibrate_cpu` replaces by measurements, as `measuring.calibrate_gpu` does for a GPU
that is in this machine: rates by size, and what Python adds. What a CUDA context takes beside torch's
allocator is in `data/contexts.csv`; `measuring.measure_context` replaces it by a measurement.
"""

from __future__ import annotations

import csv
import math
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]  # psutil ships no annotations

from brimful.codec import NonNegativeFloat
from brimful.curves import RateCurve
from brimful.errors import UnknownNameError, UsageError
from brimful.settings import Precision
from brimful.units import GIB, MIB, format_bytes

UNMEASURED_USABLE_FRACTION = 0.9464
"""Part of a card's marketed memory that its driver reports, where the table has no report of that card.

The lowest of the 49 rows with both figures and no in-memory ECC (RTX 3070: 7753 of 8192 MiB); their median is
0.984. The lowest, because a capacity set too high becomes an out-of-memory error.
"""

UNMEASURED_USABLE_FRACTION_WITH_ECC = 0.9100
"""The same for cards whose error correction takes 1/16 of their GDDR memory: the lowest of 7 rows (T4)."""

CUDA_CONTEXT_BYTES = 600 * MIB
"""What a CUDA context with torch is taken to occupy where `data/contexts.csv` has no applicable row.

Assumed, not measured: between the 114 MiB (T4) and 712 MiB (B200) that lazily loaded contexts take there.
"""

CUDA_CONTEXT_HIGH_BYTES = 1604 * MIB
"""The largest one measured in `data/contexts.csv`: RTX 3090, torch 1.7.1, kernels loaded eagerly."""

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


HOST_UPDATE_BYTES_PER_SECOND = 25.6e9
"""At which a GPU's host reads and writes its memory in an optimizer's update, where nobody measured it.

Half the peak of two channels of DDR4-3200, which a desktop has; assumed, not measured."""

CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""8.125 MiB: ":4096:2:16:8". Source: torch CublasHandlePool.cpp, parseChosenWorkspaceSize; 8,519,680 B stand
in public memory snapshots of Ampere cards (pytorch issue 95668)."""

HOPPER_CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""Compute capability 9.0 and later. Source: as above, pytorch pull request 89027; on Blackwell the default went
back and forth (pull requests 175344, 182669)."""

_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""By compute capability; 2048 elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaContext:
    """What a CUDA context with torch takes of the device's memory beside torch's allocator.

    It holds the driver's state, the stacks of all SMs and the kernels loaded so far, those of cuBLAS and cuDNN
    among them. Not in it: NCCL's buffers and other libraries' own allocations.
    """

    context_bytes: int
    """The median of what was measured."""
    low_bytes: int
    high_bytes: int
    source: str
    is_measured: bool
    """Whether measured on this machine."""


REGION_SECONDS = 0.6e-3
"""Host time of one recomputed region beyond running its ops again, on a machine nobody calibrated.

Measured: forward and backward of a small `nn.TransformerEncoderLayer`, non-reentrant checkpoint (1.69 ms) less
plain (0.76 ms) less one forward (0.32 ms); torch 2.13, 2 cores of an AMD EPYC (family 25). One linear layer
with its activation took 0.2 ms, six took 0.4 ms: it grows with the tensors saved inside.
"""

RNG_STASH_SECONDS = 0.05e-3
"""Host time of saving and restoring one generator's state for one region; measured as above, 0.02 to 0.06 ms.

On CUDA the device's generator is saved beside the host's; the second is assumed to cost the same, not measured.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """What Python, autograd and torch's dispatcher take on the host, beside the work of ops."""

    forward_seconds: NonNegativeFloat
    """Per op of forward, the calls of modules around it included."""
    backward_seconds: NonNegativeFloat
    """Per op of backward."""
    optimizer_seconds: NonNegativeFloat
    """Per op of the optimizer."""
    region_seconds: NonNegativeFloat = REGION_SECONDS
    """Per recomputed region, beside its ops."""
    rng_stash_seconds: NonNegativeFloat = RNG_STASH_SECONDS
    """Per random generator whose state is kept for a region."""

    @classmethod
    def of_launch(cls, launch_seconds: float) -> Dispatch:
        """Every op at the time of a bare one, where nothing else was measured."""
        return cls(
            forward_seconds=launch_seconds, backward_seconds=launch_seconds, optimizer_seconds=launch_seconds
        )


NETWORK_BYTES_PER_SECOND = 12.5e9
"""Between machines where nothing is said: 100 Gbit/s, a common rate of a cloud's GPU machines. A choice."""

NCCL_EFFICIENCY = 0.8
"""Part of a link's peak that a large all-reduce comes to. nccl-tests on eight A100 SXM, as published: 230 to
240 of 300 GB/s. Not measured by this project."""

MEASURED_BUSY = (
    "measured on this machine while other work kept it busy; `brimful calibrate --force` measures again"
)
"""The source of times that may be far off."""

GLOO_BYTES_PER_SECOND = 1.1e9
"""Two processes of one CPU machine; an all-reduce of 1 to 64 MiB over gloo's loopback came to 0.87 to 1.13 GB/s
(AMD EPYC, 2 cores, torch 2.13)."""

_NVLINK_JOINS_ALL = ("SXM", "H200", "B200")
"""Of names: boards whose GPUs are all joined by NVLink."""


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
    measured_host_update_bytes_per_second: float | None = None
    """At which the host of a GPU reads and writes its memory in an optimizer's update; None if not known."""
    nvlink_bytes_per_second: float | None = None
    """Peak rate to other GPUs of the machine, one way; None without NVLink, and on a CPU."""
    nvlink_joins_all: bool = False
    """Whether it joins all GPUs of a machine (SXM boards), or two by a bridge."""
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND
    """Between machines, one way."""
    context_bytes: int
    """What a CUDA context with torch takes outside the allocator; 0 on a CPU. See `CudaContext`."""
    context_low_bytes: int
    context_high_bytes: int
    context_source: str
    """Where the context's figures are from."""
    launch_seconds: float
    """Least time per op in eager PyTorch, called without autograd or modules around it."""
    dispatch: Dispatch
    """What the host takes per op and per recomputed region, with all that is around an op."""
    curves: tuple[RateCurve, ...] = ()
    """Time by amount of work, for each kind that was measured; none of a GPU that only the table knows."""
    page_fault_seconds_per_byte: float = 0.0
    """What the first touch of memory adds on a CPU, where the C library asks the system for it."""
    source: str
    """Where the row is from."""
    confidence: str
    """"high", "medium" or "low"."""

    @property
    def was_measured_busy(self) -> bool:
        """Whether its times were measured while other work kept it busy, and may be far off."""
        return MEASURED_BUSY in self.source

    def peer_bytes_per_second(self, ranks: int, nodes: int) -> float:
        """At what rate each rank sends to the next while all of them reduce together.

        Args:
            ranks: In all.
            nodes: Machines among which they are divided.

        Returns:
            Bytes per second, one way, by the slowest link of the ring.
        """
        if self.kind == "cpu":
            return GLOO_BYTES_PER_SECOND
        of_machine = self.host_link_bytes_per_second or self.network_bytes_per_second
        if self.nvlink_bytes_per_second is not None and (self.nvlink_joins_all or ranks // nodes <= 2):
            of_machine = self.nvlink_bytes_per_second
        of_machine *= NCCL_EFFICIENCY
        return of_machine if nodes == 1 else min(of_machine, self.network_bytes_per_second)

    @property
    def host_update_bytes_per_second(self) -> float:
        """The same, or what it is assumed to be."""
        return self.measured_host_update_bytes_per_second or HOST_UPDATE_BYTES_PER_SECOND

    @property
    def threads_per_multiprocessor(self) -> int | None:
        """The most threads resident on a multiprocessor at once; None on a CPU.

        Source: CUDA C programming guide, technical specifications per compute capability.
        """
        if self.compute_capability is None:
            return None
        return _THREADS_PER_MULTIPROCESSOR.get(self.compute_capability, 2048)

    @property
    def cublas_workspace_bytes(self) -> int:
        """What cuBLAS takes from torch's allocator for each thread that multiplies matrices."""
        is_hopper_or_later = self.compute_capability is not None and self.compute_capability >= (9, 0)
        return HOPPER_CUBLAS_WORKSPACE_BYTES if is_hopper_or_later else CUBLAS_WORKSPACE_BYTES

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

    def peak_flops_per_second(self, precision: Precision) -> float | None:
        """The rate that model FLOPs utilisation is a part of: the best there is for matmuls in a precision.

        Args:
            precision: Of the matmuls.

        Returns:
            A GPU's published dense peak, or what large matmuls achieved on a calibrated CPU; None for a CPU
            that nobody calibrated.
        """
        if self.kind == "cpu" and not self.curves:
            return None
        return self.flops_per_second(precision.autocast_dtype or "float32", precision)

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


def find_device(name: str, *, capacity_bytes: int | None = None, torch_version: str | None = None) -> Device:
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
        torch_version: Decides what the CUDA context takes, such as "2.13.0"; the newest where not given.

    Returns:
        The row, or this machine's CPU with stated default rates.

    Raises:
        UnknownNameError: No row has this name; says the nearest.
        UsageError: Several rows with different memory have it; lists them. Or `torch_version` is no version.
    """
    device = _cpu() if _squeezed(name) == "cpu" else _choose(name, _rows_named(name), capacity_bytes)
    if torch_version is not None:
        device = with_context(device, cuda_context(device, torch_version))
    return device if capacity_bytes is None else replace(device, capacity_bytes=capacity_bytes)


def cuda_context(device: Device, torch_version: str | None = None) -> CudaContext:
    """What a CUDA context takes on `device` according to published measurements.

    Of the rows of `data/contexts.csv` for this version of torch the nearest is taken: this GPU's, else its
    architecture's, else that of the way torch loads kernels, else the stated default. Since CUDA 11.7 kernels
    are loaded at first use, by default since torch 1.13 (pytorch #86509): that made contexts smaller.

    Most rows are computed from texts of torch's `OutOfMemoryError`, which since torch 2.1 (pytorch #99699) say
    what NVML shows for the process: less what the allocator holds, that is the context of a real training or
    inference run, to about 10 MiB. With three measurements or more the interval spans them; with fewer it is
    at least 25 % either way, a little more than the nine of the T4 lie from their median.

    Args:
        device: A GPU, or the CPU, which has no context.
        torch_version: Such as "2.13.0" or "2.13.0+cu130"; the newest where not given.

    Returns:
        Its size, interval and source; nothing of it is measured here.

    Raises:
        UsageError: `torch_version` is no version.

    Source: the rows name theirs.
    """
    if device.kind == "cpu":
        return _NO_CONTEXT
    version = _NEWEST if torch_version is None else _major_minor(torch_version)
    return _nearest_context(_contexts(), device.name, device.architecture, version)


def with_context(device: Device, context: CudaContext) -> Device:
    """The device with another figure for its CUDA context, such as a measured one."""
    return replace(
        device,
        context_bytes=context.context_bytes,
        context_low_bytes=context.low_bytes,
        context_high_bytes=context.high_bytes,
        context_source=context.source,
    )


_NO_CONTEXT = CudaContext(
    context_bytes=0, low_bytes=0, high_bytes=0, source="a CPU has no CUDA context", is_measured=False
)

_Version = tuple[float, float]
_NEWEST: _Version = (math.inf, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ContextRow:
    """One row of `data/contexts.csv`."""

    gpus: tuple[str, ...]
    """Names of `data/gpus.csv`; empty: all."""
    architecture: str
    """Empty: all."""
    torch_from: _Version
    torch_to: _Version
    """The first version it does not apply to."""
    context: CudaContext

    def applies(self, name: str, architecture: str, version: _Version) -> bool:
        """Whether it may be used for this GPU and this version of torch."""
        is_of_gpu = name in self.gpus if self.gpus else self.architecture in ("", architecture)
        return is_of_gpu and self.torch_from <= version < self.torch_to

    @property
    def specificity(self) -> int:
        """2: of a GPU; 1: of an architecture; 0: of all."""
        return 2 if self.gpus else int(bool(self.architecture))


def _nearest_context(
    rows: tuple[_ContextRow, ...], name: str, architecture: str, version: _Version
) -> CudaContext:
    applicable = [row for row in rows if row.applies(name, architecture, version)]
    if applicable:
        return max(applicable, key=lambda row: row.specificity).context
    return CudaContext(
        context_bytes=CUDA_CONTEXT_BYTES,
        low_bytes=0,
        high_bytes=CUDA_CONTEXT_HIGH_BYTES,
        source="default, neither measured nor published",
        is_measured=False,
    )


@cache
def _contexts() -> tuple[_ContextRow, ...]:
    return tuple(_context_row(cells) for cells in _read_table("contexts.csv"))


def _context_row(cells: dict[str, str]) -> _ContextRow:
    start, end = cells["torch_from"], cells["torch_to"]
    return _ContextRow(
        gpus=_listed(cells["gpu"]),
        architecture=cells["architecture"],
        torch_from=_major_minor(start) if start else (0, 0),
        torch_to=_major_minor(end) if end else (math.inf, math.inf),
        context=CudaContext(
            context_bytes=int(cells["context_bytes"]),
            low_bytes=int(cells["low_bytes"]),
            high_bytes=int(cells["high_bytes"]),
            source=f"{cells['source']}; {cells['confidence']} confidence",
            is_measured=False,
        ),
    )


def _major_minor(version: str) -> _Version:
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise UsageError(f"{version!r} is not a version of torch. Write one such as 2.13.0.")
    return int(match[1]), int(match[2])


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
    return tuple(_row(cells) for cells in _read_table("gpus.csv"))


def _read_table(name: str) -> Iterator[dict[str, str]]:
    text = resources.files("brimful").joinpath("data", name).read_text(encoding="utf-8")
    return csv.DictReader(text.splitlines())


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
    context = _nearest_context(_contexts(), name, architecture, _NEWEST)
    device = Device(
        name=name,
        kind="cuda",
        architecture=architecture,
        compute_capability=(int(major), int(minor)),
        sm_count=int(cells["sm_count"]),
        capacity_bytes=capacity_bytes,
        memory_bandwidth_bytes_per_second=float(cells["memory_bandwidth_bytes_per_second"]),
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
        dispatch=Dispatch.of_launch(CUDA_LAUNCH_SECONDS),
        source=source,
        confidence=confidence,
    )
    return _Row(device=device, aliases=_listed(cells["aliases"]), marketed_bytes=marketed_bytes)


def _optional(cell: str) -> float | None:
    return float(cell) if cell else None


def _listed(cell: str) -> tuple[str, ...]:
    aliases: Iterable[str] = (alias.strip() for alias in cell.split(";"))
    return tuple(alias for alias in aliases if alias)


def memory_limits_bytes(
    membership: Path = Path("/proc/self/cgroup"), mounts: Path = Path("/sys/fs/cgroup")
) -> list[int]:
    """What control groups permit this process, as a container or a batch system sets it; none elsewhere.

    Source: cgroups(7); "memory.max" of version 2, "memory.limit_in_bytes" of version 1, which counts as far as
    the groups around it permit.

    Args:
        membership: Lists the groups this process is in.
        mounts: Where they are. In a container its own group may be at the root.

    Returns:
        Every limit that is set, in bytes.
    """
    found: list[int] = []
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _hierarchy, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root, name = (mounts / "memory", "memory.limit_in_bytes") if controllers else (mounts, "memory.max")
            own = root / path.lstrip("/")
            for group in (own, *own.parents):
                with suppress(OSError, ValueError):  # no such group here, or "max"
                    found.append(int((group / name).read_text()))
                if group == root:
                    break
    return found


def _cpu() -> Device:
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
        context_bytes=_NO_CONTEXT.context_bytes,
        context_low_bytes=_NO_CONTEXT.low_bytes,
        context_high_bytes=_NO_CONTEXT.high_bytes,
        context_source=_NO_CONTEXT.source,
        launch_seconds=CPU_LAUNCH_SECONDS,
        dispatch=Dispatch.of_launch(CPU_LAUNCH_SECONDS),
        source="capacity from the operating system and its control groups; rates are defaults, not measured",
        confidence="low",
    )
