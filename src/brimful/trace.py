"""What one training step does, op by op: the record that capture makes and everything else reads.

A trace knows nothing of torch: it can be saved, compared, scaled to another batch size and planned for a
GPU that is not there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from brimful.errors import UsageError
from brimful.files import write_file
from brimful.kernels import Kernel
from brimful.settings import Settings, settings_from_json, settings_to_json

TRACE_VERSION = 2


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


class Category(StrEnum):
    """What a block of memory holds."""

    PARAMETERS = "parameters"
    """Parameters and buffers."""
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    SAVED_TENSORS = "saved_tensors"
    """What a forward pass leaves for backward."""
    INPUTS = "inputs"
    TEMPORARIES = "temporaries"
    """Everything else: freed in the phase that made it; library workspaces too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel call. Ops that only make views are left out."""

    name: str
    """Name with overload, such as "aten.mm.default"."""
    module: str
    """`fqn` of the module whose forward ran it, or whose forward made the node whose backward runs it."""
    phase: Phase
    step: int
    """Optimizer step, from 0."""
    micro_batch: int
    """Micro-batch within the step, from 0; the last one's index in the optimizer phase."""
    flops: int
    """Floating-point operations of matmuls, convolutions and attention; 0 for others."""
    read_bytes: int
    written_bytes: int
    dtype: str
    """Type the arithmetic is done in, such as "float32"."""
    recomputed: bool = False
    """Runs a second time, during backward, because the first result was not kept."""
    random: bool = False
    """Draws from the random number generator."""
    weight_bytes: int = 0
    """Of a convolution: its weights, which are among what it reads."""
    made_ops_ago: int = 0
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

    size_bytes: int
    """Bytes asked for, before the allocator rounds."""
    category: Category
    op: int | None
    """Index of the op that made it; None for parameters, inputs and workspaces."""
    label: str
    """What it is: a parameter's name, the op that made it, a workspace's name."""
    most_bytes: int | None = None
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
    storage: int
    """Index into `Trace.storages`."""
    op: int
    """Index of the latest op begun: the one that allocates, or after which it is released; -1 in setup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A rule by which the trace was made to say what the target device does, not what this one would do."""

    name: str
    source: str
    """Where the rule is from."""
    occurrences: int
    changed_bytes: int
    """Sum over its occurrences of bytes allocated more (positive) or less; None of it need be at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Some training steps of one job under some settings."""

    job: str
    settings: Settings
    device_kind: str
    """"cuda" or "cpu": whose decisions the ops follow."""
    torch_version: str
    captured_steps: int
    captured_micro_batches: int
    """Micro-batches captured per step; the last one stands for all further ones."""
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    events: tuple[Event, ...]
    module_classes: tuple[tuple[str, str], ...]
    """(`fqn`, class name) of every module that ran, in the order of first call; ("", …) is the model."""
    corrections: tuple[Correction, ...] = ()
    uncertain_ops: tuple[str, ...] = ()
    """Ops whose memory or time is not known well, by name, and why."""
    batch_coupled_modules: tuple[str, ...] = ()
    """Modules whose result for a sample depends on the other samples: BatchNorm in training mode. Splitting a
    batch changes what they compute."""
    is_own_loop: bool = False
    """Whether the job's own loop ran, which decides precision, accumulation and optimizer."""
    sizes_depend_on_values: bool = False
    """Whether values of the batch, such as lengths of sequences, decided sizes: another batch has others."""
    parameter_count: int = 0
    trainable_parameter_count: int = 0
    couples_samples: bool = False
    """Whether the loss is one of all samples of the global batch together (`Job.embed`): what it takes is not
    affine in the micro-batch, and is there however small that is."""

    host_state_bytes: int = 0
    """What is in the host's memory between steps, where the device is another: optimizer state, and with
    `cpu_offload` parts of parameters and gradients."""
    host_staging_bytes: int = 0
    """Pinned memory of the host that gradients and parameters pass through on their way to and from there."""

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
        return TraceLine(self, other).at(micro_batch_size)

    def with_last_step_again(self) -> Trace:
        """This trace as if its last step were run once more, which finds memory as the allocator was left.

        Returns:
            A trace of one step more. What the step makes and does not free, such as a library's workspace, is
            not made again.
        """
        step = self.captured_steps - 1
        first = next((i for i, op in enumerate(self.ops) if op.step == step and op.phase is not Phase.SETUP), 0)
        ops = [replace(op, step=step + 1) for op in self.ops[first:]]
        shift = len(self.ops) - first
        events = [
            event
            for event in self.events
            if event.op >= first
            or (event.op == first - 1 and self.storages[event.storage].category is Category.INPUTS)
        ]
        freed = {event.storage for event in events if event.kind is EventKind.FREE}
        made = [e.storage for e in events if e.kind is EventKind.ALLOCATE and e.storage in freed]
        again = {storage: len(self.storages) + i for i, storage in enumerate(made)}
        storages = [self.storages[storage] for storage in made]
        return replace(
            self,
            captured_steps=self.captured_steps + 1,
            ops=(*self.ops, *ops),
            storages=(
                *self.storages,
                *(s if s.op is None else replace(s, op=s.op + shift) for s in storages),
            ),
            events=(
                *self.events,
                *(
                    Event(kind=event.kind, storage=again[event.storage], op=event.op + shift)
                    for event in events
                    if event.storage in again
                ),
            ),
        )

    def save(self, path: Path | str) -> None:
        """Write the trace as JSON, gzipped if the name ends in ".gz".

        Args:
            path: Is overwritten.

        Raises:
            SaveError: The file cannot be written.
        """
        text = json.dumps(self.to_json(), separators=(",", ":")).encode()
        is_gzipped = Path(path).suffix == ".gz"
        write_file(path, gzip.compress(text, mtime=0) if is_gzipped else text)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """The trace that `save` wrote.

        Args:
            path: Gzipped if the name ends in ".gz".

        Returns:
            A trace equal to the one saved.

        Raises:
            UsageError: The file is no trace of this version.
        """
        try:
            raw = Path(path).read_bytes()
            document = json.loads(gzip.decompress(raw) if Path(path).suffix == ".gz" else raw)
            version = document["brimful_trace"]
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            raise UsageError(f"{path} is no brimful trace: {error}") from error
        if version != TRACE_VERSION:
            raise UsageError(f"{path} is a trace of version {version}; this brimful reads {TRACE_VERSION}.")
        return cls.from_json(document)

    def to_json(self) -> dict[str, Any]:
        """A JSON document; ops, storages and events are tables of rows to keep it small."""
        document: dict[str, Any] = {"brimful_trace": TRACE_VERSION}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _TABLES:
                value = _to_table(value, _TABLES[field.name])
            elif field.name == "settings":
                value = settings_to_json(value)
            document[field.name] = value
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Trace:
        """The trace that `to_json` wrote."""
        # what traces of this version may lack
        later = {"couples_samples": False, "host_state_bytes": 0, "host_staging_bytes": 0}
        values = {field.name: (later | document)[field.name] for field in fields(cls)}
        for name, row in _TABLES.items():
            values[name] = _from_table(values[name], row)
        values["settings"] = settings_from_json(values["settings"])
        values["module_classes"] = tuple((fqn, name) for fqn, name in values["module_classes"])
        values["uncertain_ops"] = tuple(values["uncertain_ops"])
        values["batch_coupled_modules"] = tuple(values["batch_coupled_modules"])
        return cls(**values)


class TraceLine:
    """One step at every micro-batch size: the line through the captures at two.

    Args:
        small: A trace.
        large: The same job under the same settings at another micro-batch size.

    Raises:
        UsageError: The two run different ops, or have the same micro-batch size.
    """

    def __init__(self, small: Trace, large: Trace) -> None:
        self.small, self.large = small, large
        self._sizes = at_small, at_large = small.settings.micro_batch_size, large.settings.micro_batch_size
        if at_small == at_large or not small.has_same_shape_as(large):
            raise UsageError(
                f"cannot scale {small.job!r} from micro-batches of {at_small} and {at_large} samples: "
                "the captures run different ops, or have one size."
            )
        works = [(_work(a), _work(b)) for a, b in zip(small.ops, large.ops, strict=True)]
        self.changing_ops = tuple(i for i, (a, b) in enumerate(works) if a != b)
        """Indices of those whose work depends on the size."""
        self._works = tuple(works[i] for i in self.changing_ops)
        self.changing_storages = tuple(
            i
            for i, (a, b) in enumerate(zip(small.storages, large.storages, strict=True))
            if (a.size_bytes, a.most_bytes, a.kernel) != (b.size_bytes, b.most_bytes, b.kernel)
        )
        """Indices of those whose bytes do."""
        self._latest: Trace | None = None

    def at(self, micro_batch_size: int) -> Trace:
        """The trace at a size; see `Trace.at_micro_batch_size`."""
        if self._latest is None or self._latest.settings.micro_batch_size != micro_batch_size:
            self._latest = self._at(micro_batch_size)
        return self._latest

    def _at(self, micro_batch_size: int) -> Trace:
        at_small, at_large = self._sizes

        def line(a: int, b: int) -> int:
            return a + (b - a) * (micro_batch_size - at_small) // (at_large - at_small)

        # Blocks of a model are alike, so there are few different works.
        scaled = {(a, b): tuple(map(line, a, b)) for a, b in set(self._works)}
        ops, storages = list(self.small.ops), list(self.small.storages)
        for i, work in zip(self.changing_ops, self._works, strict=True):
            ops[i] = ops[i].with_work(*scaled[work])
        for i in self.changing_storages:
            storages[i] = _scaled_storage(storages[i], self.large.storages[i], line)
        corrections = zip(self.small.corrections, self.large.corrections, strict=True)
        return replace(
            self.small,
            settings=replace(self.small.settings, micro_batch_size=micro_batch_size),
            ops=tuple(ops),
            storages=tuple(storages),
            corrections=tuple(
                replace(a, changed_bytes=line(a.changed_bytes, b.changed_bytes)) for a, b in corrections
            ),
        )


def _work(op: Op) -> tuple[int, int, int]:
    return op.flops, op.read_bytes, op.written_bytes


def _scaled_storage(a: Storage, b: Storage, line: Callable[[int, int], int]) -> Storage:
    """A storage on the line through its sizes in two traces."""
    if a.kernel is not None and b.kernel is not None:
        kernel = a.kernel.scaled(b.kernel, line)
        return replace(a, size_bytes=kernel.size_bytes(), kernel=kernel)
    size_bytes = line(a.size_bytes, b.size_bytes)
    if a.most_bytes is None or b.most_bytes is None:
        return a if size_bytes == a.size_bytes else replace(a, size_bytes=size_bytes)
    return replace(a, size_bytes=size_bytes, most_bytes=line(a.most_bytes, b.most_bytes))


_TABLES: dict[str, type[Any]] = {
    "ops": Op,
    "storages": Storage,
    "events": Event,
    "corrections": Correction,
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "phase": Phase,
    "category": Category,
    "kind": EventKind,
    "kernel": lambda cell: Kernel(name=cell[0], numbers=tuple(cell[1])),
}
"""What a cell of a column stands for."""


def _to_cell(value: Any) -> Any:
    return [value.name, value.numbers] if isinstance(value, Kernel) else value


def _to_table(records: tuple[Any, ...], row: type[Any]) -> dict[str, Any]:
    columns = [field.name for field in fields(row)]
    return {
        "columns": columns,
        "rows": [[_to_cell(getattr(record, column)) for column in columns] for record in records],
    }


def _from_table(table: dict[str, Any], row: type[Any]) -> tuple[Any, ...]:
    columns = table["columns"]
    readers = [_READERS.get(column) for column in columns]
    return tuple(
        row(
            **{
                column: value if value is None or read is None else read(value)
                for column, read, value in zip(columns, readers, values, strict=True)
            }
        )
        for values in table["rows"]
    )
