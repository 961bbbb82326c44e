"""What one training step does, op by op: the record that capture makes and everything else reads.

A trace knows nothing of torch: it can be saved, compared, scaled to another batch size and planned for a
GPU that is not there. Methods of `Trace` that need more than its fields import `file_format`, `scaling` or
`derive`, which build on the records.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from brimful.codec import NonNegativeInt, PositiveInt
from brimful.settings import Settings
from brimful.trace.kernel_memory import Kernel

_Name = Annotated[str, Meta(max_length=4096)]
"""Python refuses to convert a number of more than 4300 digits, and names may have numbers in them."""


class Phase(StrEnum):
    """Part of the step an op runs in."""

    SETUP = "setup"
    """Before the first step: parameters, buffers and, where it is created early, optimizer state."""
    EMBEDDING = "embedding"
    """Of a loss that couples the micro-batches: their forwards without gradients, and the loss of all
    embeddings with its gradient."""
    FORWARD = "forward"
    """The model and its loss."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    """Unscaling, clipping, the optimizer's step, clearing gradients."""
    EVALUATION = "evaluation"
    """A forward pass without gradients, in evaluation mode, after the last step."""


class Guess(StrEnum):
    """What a capture assumes of values that decide sizes and are not known."""

    EXPECTED = "expected"
    """Rows that choose among options, as tokens among experts, choose all of them equally often. A mask of
    unknown values is true everywhere."""
    MOST = "most"
    """Every option is chosen once, and then each row chooses the same. A mask is true everywhere."""
    LEAST = "least"
    """Each row chooses the same. A mask is true nowhere."""


class Category(StrEnum):
    """What a block of memory holds."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    SAVED_TENSORS = "saved_tensors"
    """What a forward pass leaves for backward."""
    INPUTS = "inputs"
    OTHER_TENSORS = "other_tensors"
    """Tensors outside of the model that the step reads: a teacher's weights, a table in the loss."""
    TEMPORARIES = "temporaries"
    """Everything else: freed in the phase that made it; library workspaces too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel call. Ops that only make views are not recorded."""

    name: str
    """Name with overload, such as "aten.mm.default"."""
    module: _Name
    """`fqn` of the module whose forward ran it, or whose forward made the node whose backward runs it."""
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
    """Type the arithmetic is done in, such as "float32"."""
    recomputed: bool = False
    """Runs a second time, during backward, because the first result was not kept."""
    random: bool = False
    """Draws from the random number generator."""
    weight_bytes: NonNegativeInt = 0
    """Of a convolution: its weights, which are among what it reads."""
    made_ops_ago: NonNegativeInt = 0
    """Of an op in place, in forward or backward: how many ops before it the one was that made what it writes
    over; 0 if none made it, as no op made a parameter."""
    on_host: bool = False
    """Runs on the host, in its memory, where the device is another."""
    line: str = ""
    """Where in the user's or a library's Python code it is called, as "file.py:12", for ops that make large
    tensors; for those of backward, where the forward op was called."""

    def with_work(self, flops: int, read_bytes: int, written_bytes: int) -> Op:
        """The same op with another amount of work, at half the price of `dataclasses.replace`."""
        return Op(
            name=self.name,
            module=self.module,
            phase=self.phase,
            step=self.step,
            micro_batch=self.micro_batch,
            flops=flops,
            read_bytes=read_bytes,
            written_bytes=written_bytes,
            dtype=self.dtype,
            recomputed=self.recomputed,
            random=self.random,
            weight_bytes=self.weight_bytes,
            made_ops_ago=self.made_ops_ago,
            on_host=self.on_host,
            line=self.line,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One block of memory, shared by all tensors that view it."""

    size_bytes: NonNegativeInt
    """Bytes asked for, before the allocator rounds."""
    category: Category
    op: NonNegativeInt | None
    """Index of the op that made it; None for parameters, inputs and workspaces."""
    label: _Name
    """What it is: a parameter's name, the op that made it, a workspace's name."""
    most_bytes: NonNegativeInt | None = None
    """The most it may be, where its size is a library's choice that cannot be known; None where it is known."""
    kernel: Kernel | None = None
    """What decides its size, where that is not affine in the micro-batch; None where it is."""


class EventKind(StrEnum):
    """What happens to a storage."""

    ALLOCATE = "allocate"
    FREE = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One allocation or release, in the order they happen."""

    kind: EventKind
    storage: NonNegativeInt
    """Index into `Trace.storages`."""
    op: Annotated[int, Meta(ge=-1)]
    """Index of the latest op begun: the one that allocates, or after which it is released; -1 in setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A rule by which the trace was made to say what the target device does, not what this one would do."""

    name: str
    source: str
    """Where the rule is from."""
    occurrences: NonNegativeInt
    changed_bytes: int
    """Sum over its occurrences of bytes allocated more (positive) or less; None of it need be at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Some training steps of one job under some settings."""

    job: str
    settings: Settings
    device_kind: Literal["cuda", "cpu"]
    """Whose decisions the ops follow."""
    torch_version: str
    captured_steps: PositiveInt
    captured_micro_batches: PositiveInt
    """Micro-batches captured per step; the last one stands for all further ones."""
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    module_classes: tuple[tuple[_Name, str], ...]
    """(`fqn`, class name) of every module that ran, in the order of first call; ("", …) is the model."""
    corrections: tuple[Correction, ...] = ()
    uncertain_ops: tuple[str, ...] = ()
    """Ops whose memory or time is not known well, by name, and why."""
    batch_coupled_modules: tuple[str, ...] = ()
    """Modules because of which splitting a batch changes what is computed: BatchNorm in training mode, whose
    result for a sample depends on the others, and `stateful_modules`."""
    stateful_modules: tuple[str, ...] = ()
    """Those that change their buffers in each forward, such as spectral norm, and what the loss changes outside
    of the model. BatchNorm is not among them."""
    compiled_lines: tuple[str, ...] = ()
    """Where code for `torch.compile` is called, as "file.py:12"; it is traced as it runs eagerly."""
    own_checkpoints: NonNegativeInt = 0
    """Regions of a forward pass that the model itself runs again in backward, by torch.utils.checkpoint or its
    like; those that the settings recompute are not among them."""
    is_own_loop: bool = False
    """Whether the job's own loop ran, which decides precision, accumulation and optimizer."""
    sizes_are_guessed: bool = False
    """Whether values that are not known decided sizes, such as a router's choices or a mask that the model
    computes."""
    guess: Guess = Guess.EXPECTED
    """What was assumed of them."""
    sizes_depend_on_values: bool = False
    """Whether values of the batch, such as lengths of sequences, decided sizes: another batch has others."""
    parameter_count: NonNegativeInt = 0
    trainable_parameter_count: NonNegativeInt = 0
    couples_samples: bool = False
    """Whether the loss is one of all samples of the global batch together (`Job.embed`): what it takes is not
    affine in the micro-batch, and is there however small that is."""

    global_batch: tuple[NonNegativeInt, ...] = ()
    """Indices of storages that hold the samples of the global batch, all micro-batches of it: of a CPU, whose
    memory the batch is in."""
    host_state_bytes: NonNegativeInt = 0
    """What is in the host's memory between steps, where the device is another: optimizer state, and with
    `offload_parameters` parts of parameters and gradients."""
    host_staging_bytes: NonNegativeInt = 0
    """Pinned memory of the host that gradients and parameters pass through on their way to and from there."""

    @property
    def batch_norm_modules(self) -> tuple[str, ...]:
        """BatchNorm layers among `batch_coupled_modules`."""
        stateful = frozenset(self.stateful_modules)
        return tuple(fqn for fqn in self.batch_coupled_modules if fqn not in stateful)

    def has_same_shape_as(self, other: Trace) -> bool:
        """Whether both run the same ops and make the same storages, and only the micro-batch decides sizes."""
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
        """This trace at another micro-batch size, through the line through `self` and `other`.

        Bytes and FLOPs of an op are affine in the micro-batch as long as the ops stay the same, so two
        captures tell every size.

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
        """This trace as one of other settings under which the same ops run, such as more micro-batches.

        Args:
            settings: With the same micro-batch size.

        Returns:
            The same with the global batch as large as the settings say.
        """
        before, after = self.settings.global_batch_size, settings.global_batch_size
        if before == after or not self.global_batch:
            return replace(self, settings=settings)
        storages = list(self.storages)
        for index in self.global_batch:
            size_bytes = storages[index].size_bytes * after // before
            storages[index] = replace(storages[index], size_bytes=size_bytes)
        return replace(self, settings=settings, storages=tuple(storages))

    def with_last_step_again(self) -> Trace:
        """This trace as if its last step were run once more, which finds memory as the allocator was left.

        Returns:
            A trace of one step more. What the step makes and does not free, such as a library's workspace, is
            not made again.
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
