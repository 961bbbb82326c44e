"""The time of one op: of its kernels on a GPU, from measured curves or a roofline on a CPU."""

from __future__ import annotations

from brimful.cost.cpu_work import CpuWork
from brimful.cost.gpu_work import GpuWork
from brimful.cost.kinds import base_name
from brimful.cost.regions import COPY_SECONDS
from brimful.devices import Device
from brimful.memory import LINK_USES
from brimful.settings import Precision
from brimful.trace import Op, Phase, Trace

_MULTI_TENSOR = ("_foreach_", "_fused_")
"""Ops on lists of tensors. Dispatch is measured on them on a GPU: its Python runs once for each parameter, and
there are few of them. An optimizer that updates one parameter after another has many plain ops."""

_NATIVE_LOOPS = frozenset({"GRU", "RNN"})
"""Modules that run many ops for each time step on a CPU, in C++ (torch aten/src/ATen/native/RNN.cpp). LSTM runs
oneDNN's kernel instead."""


def is_multi_tensor(base: str) -> bool:
    """Whether an op works on a list of tensors, by `base_name`."""
    return base.startswith(_MULTI_TENSOR)


def modules_of_native_loops(trace: Trace) -> frozenset[str]:
    """`fqn` of modules whose ops a loop in C++ runs on a CPU."""
    return frozenset(fqn for fqn, name in trace.module_classes if name in _NATIVE_LOOPS)


def op_seconds(op: Op, device: Device, precision: Precision = Precision.FP32) -> float:
    """Predicted seconds of one op by itself, its launch included: at least `device.launch_seconds`.

    This is the price of one more op, such as a recomputed one. `step_seconds` lets a GPU's host run ahead, and
    so is less than the sum of this over ops.
    """
    return Roofline(device, precision).op_seconds(op)


class Roofline:
    """The rates of one device in one precision, looked up once for many ops.

    `native_loops` has the `fqn` of modules whose ops a loop in C++ runs; see `of`.
    """

    def __init__(
        self, device: Device, precision: Precision, native_loops: frozenset[str] = frozenset()
    ) -> None:
        self._device = device
        self._precision = precision
        self._gpu = GpuWork(device, precision) if device.kind == "cuda" else None
        self._work = self._gpu or CpuWork(device, precision)
        self._host_seconds_per_byte = 1 / device.host_update_bytes_per_second
        self._flops_per_second: dict[str, float] = {}
        self._fp32_rate = device.fp32_flops_per_second
        self._unrated: set[str] = set()
        self._parts_by_work: dict[tuple[object, ...], tuple[tuple[str, float], ...]] = {}
        self._native_loops = native_loops
        # An op's time in a curve, or the floor of the roofline, has its bare launch already.
        dispatch = device.dispatch
        self._beside_launch = {
            Phase.FORWARD: max(dispatch.forward_seconds - device.launch_seconds, 0.0),
            Phase.BACKWARD: max(dispatch.backward_seconds - device.launch_seconds, 0.0),
            Phase.OPTIMIZER: max(dispatch.optimizer_seconds - device.launch_seconds, 0.0),
        }

    @classmethod
    def of(cls, trace: Trace, device: Device) -> Roofline:
        """The rates for the ops of a trace."""
        loops = modules_of_native_loops(trace) if device.kind == "cpu" else frozenset[str]()
        return cls(device, trace.settings.precision, loops)

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
        """Seconds of the device's own work.

        A copy to or from the host is the link's work, beside a GPU's own. What it takes of the bandwidth of the
        GPU's memory, which ops beside it then lack, is the GPU's.
        """
        return sum(seconds for _, seconds in self.work_parts(op))

    def work_parts(self, op: Op) -> tuple[tuple[str, float], ...]:
        """Seconds of the device's own work by class of kernel, or on a CPU by kind of work."""
        if op.on_host:
            return ()
        phase = op.phase if op.phase in (Phase.OPTIMIZER, Phase.EVALUATION) else None
        amounts = (op.flops, op.read_bytes, op.written_bytes, op.weight_bytes)
        key = (op.name, op.dtype, phase, amounts, op.extents)
        parts = self._parts_by_work.get(key)
        if parts is None:
            parts = self._parts_by_work[key] = self._parts(op)
        return parts

    def copy_seconds(self, size_bytes: int) -> float:
        """Time of a GPU's memory for a copy to or from the host."""
        return 0.0 if self._gpu is None else size_bytes * self._gpu.seconds_per_byte

    def host_seconds(self, op: Op) -> float:
        """Seconds of the host for one op: launch, autograd and Python, and the work of an op on the host."""
        link_use = LINK_USES.get(op.name)
        if link_use is not None and link_use.begins:
            return COPY_SECONDS
        if op.on_host:
            moved_bytes = op.read_bytes + op.written_bytes
            return self._device.launch_seconds + moved_bytes * self._host_seconds_per_byte
        if op.compiled and self._gpu is not None and not (op.read_bytes or op.written_bytes):
            return 0.0  # memory that C++ takes from the allocator
        if op.compiled:
            return self._device.launch_seconds
        if op.module in self._native_loops:
            return max(self._device.dispatch.native_loop_seconds, self._device.launch_seconds)
        phase = Phase.FORWARD if op.recomputed or op.phase is Phase.EMBEDDING else op.phase
        if phase is Phase.OPTIMIZER and self._gpu is not None and not is_multi_tensor(base_name(op.name)):
            return self._device.launch_seconds
        return self._device.launch_seconds + self._beside_launch.get(phase, 0.0)

    def _parts(self, op: Op) -> tuple[tuple[str, float], ...]:
        link_use = LINK_USES.get(op.name)
        if self._gpu is not None and link_use is not None:
            return (("host_copy", self.copy_seconds(op.written_bytes)),) if link_use.begins else ()
        return tuple(self._work.parts(op, self._rate(op.dtype) if op.flops else self._fp32_rate))

    def _rate(self, dtype: str) -> float:
        """Peak FLOP/s of products in a type."""
        rate = self._flops_per_second.get(dtype)
        if rate is None:
            rate = self._device.flops_per_second(dtype, self._precision)
            if rate is None:
                self._unrated.add(dtype)
                rate = self._device.flops_per_second("float32", Precision.FP32)
            assert rate is not None  # every device has a float32 rate
            self._flops_per_second[dtype] = rate
        return rate
