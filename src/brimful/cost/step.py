"""The time of one optimizer step, from its trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from brimful.cost.input_copies import INPUT_COPY, copied_input_bytes, input_copy_seconds
from brimful.cost.kinds import base_name
from brimful.cost.queue import DEVICE, LinkOp, finish_seconds, synchronizes
from brimful.cost.regions import NESTED_FORWARD_SECONDS, ops_seen_by_saving, region_seconds
from brimful.cost.roofline import Roofline, modules_of_native_loops
from brimful.cost.time_shares import LINK, time_shares
from brimful.devices import Device
from brimful.memory import LINK_USES
from brimful.settings import Parallelism, Settings
from brimful.trace import Category, Op, Phase, Trace
from brimful.trace.ddp import BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Predicted time of one optimizer step with all its micro-batches, in seconds."""

    forward_seconds: float
    backward_seconds: float
    """Time of backward, without recomputation."""
    recompute_seconds: float
    """Time of recomputed ops in backward, and of the Python code around each recomputed region."""
    optimizer_seconds: float
    communication_seconds: float = 0.0
    """Time of communication between ranks that does not overlap with computation."""
    dtypes_at_fp32_rate: tuple[str, ...] = ()
    """Types without a known rate on the device; priced as float32, which may be inaccurate."""
    kernel_seconds: tuple[tuple[str, float], ...] = ()
    """The whole step by class of kernel, longest first; "host" is time in which a GPU waits for its host,
    "input_copy" that of copying batches from pageable memory, and "communication" as above."""
    link_seconds: float = 0.0
    """What copies of offloaded tensors add to the step; part of "host" in `kernel_seconds`."""

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """Fractions of the step's time by kind of operation, largest first; see `time_shares`."""
        host = dict(self.kernel_seconds).get("host", 0.0)
        waited = min(self.link_seconds, host)
        return time_shares((*self.kernel_seconds, ("host", -waited), (LINK, waited)))

    @property
    def total_seconds(self) -> float:
        """Time of the whole step."""
        return (
            self.forward_seconds
            + self.backward_seconds
            + self.recompute_seconds
            + self.optimizer_seconds
            + self.communication_seconds
        )


_LINK_USES = tuple(LINK_USES.values())
_LINK_OF = {name: index for index, name in enumerate(LINK_USES)}

_SYNCHRONIZES = len(_LINK_USES)
"""In `_Step.link`: the host waits for the op."""

_PARTS = 4
_FORWARD, _BACKWARD, _RECOMPUTE, _OPTIMIZER = range(_PARTS)
_PART_OF_PHASE = {
    Phase.EMBEDDING: _FORWARD,
    Phase.FORWARD: _FORWARD,
    Phase.BACKWARD: _BACKWARD,
    Phase.OPTIMIZER: _OPTIMIZER,
}


def step_seconds(trace: Trace, device: Device) -> StepTime:
    """Predicted time of a steady step: the last one captured.

    Its last captured micro-batch stands for all that were not captured, up to
    `settings.gradient_accumulation_steps`. On a CPU one op follows another, and the times add up. On CUDA the
    host fills a queue that the GPU works off, and copies between device and host overlap with it; the step ends
    when the GPU does, and what an op adds to that moment is its part. Waiting for a copy is forward's or
    backward's.

    The ops of the trace follow the decisions of `trace.device_kind`, wherever they are timed.
    """
    return StepTimer(trace).on(device)


class StepTimer:
    """Predicts a step's time on one device after another; what does not depend on the device is done once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._timed = _TimedOps.of(trace)

    def on(self, device: Device) -> StepTime:
        """The time on a device; see `step_seconds`."""
        return _seconds_of(self._trace, self._timed, device)


def _seconds_of(trace: Trace, timed: _TimedOps, device: Device) -> StepTime:
    roofline = Roofline.of(trace, device)
    step = _Step.of(trace, timed, roofline, device)
    link_seconds = 0.0
    if device.kind == "cuda":
        order = step.order
        host, work, link_ops = step.host_seconds[order], step.work_seconds[order], step.link_ops(order)
        ends = finish_seconds(host, work, link_ops)
        if any(each.copy_seconds for each in link_ops):
            at_once = [each._replace(copy_seconds=each.copy_seconds and 0.0) for each in link_ops]
            link_seconds = float(ends[-1] - finish_seconds(host, work, at_once)[-1])
        seconds, part = np.diff(ends, prepend=0.0), step.part[order]
    else:
        seconds, part = (step.host_seconds + step.work_seconds) * step.times, step.part
    forward, backward, recompute, optimizer = np.bincount(part, weights=seconds, minlength=_PARTS).tolist()
    communication = _communication_seconds(trace, device, forward, backward + recompute)
    return StepTime(
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=recompute,
        optimizer_seconds=optimizer,
        communication_seconds=communication,
        dtypes_at_fp32_rate=roofline.dtypes_at_fp32_rate,
        kernel_seconds=_by_class(step, float(seconds.sum()), communication),
        link_seconds=link_seconds,
    )


def _by_class(step: _Step, seconds: float, communication: float) -> tuple[tuple[str, float], ...]:
    """Seconds of a step by class; what the device's work does not explain is the host's."""
    waited = max(seconds - sum(step.class_seconds.values()), 0.0)
    found = {**step.class_seconds, "host": waited, "communication": communication}
    longest_first = sorted(found.items(), key=lambda each: each[1], reverse=True)
    return tuple((name, each) for name, each in longest_first if each)


def least_host_update_seconds(trace: Trace, device: Device, state_bytes: int) -> float:
    """The least seconds by which a step is longer if its optimizer computes on the host.

    State is read and written once, as are parameters, and gradients are read. `trace` is of one rank, with its
    optimizer on the device; `state_bytes` is the least that an optimizer which may be chosen keeps.
    """
    moved_bytes = 2 * state_bytes + 3 * gradient_bytes(trace)
    on_device = step_seconds(trace, device).optimizer_seconds
    return moved_bytes / device.host_update_bytes_per_second - on_device


def _communication_seconds(
    trace: Trace, device: Device, forward_seconds: float, backward_seconds: float
) -> float:
    """Time of communication beyond the work that it overlaps with.

    DDP averages gradients during the last micro-batch's backward, except for the last bucket. FSDP2 gathers
    and reduces units during the work of others, except for the first; ZeRO's stage 3 is assumed to do so too.
    Stages 1 and 2 do not overlap with anything. Nor does a CPU: the processors that compute also send.
    """
    settings = trace.settings
    if settings.world_size == 1:
        return 0.0
    rate = device.peer_bytes_per_second(settings.world_size, settings.num_nodes)
    share = (settings.world_size - 1) / settings.world_size
    if settings.parallelism is Parallelism.DDP:
        sent_bytes = 2 * share * gradient_bytes(trace)  # around a ring twice
        alone_bytes = min(BUCKET_BYTES, sent_bytes)
        beside_seconds = backward_seconds / settings.gradient_accumulation_steps
    elif settings.parallelism.is_zero:
        sent_bytes = share * gradient_bytes(trace) * _zero_rounds(settings)
        is_beside = settings.parallelism is Parallelism.ZERO3
        alone_bytes = min(BUCKET_BYTES, sent_bytes) if is_beside else sent_bytes
        beside_seconds = forward_seconds + backward_seconds if is_beside else 0.0
    else:
        amounts = [share * each for each in _collective_bytes(trace)]
        sent_bytes, alone_bytes = sum(amounts), max(amounts, default=0.0)
        if settings.offload_parameters and device.host_link_bytes_per_second is not None:
            # of each amount a rank's own part goes over its link to the host, before or after
            rate = 1 / (1 / rate + 1 / (settings.world_size - 1) / device.host_link_bytes_per_second)
        beside_seconds = forward_seconds + backward_seconds
    if device.kind == "cpu":
        return sent_bytes / rate
    return max(sent_bytes / rate - beside_seconds, alone_bytes / rate)


def _zero_rounds(settings: Settings) -> int:
    """How often the bytes of all gradients go around the ring in a step.

    Stages 1 and 2 sum buckets of gradients with an all-reduce, twice around, the second in each micro-batch,
    and gather the parameters once; the third gathers them in forward and in backward, and reduces, in each.
    """
    micro_batches = settings.gradient_accumulation_steps
    return {
        Parallelism.ZERO1: 3,
        Parallelism.ZERO2: 2 * micro_batches + 1,
        Parallelism.ZERO3: 3 * micro_batches,
    }[settings.parallelism]


def _collective_bytes(trace: Trace) -> Iterator[float]:
    """Bytes of each collective of a step, including those of micro-batches that were not captured."""
    last_step, last_micro_batch = trace.captured_steps - 1, trace.captured_micro_batches - 1
    repeats = trace.settings.gradient_accumulation_steps - last_micro_batch
    for op in trace.ops:
        if op.step != last_step or not op.name.startswith("c10d."):
            continue
        is_repeated = op.micro_batch == last_micro_batch
        for _ in range(repeats if is_repeated else 1):
            yield max(op.read_bytes, op.written_bytes)


def gradient_bytes(trace: Trace) -> int:
    """Bytes of the gradients that the ranks average in a step."""
    last = trace.captured_steps - 1
    return sum(
        storage.size_bytes
        for storage in trace.storages
        if storage.category is Category.GRADIENTS
        and storage.op is not None
        and trace.ops[storage.op].step == last
        and trace.ops[storage.op].phase is not Phase.SETUP
    )


_KIND = attrgetter(
    "name", "dtype", "phase", "recomputed", "on_host", "compiled", "flops", "read_bytes", "written_bytes",
    "weight_bytes", "extents",
)  # fmt: skip
"""What decides an op's time on a device, but for the module in which a loop in C++ may run it."""


@dataclass(frozen=True, slots=True)
class _TimedOps:
    """The ops of the last captured step (N), of which a model repeats most: K kinds take different times."""

    kinds: tuple[Op, ...]
    """One op of each kind, in the order in which they come, (K,)."""
    kind: NDArray[np.int64]
    """(N,)"""
    micro_batch: NDArray[np.int64]
    """(N,)"""
    input_bytes: NDArray[np.int64]
    """Bytes of the batch that the host copies to the device at each op, (N,)."""
    is_seen: NDArray[np.bool_]
    """Whether selective checkpointing's dispatch mode sees it in the forward, (N,)."""

    @classmethod
    def of(cls, trace: Trace) -> _TimedOps:
        last_step, loops = trace.captured_steps - 1, modules_of_native_loops(trace)
        places = [
            place for place, op in enumerate(trace.ops) if op.step == last_step and op.phase in _PART_OF_PHASE
        ]
        timed = [trace.ops[place] for place in places]
        copied = copied_input_bytes(trace)
        numbers: dict[object, int] = {}
        kinds: list[Op] = []
        kind: list[int] = []
        for op in timed:
            key = (_KIND(op), op.module) if op.module in loops else _KIND(op)
            number = numbers.setdefault(key, len(kinds))
            if number == len(kinds):
                kinds.append(op)
            kind.append(number)
        micro_batch = np.array([op.micro_batch for op in timed], dtype=np.int64)
        input_bytes = np.array([copied.get(place, 0) for place in places], dtype=np.int64)
        is_seen = np.array(ops_seen_by_saving(trace), dtype=np.bool_)[places]
        return cls(tuple(kinds), np.array(kind, dtype=np.int64), micro_batch, input_bytes, is_seen)


@dataclass(frozen=True, slots=True)
class _Step:
    """What is timed of the last captured step, in its order: ops, and the beginnings of recomputations (N)."""

    part: NDArray[np.int64]
    """Part of the step's time to which each counts, (N,)."""
    micro_batch: NDArray[np.int64]
    """(N,)"""
    host_seconds: NDArray[np.float64]
    """(N,); on a CPU without the launch, which the work has in it."""
    work_seconds: NDArray[np.float64]
    """(N,); none where a recomputation begins."""
    link: NDArray[np.int64]
    """An index into `_LINK_USES` where an op begins copies or waits for them, `_SYNCHRONIZES`, or -1, (N,)."""
    link_seconds: NDArray[np.float64]
    """Seconds of the copy that an op begins, (N,)."""
    repeated_micro_batch: int
    """Index of the micro-batch that stands for those not captured."""
    repeats: int
    """How often it runs, at least 1."""
    class_seconds: dict[str, float]
    """The device's work by class of kernel."""

    @classmethod
    def of(cls, trace: Trace, timed: _TimedOps, roofline: Roofline, device: Device) -> _Step:
        last_micro_batch = trace.captured_micro_batches - 1
        kinds, kind, micro_batch = timed.kinds, timed.kind, timed.micro_batch
        part = np.array(
            [_RECOMPUTE if op.recomputed else _PART_OF_PHASE[op.phase] for op in kinds], dtype=np.int64
        )[kind]
        parts = [roofline.work_parts(op) for op in kinds]
        work = np.array([sum(seconds for _, seconds in each) for each in parts], dtype=np.float64)[kind]
        host = np.array([roofline.host_seconds(op) for op in kinds], dtype=np.float64)[kind]
        if device.kind == "cpu":
            host -= device.launch_seconds
        selective_forward, selective_recompute = device.dispatch.selective_seconds
        host += selective_forward * timed.is_seen
        link = np.array([_link_of(op) for op in kinds], dtype=np.int64)[kind]
        if device.kind == "cuda":
            work += (input_copies := input_copy_seconds(timed.input_bytes, device))
            link[input_copies > 0] = _SYNCHRONIZES
        else:
            input_copies = np.zeros_like(work)
        link_seconds = np.array([op.written_bytes for op in kinds], dtype=np.float64)[kind]
        if device.host_link_bytes_per_second is not None:
            link_seconds /= device.host_link_bytes_per_second
        places, shares = _region_places(part, micro_batch)
        regions = len(trace.settings.recomputed) + trace.own_checkpoints
        regions_seconds = regions * region_seconds(device)
        regions_seconds += selective_recompute * (timed.is_seen & (micro_batch == last_micro_batch)).sum()
        regions_seconds += len(trace.settings.nested) * NESTED_FORWARD_SECONDS
        repeats = max(trace.settings.gradient_accumulation_steps - last_micro_batch, 1)
        is_repeated = (micro_batch == last_micro_batch) & (part != _OPTIMIZER)
        times = np.where(is_repeated, repeats, 1)
        return cls(
            part=np.insert(part, places, _RECOMPUTE),
            micro_batch=np.insert(micro_batch, places, micro_batch[places]),
            host_seconds=np.insert(host, places, shares * regions_seconds),
            work_seconds=np.insert(work, places, 0.0),
            link=np.insert(link, places, -1),
            link_seconds=np.insert(link_seconds, places, 0.0),
            repeated_micro_batch=last_micro_batch,
            repeats=repeats,
            class_seconds={
                **_class_seconds(parts, kind, times),
                INPUT_COPY: float((input_copies * times).sum()),
            },
        )

    def link_ops(self, order: NDArray[np.int64]) -> list[LinkOp]:
        """The ops that begin copies or wait for them, of positions in the order in which they run."""
        link = self.link[order]
        found = []
        for position in np.flatnonzero(link >= 0).tolist():
            if link[position] == _SYNCHRONIZES:
                found.append(LinkOp(position=position, way=DEVICE, copy_seconds=None))
                continue
            use = _LINK_USES[link[position]]
            seconds = float(self.link_seconds[order[position]]) if use.begins else None
            found.append(
                LinkOp(
                    position=position,
                    way=use.way,
                    copy_seconds=seconds,
                    follows=use.follows,
                    host_waits=use.host_waits,
                )
            )
        return found

    @property
    def is_repeated(self) -> NDArray[np.bool_]:
        """Whether each is of the micro-batch that stands for others, (N,)."""
        repeated: NDArray[np.bool_] = (self.micro_batch == self.repeated_micro_batch) & (
            self.part != _OPTIMIZER
        )
        return repeated

    @property
    def times(self) -> NDArray[np.int64]:
        """How often each happens, (N,)."""
        return np.where(self.is_repeated, self.repeats, 1)

    @property
    def order(self) -> NDArray[np.int64]:
        """Positions as they happen, those of the repeated micro-batch again and again."""
        positions = np.arange(len(self.part))
        repeated, once = positions[self.is_repeated], positions[~self.is_repeated]
        first = int(repeated[0]) if len(repeated) else 0
        return np.concatenate([once[once < first], np.tile(repeated, self.repeats), once[once >= first]])


def _class_seconds(
    parts: Sequence[Sequence[tuple[str, float]]], kind: NDArray[np.int64], times: NDArray[np.int64]
) -> dict[str, float]:
    """Seconds of kernels by class, in the order in which classes come, added up in the order of ops.

    `parts` has the class and seconds of the kernels of each kind of op, (K,); `kind` the kind of each op, (N,),
    and `times` how often each op happens, (N,).
    """
    kernels = [kernel for of_kind in parts for kernel in of_kind]
    names = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in kernels))}
    counts = np.array([len(of_kind) for of_kind in parts], dtype=np.int64)
    of_each = counts[kind]
    op = np.repeat(np.arange(len(kind)), of_each)
    within = np.arange(len(op)) - (np.cumsum(of_each) - of_each)[op]
    kernel = (np.cumsum(counts) - counts)[kind[op]] + within
    classes = np.array([names[name] for name, _ in kernels], dtype=np.int64)[kernel]
    seconds = np.array([seconds for _, seconds in kernels], dtype=np.float64)[kernel] * times[op]
    totals = np.bincount(classes, weights=seconds, minlength=len(names)).tolist()
    return dict(zip(names, totals, strict=True))


def _link_of(op: Op) -> int:
    if synchronizes(base_name(op.name)):
        return _SYNCHRONIZES
    return _LINK_OF.get(op.name, -1)


def _region_places(
    part: NDArray[np.int64], micro_batch: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Before which ops recomputations begin, and what share of their micro-batch's regions begins there.

    The regions are spread evenly over the places where ops start to be recomputed. Where no op is recomputed, a
    region still costs its work in Python, before the last op of its micro-batch.
    """
    begins = part == _RECOMPUTE
    begins[1:] &= part[:-1] != _RECOMPUTE
    places: list[int] = []
    shares: list[float] = []
    for each in np.unique(micro_batch):
        here = np.flatnonzero(begins & (micro_batch == each))
        if not len(here):
            here = np.flatnonzero((part != _OPTIMIZER) & (micro_batch == each))[-1:]
        places += here.tolist()
        shares += [1 / len(here)] * len(here)
    return np.array(places, dtype=np.int64), np.array(shares, dtype=np.float64)
