"""What one training step does: the record that every later stage reads. It does not import torch.

A `Trace` lists the operators of a step and each allocation and free, with their modules, phases and categories.
It can be saved as JSON and planned on another machine. Start reading at `records.Trace`.

| module | input → output |
|---|---|
| `records` | the frozen records and their JSON |
| `modules`, `units` | a trace → its module tree; the units that a planner may keep, recompute or offload |
| `derive` | traces of two micro-batch sizes → the trace of any size |
| `ddp`, `zero` | a trace of one process → the trace of one rank under DDP or DeepSpeed ZeRO |
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
    TraceLine,
)
from brimful.trace.units import divide_unit, find_units

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
    "own_checkpointed_units",
    "own_checkpoints",
    "per_rank_trace",
    "reduction_kernels",
    "unit_of_each_op",
]
