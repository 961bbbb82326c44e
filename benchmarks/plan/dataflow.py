"""What each op of a captured step reads and makes, which a trace does not say.

A trace has the ops of a step and when each block of memory is allocated and freed. Which blocks an op reads is
seen while it is captured, by a recorder that notes them beside.

Private API used here: of brimful `Recorder._record` and the name `Recorder` in `brimful.capture.session`; of
torch `torch._C._current_autograd_node` (checked: torch 2.13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from brimful.batches import tensors_in
from brimful.capture import capture_step, session
from brimful.capture.recording.recorder import Recorder
from brimful.cost import step_seconds
from brimful.cost.input_copies import copied_input_bytes, input_copy_seconds
from brimful.cost.queue import finish_seconds
from brimful.cost.roofline import Roofline
from brimful.devices import Device
from brimful.job import Job
from brimful.memory import rounding_bytes_of
from brimful.quantities import round_up
from brimful.settings import Settings
from brimful.trace import Category, EventKind, Phase, Trace
from plan.recompute_bound import Op, Step, Value

SMALL_VALUE_FRACTION = 1e-3
"""Values smaller than this part of all that the forward makes are free: see `step_of`. A choice: fewer values
make the solver faster, and can only lower the bound."""

MAY_WRITE_OVER_INPUT = frozenset(
    {
        "aten.add.Tensor",
        "aten.scatter.src",
        "aten.scatter.value",
        "aten.scatter_add.default",
        "aten.index_add.default",
        "aten.index_put.default",
        "aten.masked_scatter.default",
    }
)
"""Ops of backward that autograd writes in place where nothing else holds the gradient, which may differ between
schedules (`capture/corrections/common/in_place_backward.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """A trace of one step, and the storages of it that each op reads and writes."""

    trace: Trace
    reads: tuple[tuple[int, ...], ...]
    """By op, indices into `trace.storages`; empty for an op that a correction adds."""
    writes: tuple[tuple[int, ...], ...]
    """By op, those that it overwrites or makes."""
    nodes: tuple[int, ...]
    """By op, a number for the autograd node that runs it; -1 if none does, or one written in Python."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ops by index, from forward on: those of one autograd node and those of the optimizer together."""
        ops = self.trace.ops
        keys: list[tuple[str, int]] = []
        for index, op in enumerate(ops):
            together = op.phase is Phase.BACKWARD and self.nodes[index] >= 0
            alone = index if op.phase is not Phase.OPTIMIZER else -1
            keys.append(("node", self.nodes[index]) if together else ("op", alone))
        start = next(index for index, op in enumerate(ops) if op.phase is not Phase.SETUP)
        runs = groupby(range(start, len(ops)), key=keys.__getitem__)
        return tuple(tuple(run) for _, run in runs)


def capture_dataflow(job: Job, settings: Settings, device: Device) -> Dataflow:
    """Capture one step.

    Args:
        job: Without a loop of its own.
        settings: Everything kept, in one micro-batch.
        device: Where it runs.

    Returns:
        The same trace as `capture_step`, with reads and writes.
    """
    made: list[_ReadingRecorder] = []

    def recorder(*args: Any, **options: Any) -> Recorder:
        made.append(_ReadingRecorder(*args, **options))
        return made[-1]

    with mock.patch.object(session, "Recorder", recorder):
        trace = capture_step(job, settings, device, steps=1)
    seen = made[-1]
    empty: tuple[int, ...] = ()
    return Dataflow(
        trace=trace,
        reads=tuple(seen.reads.get(op, empty) for op in range(len(trace.ops))),
        writes=tuple(seen.writes.get(op, empty) for op in range(len(trace.ops))),
        nodes=tuple(seen.nodes.get(op, -1) for op in range(len(trace.ops))),
    )


class _ReadingRecorder(Recorder):
    """A recorder that also notes which blocks each op reads and writes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.reads: dict[int, tuple[int, ...]] = {}
        self.writes: dict[int, tuple[int, ...]] = {}
        self.nodes: dict[int, int] = {}
        self._node: Any = None

    def _record(self, info: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        count = len(self.ops)
        reads = self._blocks(tensors_in((args, kwargs)))
        overwritten = self._blocks(tensors_in(_written_arguments(func, args, kwargs)))
        super()._record(info, func, args, kwargs, result)
        if len(self.ops) > count:
            op = len(self.ops) - 1
            made = {index for index in self._blocks(tensors_in(result.out)) if index not in reads}
            self.reads[op] = tuple(sorted(reads))
            self.writes[op] = tuple(sorted(made | overwritten))
            self.nodes[op] = self._current_node(op)

    def _current_node(self, op: int) -> int:
        """A number for the node of autograd that runs; that of the op before if it is the same one."""
        node, before = torch._C._current_autograd_node(), self._node
        self._node = node
        if node is None or isinstance(node, BackwardCFunction):
            return -1
        return self.nodes.get(op - 1, op) if node is before else op

    def _blocks(self, tensors: Iterable[Tensor]) -> set[int]:
        return {index for tensor in tensors if (index := self.ledger.index_of(tensor)) is not None}


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an op writes to, by its schema."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written.append(value)
    return written


def step_of(dataflow: Dataflow, device: Device) -> Step:
    """The recomputation problem of a captured step; its bound is one of every plan that only recomputes.

    Everything that is simplified takes less memory or less time than it really does:

    * Values are what forward ops make, except for the batch, which no op can make again. All else is held from
      where it is allocated to where an op last reads or writes it (to the end if the step does not free it),
      although Python or autograd may hold it longer.
    * The ops of one autograd node run together: the node holds what it saved while it runs, and asks for all
      of it at its beginning, as torch's own nodes do (the code that is generated for `Functions.cpp` unpacks
      first). Nodes that are written in Python may do otherwise, and their ops are apart.
    * Values below `SMALL_VALUE_FRACTION` of the total take no bytes and are always at hand, so that no op is
      needed for them alone.
    * An op that overwrites its input makes a new value in the same bytes.
    * Sums of gradients, and other ops of `MAY_WRITE_OVER_INPUT`, write over their input.
    * Memory inside a kernel is the largest sum of blocks that the op allocates and frees itself.
    * Blocks are rounded as the allocator rounds them; what it reserves beyond them is not counted.

    Args:
        dataflow: Of one step in one micro-batch, everything kept.
        device: Prices the ops.

    Returns:
        The problem, with the time of the step as it was captured.

    Raises:
        ValueError: The step has copies to the host, waits, or communication, which the bound of time does not
            cover, or several micro-batches.
    """
    trace = dataflow.trace
    if trace.captured_micro_batches > 1 or trace.settings.world_size > 1:
        raise ValueError("the bound is of one micro-batch on one device")
    return _StepBuilder(dataflow, device).built()


class _StepBuilder:
    """Makes the problem of `step_of`."""

    def __init__(self, dataflow: Dataflow, device: Device) -> None:
        self._flow, self._device, trace = dataflow, device, dataflow.trace
        self._trace = trace
        self._start = next(i for i, op in enumerate(trace.ops) if op.phase is not Phase.SETUP)
        rounding = rounding_bytes_of(trace.device_kind)
        self._bytes = [round_up(storage.size_bytes, rounding) for storage in trace.storages]
        self._is_forward = [op.phase is Phase.FORWARD for op in trace.ops]
        self._allocated: dict[int, int] = {}
        self._freed: dict[int, int] = {}
        for event in trace.events:
            (self._allocated if event.kind is EventKind.ALLOCATE else self._freed)[event.storage] = event.op
        self._uses: dict[int, list[int]] = defaultdict(list)
        for op, (reads, writes) in enumerate(zip(dataflow.reads, dataflow.writes, strict=True)):
            for storage in {*reads, *writes}:
                self._uses[storage].append(op)

    def built(self) -> Step:
        """The whole problem."""
        again, late_from, seconds = self._times()
        values, reads, makes, overwrites = self._values()
        standing, extra, temporary = self._other_bytes()
        groups = self._flow.groups
        ops = tuple(
            Op(
                reads=tuple(sorted({value for op in group for value in reads[op]})),
                makes=tuple(value for op in group for value in makes[op]),
                overwrites=tuple(value for op in group for value in overwrites[op]),
                other_bytes=max(int(extra[op]) for op in group),
                standing_bytes=int(standing[group[0]]),
                temporary_bytes=max(int(temporary[op]) for op in group),
                again_seconds=again[group[0] - self._start] if self._is_forward[group[0]] else None,
            )
            for group in groups
        )
        late = sum(group[0] - self._start < late_from for group in groups)
        return Step(ops=ops, values=tuple(values), late_from=late, seconds=seconds)

    def _is_value(self, storage: int) -> bool:
        """Whether a forward op makes it, other than copies of the batch, which no op can make again."""
        made = self._trace.storages[storage]
        return made.op is not None and self._is_forward[made.op] and made.category is not Category.INPUTS

    def _values(
        self,
    ) -> tuple[list[Value], dict[int, list[int]], dict[int, list[int]], dict[int, list[int]]]:
        """The values, and by op those that it reads, makes and overwrites."""
        ops = range(len(self._trace.ops))
        stored = list(filter(self._is_value, self._allocated))
        least = SMALL_VALUE_FRACTION * sum(self._bytes[storage] for storage in stored)
        large = {storage for storage in stored if self._bytes[storage] >= least}
        values: list[Value] = []
        now: dict[int, int] = {}
        reads: dict[int, list[int]] = {op: [] for op in ops}
        makes: dict[int, list[int]] = {op: [] for op in ops}
        overwrites: dict[int, list[int]] = {op: [] for op in ops}
        for op in ops:
            known = [s for s in self._flow.reads[op] if s in large and s in now]
            reads[op] = [now[storage] for storage in known]
            for storage in self._flow.writes[op] if self._is_forward[op] else ():
                if storage in large:
                    if storage in now:
                        overwrites[op].append(now[storage])
                    now[storage] = len(values)
                    makes[op].append(len(values))
                    values.append(Value(op=op - self._start, size_bytes=self._bytes[storage]))
        return values, reads, makes, overwrites

    def _other_bytes(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Bytes that are not values: across the beginning of each op, during it, and inside its kernel."""
        count = len(self._trace.ops)
        across = np.zeros(count + 1, dtype=np.int64)
        during = np.zeros(count + 1, dtype=np.int64)
        for storage, size_bytes in enumerate(self._bytes):
            first = self._allocated.get(storage)
            if first is None or self._is_value(storage):
                continue
            uses, freed = self._uses[storage], self._freed.get(storage)
            is_inside = self._trace.storages[storage].op is None and freed == first and first >= 0
            if is_inside and not uses:
                continue  # inside the kernel
            last = count - 1 if freed is None else max(uses, default=first)
            # Memory that no op made, as a batch, is there before the op after the latest one.
            begins = first + 1 if self._may_begin_later(storage) else first
            if last >= begins:
                during[begins] += size_bytes
                during[last + 1] -= size_bytes
            if last > begins:
                across[begins + 1] += size_bytes
                across[last + 1] -= size_bytes
        temporary = self._kernel_bytes(count)
        standing, held = np.cumsum(across)[:count], np.cumsum(during)[:count]
        return standing, held + temporary, temporary

    def _may_begin_later(self, storage: int) -> bool:
        """Whether a storage is there, in addition, only after the op that is the latest at its allocation."""
        maker = self._trace.storages[storage].op
        if maker is None:
            return True
        op = self._trace.ops[maker]
        return op.phase is Phase.BACKWARD and op.name in MAY_WRITE_OVER_INPUT

    def _kernel_bytes(self, count: int) -> NDArray[np.int64]:
        """The largest sum of blocks that no op makes or reads and that are freed while the op is the latest."""
        live = np.zeros(count, dtype=np.int64)
        most = np.zeros(count, dtype=np.int64)
        for event in self._trace.events:
            storage = event.storage
            is_inside = (
                self._trace.storages[storage].op is None
                and self._allocated[storage] == self._freed.get(storage)
                and not self._uses[storage]
                and event.op >= 0
            )
            if is_inside:
                sign = 1 if event.kind is EventKind.ALLOCATE else -1
                live[event.op] += sign * self._bytes[storage]
                most[event.op] = max(most[event.op], live[event.op])
        return most

    def _input_copy_seconds(self) -> np.ndarray:
        """By op, how long the host waits for a copy of the batch: whatever is recomputed, nothing else runs."""
        copied_bytes = np.zeros(len(self._trace.ops), dtype=np.int64)
        for op, size_bytes in copied_input_bytes(self._trace).items():
            copied_bytes[op] = size_bytes
        return input_copy_seconds(copied_bytes, self._device)[self._start :]

    def _times(self) -> tuple[list[tuple[float, float]], int, float]:
        """What each op costs again before and after the op at which a GPU's host is ahead; that op; the step.

        With S(j) the time at which the host has submitted op j, the step ends at the largest of
        S(j) + work(j) + … + work(last) over j. Let j be where it is largest without recomputation. Whatever is
        recomputed before j is submitted before, and delays S(j) by its launch; what is recomputed after j is
        part of the sum of work. So the step takes longer by at least that. On a CPU times add up.
        """
        trace, total = self._trace, step_seconds(self._trace, self._device)
        roofline = Roofline(self._device, trace.settings.precision)
        ops = trace.ops[self._start :]
        if self._device.kind == "cpu":
            each = [roofline.op_seconds(op) for op in ops]
            return [(seconds, seconds) for seconds in each], 0, total.total_seconds
        host = np.array([roofline.host_seconds(op) for op in ops])
        host += self._input_copy_seconds()
        work = np.array([roofline.work_seconds(op) for op in ops])
        end = float(finish_seconds(host, work)[-1])
        if abs(end - total.total_seconds) > 1e-9 * end:
            raise ValueError("the step waits for copies or other ranks, which the bound does not cover")
        ahead = np.cumsum(host) - (np.cumsum(work) - work)
        return list(zip(host.tolist(), work.tolist(), strict=True)), int(np.argmax(ahead)) + 1, end
