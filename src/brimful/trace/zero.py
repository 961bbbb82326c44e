"""Memory of a step on one rank if DeepSpeed's ZeRO shards the model.

DeepSpeed cannot be run on fake tensors, so the capture of one process is changed by its rules:

| of P bytes of float32 parameters on N ranks | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| parameters | P | P | P/N, and what is gathered for a module while it runs |
| the part that the optimizer steps | P/N | P/N | those P/N |
| gradients before the step | P | P/N | P/N |
| optimizer state | 1/N | 1/N | 1/N |

Beside them are a bucket through which gradients go, which stage 3 keeps, and the flat gradient of the part
while the optimizer steps it: all parameters of a part at once, so its temporaries are as large as the part.

Source: stage_1_and_2.py, stage3.py and partition_parameters.py of DeepSpeed 0.19.8; the table is that of the
ZeRO paper (Rajbhandari et al. 2020, figure 1) for float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from brimful.settings import OptimizerImplementation, Parallelism
from brimful.trace.edit import AFTER, BEFORE, TraceEdit
from brimful.trace.records import Category, Phase, Trace

STAGES = {Parallelism.ZERO1: 1, Parallelism.ZERO2: 2, Parallelism.ZERO3: 3}

BUCKET_ELEMENTS = 13_107_200
"""Elements that are reduced or gathered together: 50 MiB of float32. DeepSpeed's own 500 million are 2 GB. A
choice; not tried on GPUs."""

PREFETCHED_PART = 8
"""Stage 3 gathers ahead of use at most this part of a bucket."""

GLOO_HELD_BUCKETS = 2
"""Buckets that gloo's threads may hold on to at most: there are two, and each has one collective at a time
(ProcessGroupGloo.cpp, runLoop; torch 2.13). Six tenths of a bucket were measured
(benchmarks/results/train_zero.json). NCCL has no such threads."""

_BYTES = 4
"""Bytes of a float32 number; other types are not trained."""


def bucket_elements(elements: int) -> int:
    """Bucket size for a model with `elements` parameters; DeepSpeed needs an even number."""
    return min(BUCKET_ELEMENTS, elements + elements % 2)


def zero_options(parallelism: Parallelism, parameter_count: int) -> dict[str, Any]:
    """Section `zero_optimization` of DeepSpeed's configuration: shard as the stage requires, and nothing else.

    Parameters of every size are sharded and freed after use, because the predicted memory of a stage assumes
    it. `parameter_count` is that of the whole model.
    """
    bucket = bucket_elements(parameter_count)
    return {
        "stage": STAGES[parallelism],
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        # it rounds otherwise under autocast, and replaces F.linear for good
        "memory_efficient_linear": False,
        "stage3_prefetch_bucket_size": bucket // PREFETCHED_PART,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }


def of_one_zero_rank(trace: Trace) -> Trace:
    """The step of one rank, from the trace of one process whose settings say how it is divided.

    What is divided is there in parts, with what DeepSpeed makes beside it.
    """
    division = _Division(trace)
    division.divide_state()
    division.reduce_gradients()
    if trace.settings.parallelism is Parallelism.ZERO3:
        division.divide_parameters()  # what is gathered is freed after gradients are reduced
    division.step_parts()
    paged_bytes = -(-trace.paged_state_bytes // trace.settings.world_size)
    return replace(division.edit.result(), paged_state_bytes=paged_bytes)


@dataclass(slots=True)
class _MicroBatch:
    """Where the ops of a forward and a backward pass are."""

    step: int
    number: int
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


class _Division:
    """What DeepSpeed divides among the ranks of a trace, and what it adds."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ranks = trace.settings.world_size
        self._stage = STAGES[trace.settings.parallelism]
        self.edit = TraceEdit(trace, "DeepSpeed's")
        self._copies = 2 if trace.device_kind == "cpu" else 1
        """Gloo works on a flat copy of what it gathers and of what it is to scatter."""
        gradients = [
            i
            for i, storage in enumerate(trace.storages)
            if storage.category is Category.GRADIENTS and storage.op is not None
        ]
        of_setup = [i for i in gradients if trace.ops[_maker(self._trace, i)].phase is Phase.SETUP]
        self._gradients = [i for i in gradients if trace.ops[_maker(self._trace, i)].phase is not Phase.SETUP]
        for i in of_setup:  # what the optimizer's state is made with
            self.edit.resize(i, 0)
        last = trace.captured_steps - 1
        of_last = [i for i in self._gradients if trace.ops[_maker(self._trace, i)].step == last]
        self._total_bytes = sum(trace.storages[i].size_bytes for i in of_last)
        self._trained = {trace.storages[i].label for i in of_last}
        self._whole_bytes = self._most_whole_bytes()
        """Most that parameters of which a rank steps a part take together."""
        self._bucket_bytes = _BYTES * bucket_elements(trace.parameter_count)

    def _most_whole_bytes(self) -> int:
        part = self._part(self._total_bytes)
        touched, begins = [0] * self._ranks, 0
        for storage in self._trace.storages:
            if storage.category is Category.PARAMETERS and storage.label in self._trained:
                ends = begins + storage.size_bytes
                for rank in range(begins // part, min((ends - 1) // part + 1, self._ranks)):
                    touched[rank] += storage.size_bytes
                begins = ends
        return max(touched)

    def _part(self, size_bytes: int) -> int:
        return math.ceil(size_bytes / self._ranks / _BYTES) * _BYTES

    def divide_state(self) -> None:
        """Each rank has its part of the optimizer state, and steps its part of the parameters."""
        sizes = {storage.size_bytes for storage in self._trace.storages if storage.label in self._trained}
        sizes -= {_BYTES}
        for i, storage in enumerate(self._trace.storages):
            if storage.category is Category.OPTIMIZER_STATE and storage.size_bytes in sizes:
                self.edit.resize(i, self._part(storage.size_bytes))
        if self._stage < 3:
            since = (-1, AFTER)
            self.edit.hold(self._part(self._total_bytes), Category.PARAMETERS, "part to step", since, None)

    def divide_parameters(self) -> None:
        """Each rank has its part of each parameter, and gathers a module's while it runs."""
        of_module: defaultdict[str, int] = defaultdict(int)
        for i, storage in enumerate(self._trace.storages):
            if storage.category is Category.PARAMETERS and storage.label in self._trained:
                self.edit.resize(i, self._part(storage.size_bytes))
                of_module[storage.label.rpartition(".")[0]] += storage.size_bytes
        for each in _micro_batches(self._trace):
            for ops in (each.forward, each.backward):
                for module, size_bytes in of_module.items():
                    self._gather(module, size_bytes, ops)
            ahead = self._bucket_bytes // PREFETCHED_PART * self._copies
            since, until = (each.forward[0], BEFORE), (each.backward[-1], BEFORE)
            self.edit.hold(ahead, Category.PARAMETERS, "parameters gathered ahead", since, until)

    def _gather(self, module: str, size_bytes: int, ops: list[int]) -> None:
        ran = [i for i in ops if _is_within(self._trace.ops[i].module, module)]
        while not ran and module:  # its parameters are used by the module around it
            module = module.rpartition(".")[0]
            ran = [i for i in ops if _is_within(self._trace.ops[i].module, module)]
        if ran:
            first, last = (ran[0], BEFORE), (ran[-1], AFTER)
            self.edit.hold(size_bytes, Category.PARAMETERS, f"gathered {module}", first, last)
            copies = size_bytes * self._copies
            self.edit.hold(copies, Category.TEMPORARIES, f"copies of {module}", first, (ran[0], AFTER))

    def reduce_gradients(self) -> None:
        """Gradients go through a bucket, and each rank keeps its part: at once, or under stage 1 at the end."""
        if self._stage == 3:
            part = self._part(self._total_bytes)
            for label, size_bytes in (("bucket", self._bucket_bytes), ("part of the gradients", part)):
                self.edit.hold(size_bytes, Category.GRADIENTS, label, (-1, AFTER), None)
        if self._trace.device_kind == "cpu":
            most = GLOO_HELD_BUCKETS * self._bucket_bytes
            since = (-1, AFTER)
            self.edit.hold(0, Category.TEMPORARIES, "buckets in gloo", since, None, most_bytes=most)
        last_of_step = {each.step: each.number for each in _micro_batches(self._trace)}
        for each in _micro_batches(self._trace):
            ends = (each.backward[-1], AFTER)
            in_backward = set(each.backward)
            made = [i for i in self._gradients if _maker(self._trace, i) in in_backward]
            if self._stage > 1:
                for i in made:
                    self.edit.free(i, _maker(self._trace, i))
            elif last_of_step[each.step] == each.number:
                of_step = [
                    i for i in self._gradients if self._trace.ops[_maker(self._trace, i)].step == each.step
                ]
                for i in of_step:
                    self.edit.free(i, ends[0])
            if self._stage > 1 or last_of_step[each.step] == each.number:
                copies = min(self._bucket_bytes, self._total_bytes) * (self._copies if self._stage == 3 else 1)
                self.edit.hold(copies, Category.TEMPORARIES, "copy of the bucket", ends, ends)
            if self._stage < 3:
                self._keep_part(each, is_last=last_of_step[each.step] == each.number)
                since = (
                    (min(_maker(self._trace, i) for i in made), AFTER) if made else (each.backward[0], BEFORE)
                )
                self.edit.hold(self._bucket_bytes, Category.GRADIENTS, "bucket", since, ends)

    def _keep_part(self, each: _MicroBatch, *, is_last: bool) -> None:
        """What a rank keeps of gradients: whole ones, of all parameters of which it steps a part."""
        if self._stage == 1 and not is_last:
            return
        begins, ends = (each.backward[0], BEFORE), (each.backward[-1], AFTER)
        since = begins if self._stage == 2 and self._total_bytes > self._bucket_bytes else ends
        is_first_of_stage_2 = self._stage == 2 and each.number == 0
        until = (
            (_update_of(self._trace, each.step)[0], BEFORE) if is_first_of_stage_2 or self._stage == 1 else ends
        )
        self.edit.hold(self._whole_bytes, Category.GRADIENTS, "part of the gradients", since, until)

    def step_parts(self) -> None:
        """The optimizer steps its part of all parameters at once."""
        part = self._part(self._total_bytes)
        # a norm or a count is as large as a parameter of one number, and is not divided
        sizes = {self._trace.storages[i].size_bytes for i in self._gradients} - {_BYTES}
        settings = self._trace.settings
        is_one_by_one = settings.optimizer_implementation is OptimizerImplementation.FOR_LOOP or (
            settings.optimizer_implementation is None and self._trace.device_kind == "cpu"
        )
        for i, storage in enumerate(self._trace.storages):
            is_of_update = storage.op is not None and self._trace.ops[storage.op].phase in (
                Phase.OPTIMIZER,
                Phase.SETUP,
            )
            if is_of_update and storage.category is Category.TEMPORARIES and storage.size_bytes in sizes:
                self.edit.resize(i, part if is_one_by_one else self._part(storage.size_bytes))
        for step in range(self._trace.captured_steps):
            begins, *_others, ends = _update_of(self._trace, step)
            self.edit.hold(part, Category.GRADIENTS, "flat gradient", (begins, BEFORE), (ends, AFTER))
            if self._stage < 3 and self._copies > 1:
                at = (ends, AFTER)
                self.edit.hold(self._total_bytes, Category.TEMPORARIES, "copy of what is gathered", at, at)


def _maker(trace: Trace, storage: int) -> int:
    op = trace.storages[storage].op
    assert op is not None
    return op


def _micro_batches(trace: Trace) -> Iterable[_MicroBatch]:
    found: dict[tuple[int, int], _MicroBatch] = {}
    for i, op in enumerate(trace.ops):
        if op.phase in (Phase.FORWARD, Phase.BACKWARD):
            each = found.setdefault((op.step, op.micro_batch), _MicroBatch(step=op.step, number=op.micro_batch))
            (each.forward if op.phase is Phase.FORWARD else each.backward).append(i)
    return found.values()


def _update_of(trace: Trace, step: int) -> list[int]:
    return [i for i, op in enumerate(trace.ops) if op.phase is Phase.OPTIMIZER and op.step == step]


def _is_within(module: str, outer: str) -> bool:
    return not outer or module == outer or module.startswith(f"{outer}.")
