"""Properties of a device: memory, bandwidth, FLOP/s, links, and the overhead of Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from brimful.arguments import check_fields
from brimful.codec import NonNegativeFloat
from brimful.devices.rate_curves import RateCurve
from brimful.errors import UsageError
from brimful.settings import Precision
from brimful.utils.quantities import MIB

Answer = TypeVar("Answer")

HOST_UPDATE_BYTES_PER_SECOND = 25.6e9
"""Rate at which a GPU's host reads and writes its memory in an optimizer update, if not measured.

Half the peak of two channels of DDR4-3200, which a desktop has; assumed, not measured."""

CUBLAS_WORKSPACE_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
"""cuBLAS's workspace before Hopper, 8.125 MiB: ":4096:2:16:8". Source: torch CublasHandlePool.cpp,
parseChosenWorkspaceSize; 8,519,680 B stand in public memory snapshots of Ampere cards (pytorch issue 95668)."""

HOPPER_CUBLAS_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS's workspace from compute capability 9.0 on. Source: torch CublasHandlePool.cpp, pytorch pull request
89027; on Blackwell the default went back and forth (pull requests 175344, 182669)."""

_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
"""Most threads resident on a multiprocessor, by compute capability; 2048 for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaContext:
    """Device memory of a CUDA context with torch, outside torch's allocator.

    It holds the driver's state, the stacks of all SMs and the kernels loaded so far, including those of cuBLAS
    and cuDNN. It excludes NCCL's buffers and other libraries' own allocations.
    """

    context_bytes: int
    """The median of the measurements."""
    low_bytes: int
    high_bytes: int
    source: str
    is_measured: bool
    """Whether it was measured on this machine."""


REGION_SECONDS = 0.6e-3
"""Host time of one recomputed region beyond running its ops again, on an uncalibrated machine.

Measured: forward and backward of a small `nn.TransformerEncoderLayer`, non-reentrant checkpoint (1.69 ms) less
plain (0.76 ms) less one forward (0.32 ms); torch 2.13, 2 cores of an AMD EPYC (family 25). One linear layer
with its activation took 0.2 ms, six took 0.4 ms: it grows with the tensors saved inside.
"""

RNG_STASH_SECONDS = 0.05e-3
"""Host time of saving and restoring one generator's state for one region; measured as `REGION_SECONDS`, 0.02 to
0.06 ms.

On CUDA the device's generator is saved too; it is assumed to cost the same, not measured.
"""

SELECTIVE_FORWARD_PER_REGION = 0.048
"""Host time that an op takes more in the forward of a unit of which some results are saved, as a fraction of
`region_seconds` of the same host: both are Python of hooks and dispatch modes, without kernels.

Measured: `profiling.dispatch`, blocks of 17 ops and 18 views, two results of each saved; six rounds: 14 to 16
µs an op, a region 306 to 319 µs, 0.043 to 0.049 of it; torch 2.13, 2 cores of an AMD EPYC, not idle.
"""

SELECTIVE_RECOMPUTE_PER_REGION = 0.062
"""Host time that an op takes more in the recomputation of a unit of which some results are saved, as a fraction
of `region_seconds`; measured as `SELECTIVE_FORWARD_PER_REGION`, 18 to 22 µs, 0.058 to 0.068 of a region."""

NATIVE_LOOP_SECONDS = 2.5e-6
"""Host time per op of `nn.GRU` and `nn.RNN` on an uncalibrated CPU, whose loop over time runs in C++.

Measured: `nn.RNN`, 1 sample of 80 steps, width 32, two layers, both ways: 2.3 µs an op forward, 2.7 backward;
torch 2.13, 2 cores of an Intel Xeon.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Host time of Python, autograd and torch's dispatcher, in addition to the work of ops."""

    forward_seconds: NonNegativeFloat
    """Per op of forward, including the calls of modules around it."""
    backward_seconds: NonNegativeFloat
    """Per op of backward."""
    optimizer_seconds: NonNegativeFloat
    """Per op of the optimizer."""
    region_seconds: NonNegativeFloat = REGION_SECONDS
    """Per recomputed region, in addition to its ops."""
    rng_stash_seconds: NonNegativeFloat = RNG_STASH_SECONDS
    """Per random generator whose state is saved for a region."""
    native_loop_seconds: NonNegativeFloat = NATIVE_LOOP_SECONDS
    """Per op of a recurrent layer's loop on a CPU, which C++ runs without Python in between."""
    selective_forward_seconds: NonNegativeFloat | None = None
    """Per op of the forward of a unit of which some results are saved, saved or not, in addition; views around
    it included. None: not measured."""
    selective_recompute_seconds: NonNegativeFloat | None = None
    """The same in the recomputation, per op of the forward."""

    @property
    def selective_seconds(self) -> tuple[float, float]:
        """What the dispatch modes of selective checkpointing add to an op: in forward, in recomputation."""
        forward, recompute = self.selective_forward_seconds, self.selective_recompute_seconds
        return (
            SELECTIVE_FORWARD_PER_REGION * self.region_seconds if forward is None else forward,
            SELECTIVE_RECOMPUTE_PER_REGION * self.region_seconds if recompute is None else recompute,
        )

    @classmethod
    def of_launch(cls, launch_seconds: float) -> Dispatch:
        """The overhead if only the launch time is known: each op takes the time of a bare one."""
        return cls(
            forward_seconds=launch_seconds, backward_seconds=launch_seconds, optimizer_seconds=launch_seconds
        )


NETWORK_BYTES_PER_SECOND = 12.5e9
"""Default network rate between machines: 100 Gbit/s, common for GPU machines in clouds. A choice."""

NCCL_EFFICIENCY = 0.8
"""Fraction of a link's peak that a large all-reduce reaches. nccl-tests on eight A100 SXM, as published: 230 to
240 of 300 GB/s. Not measured by this project."""

MEASURED_BUSY = (
    "measured on this machine while other work kept it busy; `brimful calibrate --force` measures again"
)
"""The source of times that may be inaccurate."""

GLOO_BYTES_PER_SECOND = 1.1e9
"""Rate between two processes of one CPU machine: an all-reduce of 1 to 64 MiB over gloo's loopback reached 0.87
to 1.13 GB/s (AMD EPYC, 2 cores, torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU model, or the CPU of this machine.

    Rates are dense peaks on CUDA, and achieved rates on a calibrated CPU. None means that the hardware lacks
    the format, or that the rate is unknown.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    architecture: str
    """NVIDIA's name of the architecture, such as "Ampere"; the machine type of a CPU."""
    compute_capability: tuple[int, int] | None
    """None on a CPU."""
    sm_count: int | None
    """Streaming multiprocessors; None on a CPU."""
    capacity_bytes: int
    """Memory as the driver reports it, which is less than marketed."""
    memory_bandwidth_bytes_per_second: float
    memory_type: Literal["HBM", "GDDR"] | None = None
    """Type of a GPU's memory, which decides the fractions of its peaks that it reaches; None: by its name."""
    l2_bytes: int = 0
    """Size of a GPU's L2 cache; 0 if not known, and on a CPU."""
    fp32_flops_per_second: float
    tf32_flops_per_second: float | None
    fp16_flops_per_second: float | None
    """Rate of tensor cores with float32 accumulation, as PyTorch's matmuls use them."""
    bf16_flops_per_second: float | None
    host_link_bytes_per_second: float | None
    """Realistic transfer rate between host and device, one way; None on a CPU."""
    measured_host_update_bytes_per_second: float | None = None
    """Rate at which the host of a GPU reads and writes its memory in an optimizer update; None if not known."""
    nvlink_bytes_per_second: float | None = None
    """Peak NVLink rate to other GPUs of the machine, one way; None without NVLink, and on a CPU."""
    nvlink_joins_all: bool = False
    """Whether NVLink connects all GPUs of a machine (SXM boards), or only two by a bridge."""
    network_bytes_per_second: float = NETWORK_BYTES_PER_SECOND
    """Network rate between machines, one way."""
    context_bytes: int
    """Memory of a CUDA context with torch, outside the allocator; 0 on a CPU. See `CudaContext`."""
    context_low_bytes: int
    context_high_bytes: int
    context_source: str
    """Source of the context's figures."""
    launch_seconds: float
    """Least time per op in eager PyTorch, without autograd or modules around it."""
    dispatch: Dispatch
    """Host overhead per op and per recomputed region."""
    curves: tuple[RateCurve, ...] = ()
    """Measured time by amount of work, for each kind of work; empty for a GPU that was not calibrated."""
    source: str
    """Source of the row."""
    confidence: str
    """"high", "medium" or "low"."""
    rates_spread: float = 0.0
    """Standard deviation of the logarithm of its peak rates, where they are derived or depend on the laptop's
    power limit; it widens intervals of time."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def was_measured_busy(self) -> bool:
        """Whether its times were measured while other work kept it busy, so that they may be inaccurate."""
        return MEASURED_BUSY in self.source

    def peer_bytes_per_second(self, world_size: int, num_nodes: int) -> float:
        """The rate at which each rank sends to the next one in an all-reduce.

        Args:
            world_size: Number of ranks.
            num_nodes: Number of machines among which they are divided.

        Returns:
            Bytes per second, one way, over the slowest link of the ring.
        """
        if self.kind == "cpu":
            return GLOO_BYTES_PER_SECOND
        of_machine = self.host_link_bytes_per_second or self.network_bytes_per_second
        if self.nvlink_bytes_per_second is not None and (self.nvlink_joins_all or world_size // num_nodes <= 2):
            of_machine = self.nvlink_bytes_per_second
        of_machine *= NCCL_EFFICIENCY
        return of_machine if num_nodes == 1 else min(of_machine, self.network_bytes_per_second)

    @property
    def host_update_bytes_per_second(self) -> float:
        """Memory rate of optimizer updates on the host: measured, or else assumed."""
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
        """Workspace that cuBLAS takes from torch's allocator, for each thread that runs matmuls."""
        is_hopper_or_later = self.compute_capability is not None and self.compute_capability >= (9, 0)
        return HOPPER_CUBLAS_WORKSPACE_BYTES if is_hopper_or_later else CUBLAS_WORKSPACE_BYTES

    def flops_per_second(self, dtype: str, precision: Precision = Precision.FP32) -> float | None:
        """The peak rate of arithmetic in `dtype`.

        On CUDA without tensor cores for a half type, it is the float32 rate, because matmuls that accumulate
        in float32 run at it: Pascal has no tensor cores (NVIDIA Tesla P100 whitepaper; its doubled half2 rate
        is for accumulating in half), and bfloat16 before Ampere is converted in software
        (`torch.cuda.is_bf16_supported`, `including_emulation`).

        Args:
            dtype: Name of the torch dtype of the arithmetic, such as "float32".
            precision: Whether float32 matmuls may round to TF32; no effect without TF32 hardware.

        Returns:
            FLOP/s; None for a type without a rate in the table.
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
        """The peak rate of arithmetic in a precision, relative to which model FLOPs utilisation is computed.

        Args:
            precision: Precision of the arithmetic.

        Returns:
            A GPU's published dense peak. On a calibrated CPU the highest rate measured, of matmuls or of
            convolutions, which count more operations than Winograd's algorithm runs; None for another CPU.
        """
        dtype = precision.autocast_dtype or "float32"
        if self.kind == "cuda":
            return self.flops_per_second(dtype, precision)
        measured = [curve for curve in self.curves if curve.kind.endswith(f":{dtype}")]
        return max((amount / taken for curve in measured for amount, taken in curve.points), default=None)

    def answer(self, question: Callable[[Device], Answer]) -> Answer:
        """What a question about this device is answered with.

        A capture asks so where an answer depends on few of a device's properties, or only on some of their
        values: devices of the same answer then count as alike, whatever else they differ in.

        Args:
            question: A function of a device.

        Returns:
            What it returns.
        """
        return question(self)

    def check_precision(self, precision: Precision) -> None:
        """Check that the device supports training in `precision`.

        Args:
            precision: The precision to check.

        Raises:
            UsageError: The device does not support it; the message lists the precisions that it supports.
        """
        if not self.supports(precision):
            able = ", ".join(str(p) for p in Precision if self.supports(p))
            raise UsageError(f"{self.name} has no {precision}. It has: {able}.")

    def supports(self, precision: Precision) -> bool:
        """Whether the device supports training in `precision`.

        On CUDA: FP16 everywhere; BF16 and TF32 from compute capability 8.0 (NVIDIA A100 whitepaper). On a CPU
        autocast supports both half types, which need not be faster; there is no TF32.
        """
        if self.compute_capability is None:
            return precision is not Precision.TF32
        if precision in (Precision.BF16, Precision.TF32):
            return self.compute_capability >= (8, 0)
        return True
