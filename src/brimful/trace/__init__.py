"""The record of one training step, which all later stages read. It does not import torch.

A `Trace` lists the operators of a step and each allocation and free, with their modules, phases and categories.
It can be saved as JSON and planned on another machine. Start reading at `records.Trace`.

| module | input → output |
|---|---|
| `records` | the frozen records |
| `file_format`, `consistency` | a trace → JSON and back; what is wrong with one that was read |
| `scaling` | traces of two micro-batch sizes → the trace of any size |
| `modules`, `saved_tree` | a trace → its modules; what each of them saves |
| `units` | a trace → the units that a planner may keep, recompute or offload |
| `derive` | traces → those of one micro-batch, of one step more, of a step with recomputation |
| `ddp`, `zero`, `edit` | a trace of one process → the trace of one rank under DDP or DeepSpeed ZeRO |
| `kernel_memory` | sizes of an operator → memory that its CUDA kernels allocate internally |
"""

from brimful.trace.ddp import per_rank_trace
from brimful.trace.kernel_memory import CUBLAS_WORKSPACE, Kernel, reduction_kernels
from brimful.trace.modules import own_checkpointed_units, own_checkpoints, unit_of_each_op
from brimful.trace.records import (
    Category,
    Correction,
    Event,
    EventKind,
    Guess,
    Op,
    Phase,
    Storage,
    Trace,
)
from brimful.trace.scaling import TraceLine
from brimful.trace.units import (
    divide_unit,
    find_units,
    in_nested_runs,
    in_runs,
    join_input_ops,
    paired,
    undivided,
)

__all__ = [
    "CUBLAS_WORKSPACE",
    "Category",
    "Correction",
    "Event",
    "EventKind",
    "Guess",
    "Kernel",
    "Op",
    "Phase",
    "Storage",
    "Trace",
    "TraceLine",
    "divide_unit",
    "find_units",
    "in_nested_runs",
    "in_runs",
    "join_input_ops",
    "own_checkpointed_units",
    "own_checkpoints",
    "paired",
    "per_rank_trace",
    "reduction_kernels",
    "undivided",
    "unit_of_each_op",
]
