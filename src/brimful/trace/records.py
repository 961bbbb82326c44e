"""One training step, op by op: the record that capture makes and all later stages read.

A trace does not depend on torch: it can be saved, compared, scaled to another batch size and planned for a GPU
that is not in this machine. Methods of `Trace` that need more than its fields import `file_format`, `scaling`
or `derive`, which build on the records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, structs

from brimful.codec import NonNegativeInt, PositiveInt
from brimful.settings import Settings
from brimful.trace.kernel_memory import Kernel

_Name = Annotated[str, Meta(max_length=4096)]
"""Python refuses to convert a number of more than 4300 digits, and names may have numbers in them."""


class Phase(StrEnum):
    """The part of a step that an op runs in."""

    SETUP = "setup"
    """Before the first step: parameters, buffers and, where it is created early, optimizer state."""
    EMBEDDING = "embedding"
    """For a loss that couples the micro-batches: their forwards without gradients, and the loss of all
    embeddings with its gradient."""
    FORWARD = "forward"
    """The model and its loss."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """Unscaling, clipping, the optimizer's step, clearing gradients."""
    EVALUATION = "evaluation"
    """A forward pass without gradients, in evaluation mode, after the last step.

    Of a watched run also between steps, and with a graph that no backward uses.
    """


class Guess(StrEnum):
    """Assumption of a capture about unknown values that decide sizes."""

    EXPECTED = "expected"
    """Rows that choose among options, such as tokens among experts, choose all of them equally often. A mask of
    unknown values is true everywhere."""
    MOST = "most"
    """Each option is chosen once, and all other rows choose the same one. A mask is true everywhere."""
    LEAST = "least"
    """All rows choose the same option. A mask is true nowhere."""


class Category(StrEnum):
    """Contents of a block of memory."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    SAVED_TENSORS = "saved_tensors"
    """Tensors that a forward pass saves for backward."""
    INPUTS = "inputs"
    OTHER_TENSORS = "other_tensors"
    """Tensors outside of the model that the step reads, such as a teacher's weights or a table in the loss."""
    TEMPORARIES = "temporaries"
    """Everything else: tensors freed in the phase that made them, and library workspaces."""


# Traces have hundreds of thousands of ops, storages and events. Compared with a frozen dataclass, a `Struct`
# takes a sixth of the time to make, a thirtieth to change by `structs.replace`, a twentieth to compare.


class Op(Struct, frozen=True, kw_only=True, gc=False):
    """One kernel call. Ops that only make views are not recorded."""

    name: str
    """Name with overload, such as "aten.mm.default"."""
    module: _Name
    """`fqn` of the module whose forward ran it, or created the autograd node whose backward runs it."""
    phase: Phase
    step: NonNegativeInt
    """Optimizer step, from 0."""
    micro_batch: NonNegativeInt
    """Micro-batch within the step, from 0; the last one's index in the optimizer phase."""
    flops: NonNegativeInt
    """Floating-point operations of matmuls, convolutions and attention; 0 for others."""
    read_bytes: NonNegativeInt
    written_bytes: NonNegativeInt
    dtype: str
    """Type of the arithmetic, such as "float32"."""
    recomputed: bool = False
    """Whether it is a recomputation during backward, because the first result was not kept."""
    random: bool = False
    """Whether it draws from a random number generator."""
    weight_bytes: NonNegativeInt = 0
    """For a convolution: bytes of its weights, which are part of `read_bytes`."""
    made_ops_ago: NonNegativeInt = 0
    """For an in-place op in forward or backward: number of ops since the one that made the tensor it
    overwrites; 0 if no op made it, as for a parameter."""
    on_host: bool = False
    """Whether it runs on the host, in host memory, while the device is a GPU."""
    compiled: bool = False
    """Whether code that Inductor made runs it, without Python of modules and autograd around it."""
    extents: tuple[NonNegativeInt, ...] = ()
    """The problem size of the kernel, where it decides its speed; `trace.extents.extents_of` gives names."""
    line: str = ""
    """Line of Python code that calls it, as "file.py:12", for ops that make large tensors; for backward ops the
    line of the forward op."""


class Storage(Struct, frozen=True, kw_only=True, gc=False):
    """One block of memory, shared by all tensors that view it."""

    size_bytes: NonNegativeInt
    """Requested bytes, before the allocator rounds."""
    category: Category
    op: NonNegativeInt | None
    """Index of the op that made it; None for parameters, inputs and workspaces."""
    label: _Name
    """Description: a parameter's name, the op that made it, or a workspace's name."""
    most_bytes: NonNegativeInt | None = None
    """Largest possible size, if it is an unknown choice of a library; None if the size is known."""
    kernel: Kernel | None = None
    """The kernel that decides its size, if that is not affine in the micro-batch; None if it is."""


class EventKind(StrEnum):
    """Kind of an event."""

    ALLOCATE = "allocate"
    FREE = "free"


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """One allocation or free of a storage."""

    kind: EventKind
    storage: NonNegativeInt
    """Index into `Trace.storages`."""
    op: Annotated[int, Meta(ge=-1)]
    """Index of the latest op: the one that allocates, or after which the storage is freed; -1 in setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A rule that made the trace follow the target device instead of the capturing one."""

    name: str
    source: str
    """Source of the rule."""
    occurrences: NonNegativeInt
    changed_bytes: int
    """Bytes allocated in addition (positive) or less, over all occurrences; not necessarily at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The ops and allocations of some training steps of one job under some settings."""

    job: str
    settings: Settings
    device_kind: Literal["cuda", "cpu"]
    """Kind of device whose kernels the ops follow."""
    torch_version: str
    captured_steps: PositiveInt
    captured_micro_batches: PositiveInt
    """Micro-batches captured per step; the last one represents all further ones."""
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    module_classes: tuple[tuple[_Name, str], ...]
    """(`fqn`, class name) of every module that ran, in the order of first call; ("", …) is the model."""
    corrections: tuple[Correction, ...] = ()
    uncertain_ops: tuple[str, ...] = ()
    """Ops whose memory or time is uncertain, by name, with the reason."""
    batch_coupled_modules: tuple[str, ...] = ()
    """Modules with which splitting a batch changes the results: BatchNorm in training mode, whose output for a
    sample depends on the others, and `stateful_modules`."""
    stateful_modules: tuple[str, ...] = ()
    """State that a forward updates and the next one reads, by name: spectral norm's vectors, a teacher's
    weights, a queue, a temperature; in the model or beside it. BatchNorm's running statistics are not
    included."""
    compiled_lines: tuple[str, ...] = ()
    """Lines that call code compiled by `torch.compile`, as "file.py:12"; that code is traced eagerly."""
    without_gradient: tuple[str, ...] = ()
    """Trainable parameters that backward gives no gradient, so that they are not trained."""
    checkpoints_without_gradient: bool = False
    """Whether reentrant checkpointing ran a region whose input needs no gradient: none is made inside."""
    own_checkpoints: NonNegativeInt = 0
    """Number of forward regions that the model itself recomputes in backward, with torch.utils.checkpoint or
    similar; not counting those that the settings recompute."""
    is_own_loop: bool = False
    """Whether the job's own loop ran, which decides precision, gradient accumulation and optimizer."""
    sizes_are_guessed: bool = False
    """Whether unknown values decided sizes, such as a router's choices or a mask that the model computes."""
    guess: Guess = Guess.EXPECTED
    """Assumption about those values."""
    sizes_depend_on_values: bool = False
    """Whether values of the batch, such as sequence lengths, decided sizes, which differ for another batch."""
    convolves_images: bool = False
    """Whether the step has 2-d or 3-d convolutions, whose speed depends on the memory format."""
    parameter_count: NonNegativeInt = 0
    """Number of parameters before any were quantised, as 4-bit weights have two in a byte."""
    trainable_parameter_count: NonNegativeInt = 0
    couples_samples: bool = False
    """Whether the loss couples all samples of the global batch (`Job.embed`): its memory is not affine in the
    micro-batch, and is needed for any micro-batch size."""

    global_batch: tuple[NonNegativeInt, ...] = ()
    """Indices of storages that hold the samples of the whole global batch; on a CPU, whose memory the batch is
    in."""
    host_state_bytes: NonNegativeInt = 0
    """Bytes in host memory between steps, if the device is a GPU: optimizer state, and with
    `offload_parameters` shards of parameters and gradients."""
    paged_state_bytes: NonNegativeInt = 0
    """Bytes of optimizer state in CUDA's managed memory, which is outside of the allocator."""
    host_staging_bytes: NonNegativeInt = 0
    """Pinned host memory that stages gradients and parameters on their way to and from the host."""

    @property
    def batch_norm_modules(self) -> tuple[str, ...]:
        """BatchNorm layers among `batch_coupled_modules`."""
        stateful = frozenset(self.stateful_modules)
        return tuple(fqn for fqn in self.batch_coupled_modules if fqn not in stateful)

    def has_same_shape_as(self, other: Trace) -> bool:
        """Whether both run the same ops and storages, and sizes depend only on the micro-batch."""
        return (
            not (self.sizes_depend_on_values or other.sizes_depend_on_values)
            and not (self.couples_samples or other.couples_samples)
            and len(self.ops) == len(other.ops)
            and len(self.storages) == len(other.storages)
            and self.events == other.events
            and [rule.name for rule in self.corrections] == [rule.name for rule in other.corrections]
            and all(
                (a.name, a.module, a.phase, a.recomputed) == (b.name, b.module, b.phase, b.recomputed)
                for a, b in zip(self.ops, other.ops, strict=True)
            )
        )

    def at_micro_batch_size(self, other: Trace, micro_batch_size: int) -> Trace:
        """Scale this trace to another micro-batch size, along the line through `self` and `other`.

        Bytes and FLOPs of an op are affine in the micro-batch as long as the ops stay the same, so two captures
        determine every size.

        Args:
            other: The same job under the same settings at another micro-batch size.
            micro_batch_size: Samples in one forward and backward pass.

        Returns:
            The same ops and events with other sizes.

        Raises:
            UsageError: The two traces run different ops, or have the same micro-batch size.
        """
        from brimful.trace.scaling import TraceLine

        return TraceLine(self, other).at(micro_batch_size)

    def with_settings(self, settings: Settings) -> Trace:
        """This trace under other settings that run the same ops, such as more micro-batches.

        Args:
            settings: Settings with the same micro-batch size.

        Returns:
            The same trace with the global batch size of the settings.
        """
        before, after = self.settings.global_batch_size, settings.global_batch_size
        if before == after or not self.global_batch:
            return replace(self, settings=settings)
        storages = list(self.storages)
        for index in self.global_batch:
            size_bytes = storages[index].size_bytes * after // before
            storages[index] = structs.replace(storages[index], size_bytes=size_bytes)
        return replace(self, settings=settings, storages=tuple(storages))

    def with_last_step_again(self) -> Trace:
        """This trace with its last step repeated, in the memory as the allocator was left.

        Returns:
            A trace with one more step. What the step makes and does not free, such as a library's workspace, is
            not made again. Where it was one steady step, optimizer state is now made by the first update.
        """
        from brimful.trace.derive import with_last_step_again

        return with_last_step_again(self)

    def save(self, path: Path | str) -> None:
        """Write the trace as JSON, gzipped if the name ends in ".gz".

        Args:
            path: Is overwritten.

        Raises:
            SaveError: The file cannot be written.
        """
        from brimful.trace.file_format import save_trace

        save_trace(self, path)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """The trace that `save` wrote.

        Args:
            path: Gzipped if the name ends in ".gz"; at most 1 GiB are read, compressed or not.

        Returns:
            A trace equal to the one saved.

        Raises:
            FileFormatError: The file cannot be read, is too large, or is not a trace of this version.
        """
        from brimful.trace.file_format import load_trace

        return load_trace(path)

    def to_json(self) -> dict[str, Any]:
        """A JSON document; ops, storages and events are tables of rows to keep it small."""
        from brimful.trace.file_format import encode_trace

        return encode_trace(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Trace:
        """The trace that `to_json` wrote.

        Args:
            document: As read from JSON.

        Returns:
            A trace equal to the one written.

        Raises:
            FileFormatError: The document is not a trace of this version.
        """
        from brimful.trace.file_format import decode_trace

        return decode_trace(json.dumps(document).encode())
