"""The time of one op: from measured curves where the device has them, else a roofline."""

from __future__ import annotations

from brimful.cost.kinds import OTHER, WEIGHT_GRADIENT, Work, work_of
from brimful.cost.regions import COPY_SECONDS
from brimful.devices import Device, RateCurve
from brimful.memory import LINK_USES
from brimful.settings import Precision
from brimful.trace import Op, Phase

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

TILE_OUTPUTS = 64 * 64
"""Results of a product that one multiprocessor computes at a time, at the least.

The smallest of the usual tiles, 256 × 128 to 64 × 64, in NVIDIA's "Matrix Multiplication Background User's
Guide" (tile quantization, "Dimension quantization effects"); a product of fewer tiles than multiprocessors
leaves the others idle. Not measured here.
"""

SPLIT_INNER = 512
"""Length of the inner dimension that a tile is worth splitting at, so that several multiprocessors share it.

That libraries split it where results are few and the inner dimension is long: CUTLASS, "Efficient GEMM in
CUDA", parallelized reductions. At which length is assumed, not measured.
"""

_BYTES_PER_ELEMENT = {"float64": 8, "float16": 2, "bfloat16": 2}
"""Of a result; 4 elsewhere."""

_STANDS_IN = {"attention": "matmul", "recurrent": "matmul", "convolution": "matmul"}
"""Arithmetic kinds whose curve may be missing for a type, and the kind that is measured for most."""


def op_seconds(op: Op, device: Device, precision: Precision = Precision.FP32) -> float:
    """Predicted seconds of one op by itself, its launch included.

    The price of one more op, such as a recomputed one. `step_seconds` lets a GPU's host run ahead, and so is
    less than the sum of this over ops.

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
        self._curves = {curve.kind: curve for curve in device.curves}
        self._compute_efficiency = COMPUTE_EFFICIENCY if on_gpu else 1.0
        bandwidth_efficiency = BANDWIDTH_EFFICIENCY if on_gpu else 1.0
        self._seconds_per_byte = 1 / (device.memory_bandwidth_bytes_per_second * bandwidth_efficiency)
        self._host_seconds_per_byte = 1 / device.host_update_bytes_per_second
        self._seconds_per_flop: dict[str, float] = {}
        self._unrated: set[str] = set()
        self._seconds_by_work: dict[tuple[str, int, int, int, int, str], float] = {}
        # An op's time in a curve, or the floor of the roofline, has its bare launch already.
        dispatch = device.dispatch
        self._beside_launch = {
            Phase.FORWARD: max(dispatch.forward_seconds - device.launch_seconds, 0.0),
            Phase.BACKWARD: max(dispatch.backward_seconds - device.launch_seconds, 0.0),
            Phase.OPTIMIZER: max(dispatch.optimizer_seconds - device.launch_seconds, 0.0),
        }

    @property
    def dtypes_at_fp32_rate(self) -> tuple[str, ...]:
        """Types met so far that the device has no rate for; their arithmetic was priced as float32."""
        return tuple(sorted(self._unrated))

    def op_seconds(self, op: Op) -> float:
        """Predicted seconds of one op by itself; see the function of the same name."""
        if self._device.kind == "cpu":
            return self.work_seconds(op) + self.host_seconds(op) - self._device.launch_seconds
        return max(self.work_seconds(op), self._device.launch_seconds)

    def work_seconds(self, op: Op) -> float:
        """Seconds of the device's own work: from a curve, or max(flops / rate, bytes / bandwidth).

        A copy to or from the host is the link's work, beside a GPU's own. What it takes of the bandwidth of the
        GPU's memory, which ops beside it then lack, is the GPU's.

        On a CPU and in a measured curve at least a bare launch. The rates of a CPU are achieved ones, so its
        efficiencies are 1. Its convolutions copy their operands to another layout first: the two are added.
        """
        if op.on_host:
            return 0.0
        key = (op.name, op.flops, op.read_bytes, op.written_bytes, op.weight_bytes, op.dtype)
        seconds = self._seconds_by_work.get(key)
        if seconds is None:
            seconds = self._seconds_by_work[key] = self._work_seconds(op)
        return seconds

    def copy_seconds(self, size_bytes: int) -> float:
        """What a copy to or from the host takes of the device's own time."""
        return size_bytes * self._seconds_per_byte

    def host_seconds(self, op: Op) -> float:
        """Seconds of the host for one op: launch, autograd and Python by what runs it; of its own, the work."""
        link_use = LINK_USES.get(op.name)
        if link_use is not None and link_use.begins:
            return COPY_SECONDS
        if op.on_host:
            moved_bytes = op.read_bytes + op.written_bytes
            return self._device.launch_seconds + moved_bytes * self._host_seconds_per_byte
        phase = Phase.FORWARD if op.recomputed or op.phase is Phase.EMBEDDING else op.phase
        return self._device.launch_seconds + self._beside_launch.get(phase, 0.0)

    def _work_seconds(self, op: Op) -> float:
        link_use = LINK_USES.get(op.name)
        if self._device.kind == "cuda" and link_use is not None:
            return self.copy_seconds(op.written_bytes) if link_use.begins else 0.0
        work = work_of(op, self._precision)
        moved_bytes = op.read_bytes + op.written_bytes
        curve = self._curve(work)
        least = self._device.launch_seconds if self._device.kind == "cpu" else 0.0
        if not op.flops:
            return (
                max(moved_bytes * self._seconds_per_byte, least)
                if curve is None
                else curve.seconds_at(work.amount)
            )
        streaming = self._curves.get(OTHER)
        moving = (
            moved_bytes * self._seconds_per_byte if streaming is None else streaming.seconds_at(moved_bytes)
        )
        computing = op.flops * self._flop_seconds(op) if curve is None else curve.seconds_at(work.amount)
        if op.weight_bytes and self._device.kind == "cpu":
            gradients = self._curves.get(WEIGHT_GRADIENT) if "backward" in op.name else None
            return computing + moving + (0.0 if gradients is None else gradients.seconds_at(op.weight_bytes))
        return max(computing, moving, least)

    def _curve(self, work: Work) -> RateCurve | None:
        """The curve of a kind, or of the one that stands in for it."""
        curve = self._curves.get(work.kind)
        if curve is None:
            name, colon, dtype = work.kind.partition(":")
            curve = self._curves.get(f"{_STANDS_IN.get(name, name)}:{dtype}" if colon else OTHER)
        return curve

    def _flop_seconds(self, op: Op) -> float:
        """1 / (rate · efficiency · share of the multiprocessors that have a part of a tile to compute)."""
        seconds = self._seconds_per_flop.get(op.dtype) or self._price(op.dtype)
        multiprocessors = self._device.sm_count
        if multiprocessors is None:
            return seconds
        outputs = max(op.written_bytes / _BYTES_PER_ELEMENT.get(op.dtype, 4), 1.0)
        inner = op.flops / 2 / outputs
        parts = max(outputs / TILE_OUTPUTS, 1.0) * max(inner / SPLIT_INNER, 1.0)
        return seconds * max(multiprocessors / parts, 1.0)

    def _price(self, dtype: str) -> float:
        rate = self._device.flops_per_second(dtype, self._precision)
        if rate is None:
            self._unrated.add(dtype)
            rate = self._device.flops_per_second("float32", Precision.FP32)
            assert rate is not None  # every device has a float32 rate
        seconds_per_flop = 1 / (rate * self._compute_efficiency)
        self._seconds_per_flop[dtype] = seconds_per_flop
        return seconds_per_flop
