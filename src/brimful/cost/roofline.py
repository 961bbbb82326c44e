"""The least time an op can take: by its arithmetic, by its memory traffic, by launching it."""

from __future__ import annotations

from brimful.hardware import Device
from brimful.settings import Precision
from brimful.trace import Op

COMPUTE_EFFICIENCY = 0.75
"""Part of a GPU's peak arithmetic rate that matmuls, convolutions and attention reach; one for all models.

torch's own estimator takes 75 % (`torch/utils/_runtime_estimation.py`, torch 2.13). The best bf16 matmul of
many shapes reaches 80.3 % on an H100 SXM, 81.1 % on an A100 PCIe and 86.9 % on an A100 SXM ("Maximum Achievable
Matmul FLOPS" in stas00/ml-engineering); a model's shapes are not the best ones. For other GPUs, float32 and
convolutions it is assumed, not measured.
"""

BANDWIDTH_EFFICIENCY = 0.85
"""Part of a GPU's peak memory bandwidth that elementwise ops, norms and optimizers reach; one for all models.

An H100 SXM copies at 2903 of 3350 GB/s, 86.7 % (aigatech/vpbenchmarking, "GPU D2D"). For other GPUs and for ops
that read and write less evenly it is assumed, not measured.
"""


def op_seconds(op: Op, device: Device, precision: Precision = Precision.FP32) -> float:
    """Predicted seconds of one op: the longest of arithmetic, traffic and launch.

    max(flops / (rate · efficiency), bytes / (bandwidth · efficiency), launch). The rates of a CPU are
    achieved ones, so its efficiencies are 1. Caches are not modelled: bytes are charged at the memory's rate.

    Args:
        op: The op; its `flops` are 0 where arithmetic never limits.
        device: Where it runs.
        precision: Whether float32 matmuls may round to TF32.

    Returns:
        Seconds, at least `device.launch_seconds`.
    """
    return Roofline(device, precision).op_seconds(op)


class Roofline:
    """The rates of one device in one precision, looked up once for many ops.

    Args:
        device: Where the ops run.
        precision: Whether float32 matmuls may round to TF32.
    """

    def __init__(self, device: Device, precision: Precision) -> None:
        on_gpu = device.kind == "cuda"
        self._device = device
        self._precision = precision
        self._compute_efficiency = COMPUTE_EFFICIENCY if on_gpu else 1.0
        bandwidth_efficiency = BANDWIDTH_EFFICIENCY if on_gpu else 1.0
        self._seconds_per_byte = 1 / (device.memory_bandwidth_bytes_per_second * bandwidth_efficiency)
        self._seconds_per_flop: dict[str, float] = {}
        self._unrated: set[str] = set()

    @property
    def dtypes_at_fp32_rate(self) -> tuple[str, ...]:
        """Types met so far that the device has no rate for; their arithmetic was priced as float32."""
        return tuple(sorted(self._unrated))

    def op_seconds(self, op: Op) -> float:
        """Predicted seconds of one op; the formula is at the function of the same name."""
        seconds = max((op.read_bytes + op.written_bytes) * self._seconds_per_byte, self._device.launch_seconds)
        if op.flops:
            seconds_per_flop = self._seconds_per_flop.get(op.dtype) or self._price(op.dtype)
            seconds = max(seconds, op.flops * seconds_per_flop)
        return seconds

    def _price(self, dtype: str) -> float:
        rate = self._device.flops_per_second(dtype, self._precision)
        if rate is None:
            self._unrated.add(dtype)
            rate = self._device.flops_per_second("float32", Precision.FP32)
            assert rate is not None  # every device has a float32 rate
        seconds_per_flop = 1 / (rate * self._compute_efficiency)
        self._seconds_per_flop[dtype] = seconds_per_flop
        return seconds_per_flop
