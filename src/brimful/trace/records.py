"""What one training step does, op by op: the record that capture makes and everything else reads.

A trace knows nothing of torch: it can be saved, compared, scaled to another batch size and planned for a
GPU that is not there.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from brimful.codec import (
    DOCUMENT_BYTES,
    NonNegativeInt,
    PositiveInt,
    decode_directly,
    fields_of_version,
    missing_field,
    parse_json,
    read_regular_file,
    unknown_field,
)
from brimful.errors import FileFormatError, UsageError
from brimful.files import write_file
from brimful.quantities import GIB, MIB, format_bytes
from brimful.settings import Settings, Span, settings_from_json, settings_to_json
from brimful.trace.kernel_memory import Kernel

TRACE_VERSION = 2

_VERSION = "brimful_trace"
"""Field of a file with `TRACE_VERSION`."""

TRACE_BYTES = GIB
"""Largest trace that is read, compressed or not. A choice: one of bert-base has 0.7 MiB."""

_MOST_BYTES = 1 << 62
"""Of all storages together: beyond any device, and rounded up they still fit 64 bits."""

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
    """One kernel call. Ops that only make views are left out."""

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
        step = self.captured_steps - 1
        first = next((i for i, op in enumerate(self.ops) if op.step == step and op.phase is not Phase.SETUP), 0)
        ops = [replace(op, step=step + 1) for op in self.ops[first:]]
        shift = len(self.ops) - first
        freed = {event.storage for event in self.events if event.kind is EventKind.FREE and event.op >= first}
        # What the step makes before its first op, such as a saved random state, follows the last op before it.
        events = [
            event
            for event in self.events
            if event.op >= first
            or (
                event.op == first - 1
                and event.storage in freed
                and self.storages[event.storage].category in (Category.INPUTS, Category.TEMPORARIES)
            )
        ]
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
            path: Gzipped if the name ends in ".gz"; at most 1 GiB are read, compressed or not.

        Returns:
            A trace equal to the one saved.

        Raises:
            FileFormatError: The file cannot be read, is too large, or is not a trace of this version.
        """
        content = read_regular_file(path, what="trace", limit_bytes=TRACE_BYTES)
        where = f"the trace {path}"
        return _decoded(_decompressed(content, where) if Path(path).suffix == ".gz" else content, where)

    def to_json(self) -> dict[str, Any]:
        """A JSON document; ops, storages and events are tables of rows to keep it small."""
        document: dict[str, Any] = {_VERSION: TRACE_VERSION}
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
        """The trace that `to_json` wrote.

        Args:
            document: As read from JSON.

        Returns:
            A trace equal to the one written.

        Raises:
            FileFormatError: The document is not a trace of this version.
        """
        return _decoded(json.dumps(document).encode(), "the trace")


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


def _to_cell(value: Any) -> Any:
    return [value.name, value.numbers] if isinstance(value, Kernel) else value


def _to_table(records: tuple[Any, ...], row: type[Any]) -> dict[str, Any]:
    columns = [field.name for field in fields(row)]
    return {
        "columns": columns,
        "rows": [[_to_cell(getattr(record, column)) for column in columns] for record in records],
    }


def _decompressed(content: bytes, where: str) -> bytes:
    text = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            # in parts: a read of many bytes takes their memory first, however few there are
            while len(text) <= TRACE_BYTES and (part := file.read(MIB)):
                text += part
    except (OSError, EOFError, zlib.error) as error:
        raise FileFormatError(f"{where} cannot be decompressed: {error}.") from error
    if len(text) > TRACE_BYTES:
        raise FileFormatError(f"{where} is larger than {format_bytes(TRACE_BYTES)} when decompressed.")
    return bytes(text)


_LATER = (
    "couples_samples",
    "host_state_bytes",
    "host_staging_bytes",
    "stateful_modules",
    "global_batch",
    "compiled_lines",
    "own_checkpoints",
    "sizes_are_guessed",
    "guess",
)
"""Fields that traces of this version may lack."""


def _decoded(content: bytes, where: str) -> Trace:
    """A trace from its JSON, every field checked, then what refers to what."""
    document = decode_directly(content, dict[str, msgspec.Raw], where=where)
    if (version := document.get(_VERSION)) is not None:
        document[_VERSION] = decode_directly(version, int, where=where, path=_VERSION)
    document = fields_of_version(document, _VERSION, TRACE_VERSION, what="trace", where=where)
    values: dict[str, Any] = {}
    for field in fields(Trace):
        if field.name in document:
            values[field.name] = _field_value(document.pop(field.name), field.name, where)
        elif field.name not in _LATER:
            raise missing_field(field.name, where=where)
    if document:
        raise unknown_field(min(document), where=where)
    trace = Trace(**values)
    wrong = _wrong_op(trace) or _wrong_storage(trace) or _wrong_event(trace) or _wrong_unit(trace)
    if wrong is not None:
        raise FileFormatError(f"{where}: {wrong}.")
    return trace


def _field_value(raw: msgspec.Raw, name: str, where: str) -> Any:
    if name in _TABLES:
        return _from_table(raw, name, where)
    if name != "settings":
        return decode_directly(raw, get_type_hints(Trace, include_extras=True)[name], where=where, path=name)
    text = bytes(raw)
    if len(text) > DOCUMENT_BYTES:
        raise FileFormatError(f"{where}: field `settings`: it has {format_bytes(len(text))}.")
    return settings_from_json(parse_json(text, where=where), where=f"{where}: settings")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    columns: tuple[str, ...]
    rows: msgspec.Raw


class _KernelCell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    name: str
    numbers: tuple[NonNegativeInt, ...]


def _from_table(raw: msgspec.Raw, name: str, where: str) -> tuple[Any, ...]:
    record = _TABLES[name]
    table: _Table = decode_directly(raw, _Table, where=where, path=name)
    columns, known = set(table.columns), {field.name for field in fields(record)}
    needed = {field.name for field in fields(record) if field.default is MISSING}
    if len(columns) < len(table.columns) or not needed <= columns <= known:
        found = f"it lacks {min(needed - columns)}" if needed - columns else "one is unknown, or there twice"
        raise FileFormatError(f"{where}: field `{name}.columns`: {found}.")
    row, path = _row_type(table.columns, name), f"{name}.rows"
    try:
        rows = decode_directly(table.rows, list[row], where=where, path=path)  # type: ignore[valid-type]
    except FileFormatError as error:
        raise FileFormatError(_naming_column(str(error), path, table.columns)) from error
    return msgspec.convert(rows, tuple[record, ...], from_attributes=True)  # type: ignore[valid-type]


@lru_cache(maxsize=32)
def _row_type(columns: tuple[str, ...], name: str) -> type[msgspec.Struct]:
    record = _TABLES[name]
    kinds = get_type_hints(record, include_extras=True)
    cells = kinds | ({"kernel": _KernelCell | None} if record is Storage else {})
    return msgspec.defstruct(
        record.__name__,
        [(column, cells[column]) for column in columns],
        array_like=True,
        forbid_unknown_fields=True,
        gc=False,
    )


def _naming_column(message: str, path: str, columns: tuple[str, ...]) -> str:
    """An error of a row's cell with its column's name: `rows[3].phase` rather than `rows[3][2]`."""
    place = re.escape(path) + r"\[(\d+)\]\[(\d+)\]"
    return re.sub(place, lambda found: f"{path}[{found[1]}].{columns[int(found[2])]}", message, count=1)


def _wrong_op(trace: Trace) -> str | None:
    """What is wrong with an op in its place; None if nothing is."""
    step = 0
    for number, op in enumerate(trace.ops):
        last_step = trace.captured_steps - (op.phase is not Phase.EVALUATION)
        if not step <= op.step <= last_step:
            return f"field `ops.rows[{number}].step`: expected {step} to {last_step}, got {op.step}"
        if op.micro_batch >= trace.captured_micro_batches:
            most = trace.captured_micro_batches - 1
            return f"field `ops.rows[{number}].micro_batch`: expected at most {most}, got {op.micro_batch}"
        if op.made_ops_ago > number:
            return f"field `ops.rows[{number}].made_ops_ago`: expected at most {number}, got {op.made_ops_ago}"
        step = op.step
    return None


def _wrong_storage(trace: Trace) -> str | None:
    for number, storage in enumerate(trace.storages):
        if storage.op is not None and storage.op >= len(trace.ops):
            return f"field `storages.rows[{number}].op`: expected less than {len(trace.ops)}, got {storage.op}"
        if storage.kernel is not None and not storage.kernel.is_known:
            return f"field `storages.rows[{number}].kernel`: its name or its numbers are unknown"
    for number, index in enumerate(trace.global_batch):
        if index >= len(trace.storages):
            return f"field `global_batch[{number}]`: expected less than {len(trace.storages)}, got {index}"
    if sum(max(storage.size_bytes, storage.most_bytes or 0) for storage in trace.storages) > _MOST_BYTES:
        return f"field `storages`: they have more than {format_bytes(_MOST_BYTES)} together"
    return None


def _wrong_event(trace: Trace) -> str | None:
    live: set[int] = set()
    allocated: set[int] = set()
    op_count, storage_count, latest = len(trace.ops), len(trace.storages), -1
    for number, event in enumerate(trace.events):
        storage = event.storage
        if not latest <= event.op < op_count:
            return f"field `events.rows[{number}].op`: expected {latest} to {op_count - 1}, got {event.op}"
        if storage >= storage_count:
            return f"field `events.rows[{number}].storage`: expected less than {storage_count}, got {storage}"
        if event.kind is EventKind.FREE:
            if storage not in live:
                return f"field `events.rows[{number}]`: storage {storage} is freed, and is not allocated then"
            live.remove(storage)
        elif storage in allocated:
            return f"field `events.rows[{number}]`: storage {storage} is allocated a second time"
        else:
            live.add(storage)
            allocated.add(storage)
        latest = event.op
    return None


def _wrong_unit(trace: Trace) -> str | None:
    """A run of modules that are not siblings, or that did not run, cannot be a unit of this trace."""
    spans = {number: Span.parse(unit.fqn) for number, unit in enumerate(trace.settings.units)}
    if not any(spans.values()):
        return None
    known = {path for fqn, _ in trace.module_classes for path in accumulate(fqn.split("."), "{}.{}".format)}
    for number, span in spans.items():
        for child in () if span is None else (span.first, span.last):
            assert span is not None
            if "." in child or f"{span.parent}.{child}".removeprefix(".") not in known:
                return f"field `settings.units[{number}].fqn`: no module of the trace is called {child!r} there"
    return None
